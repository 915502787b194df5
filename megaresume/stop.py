"""Signals that ask the run to stop. The handler only remembers; saving happens at a step boundary, on all ranks together."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from megaresume.errors import ConfigurationError

logger = logging.getLogger("megaresume.stop")


class StopSignals:
    """Remembers which of the given signals has arrived in this process since `install`; `restore` gives the old handlers back."""

    def __init__(self, names: Iterable[str]) -> None:
        try:
            self._signals = [signal.Signals[name] for name in names]
        except KeyError as error:
            raise ConfigurationError(
                f"stop_signals: {error.args[0]!r} is not the name of a signal such as SIGTERM"
            ) from None
        self._previous: dict[signal.Signals, Any] = {}
        self.received: str | None = None

    def install(self) -> None:
        """Start listening. Only the main thread may set handlers; elsewhere this says so and does nothing."""
        if self._signals and threading.current_thread() is not threading.main_thread():
            logger.warning("not in the main thread: %s will not be noticed", ", ".join(s.name for s in self._signals))
            return
        for each in self._signals:
            self._previous[each] = signal.signal(each, self._remember)

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for each, handler in self._previous.items():
            if signal.getsignal(each) == self._remember:
                signal.signal(each, handler)
        self._previous.clear()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Nothing else: Python code that logs or locks here can dead-lock with the code it interrupted.
        self.received = signal.Signals(number).name
