"""Who may ask the run to stop: a signal to this rank, a stop file, the end of the job's time. Saving happens elsewhere,
at a step boundary, on all ranks together.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megaresume.errors import ConfigurationError

logger = logging.getLogger("megaresume.stop")

_LOOK_EVERY_S = 1.0
_MAX_REASON = 200


class StopSignals:
    """Remembers which of the given signals has arrived in this process since `install`; `restore` undoes that."""

    def __init__(self, names: Iterable[str]) -> None:
        try:
            self._signals = [signal.Signals[name] for name in names]
        except KeyError as error:
            raise ConfigurationError(
                f"stop_signals: {error.args[0]!r} is not the name of a signal such as SIGTERM"
            ) from None
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
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
        if os.getpid() == self._pid:
            self.received = signal.Signals(number).name
        else:
            # A forked helper (a pool's worker) inherits this handler but has nothing to save: terminate() must end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class StopSources:
    """All that may ask this rank to stop, asked once per step. What was asked once stays asked."""

    def __init__(
        self, signals: StopSignals, files: Sequence[Path], *, walltime: Callable[[], str | None] = lambda: None
    ) -> None:
        self._signals, self._files, self._walltime = signals, files, walltime
        self._reason: str | None = None
        self._next_look = 0.0

    def asked(self) -> str | None:
        """Who has asked this rank to stop, by a signal or a file; None: nobody. Looks for files once a second."""
        if self._reason is None:
            self._reason = self._signals.received or self._look_for_files()
        return self._reason

    def wanted(self) -> str | None:
        """Why this rank should stop, for people: it was asked to, or time runs out. None where it should go on."""
        if self.asked() is None:
            self._reason = self._walltime()
        return self._reason

    def _look_for_files(self) -> str | None:
        now = time.monotonic()
        if not self._files or now < self._next_look:
            return None
        self._next_look = now + _LOOK_EVERY_S
        for path in self._files:
            if os.path.lexists(path):
                return reason_in(path)
        return None


def reason_in(path: Path) -> str:
    """What the stop file at `path` says; where it says nothing, its being there is what counts."""
    try:
        with path.open("rb") as file:
            text = " ".join(file.read(_MAX_REASON).decode("utf-8", "replace").split())
    except OSError:
        text = ""
    return text or f"stop file {path}"
