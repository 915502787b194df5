"""A save that goes on behind the training: a thread per save, one save at a time, its outcome kept until asked for.

A thread and not a process: what it does (hashing, writing, waiting) is done without the interpreter's lock, and needs
no memory shared between processes; figures are in `docs/explanation/saving.md`. The thread is no daemon: an interpreter
that ends, normally or by an exception, first lets it finish, which the deadlines of the control plane bound. Knows
nothing of what is saved.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from megaresume.errors import MegaresumeError, SaveError
from megaresume.store.commit import SaveReport

logger = logging.getLogger("megaresume.store.writer")

_LOST_SAVE = 70  # EX_SOFTWARE


@dataclass(frozen=True)
class Outcome:
    """What the save of `step`, the `number`-th of this writer, came to: a report or an error."""

    step: int
    number: int
    report: SaveReport | None
    error: MegaresumeError | None


class Writer:
    """Runs saves behind the training. Used from one thread, the training's."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._step = 0
        self._outcome: Outcome | None = None
        self.started = 0
        """How many saves were begun: the number of the last one."""
        atexit.register(self._end_aloud)

    def start(self, step: int, save: Callable[[], SaveReport]) -> None:
        """Begin the save of `step`. The outcome of the one before must have been taken."""
        assert self._thread is None and self._outcome is None, "one save at a time, and no outcome is lost"
        self.started += 1
        self._step = step
        self._thread = threading.Thread(target=self._run, args=(step, save), name=f"save-step-{step}", daemon=False)
        self._thread.start()

    def running(self) -> bool:
        """Whether a save is being written at this moment."""
        return self._thread is not None and self._outcome is None

    def failed(self) -> bool:
        """Whether the save begun last has failed, and nobody has taken that outcome yet."""
        return self._outcome is not None and self._outcome.error is not None

    def take(self, *, wait: bool) -> Outcome | None:
        """The outcome of the save begun last, once; None where none was begun. Without `wait` only a success is taken,
        and None is also the answer to a save that still runs or has failed: of a failure all ranks are to hear at once.
        """
        known = self._outcome
        if self._thread is None or (not wait and (known is None or known.error is not None)):
            return None
        if self._outcome is None:
            logger.info("waiting for the save of step %d, which is still being written", self._step)
            started = time.monotonic()
            self._thread.join()
            logger.info("waited %.2f s for the save of step %d", time.monotonic() - started, self._step)
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        return outcome

    def close(self) -> None:
        """Let go; a save that failed unheard has been told to somebody by now."""
        atexit.unregister(self._end_aloud)

    def _run(self, step: int, save: Callable[[], SaveReport]) -> None:
        report: SaveReport | None = None
        error: MegaresumeError | None = None
        try:
            report = save()
        except MegaresumeError as raised:
            error = raised
        except BaseException as raised:
            logger.error("the save of step %d failed in a way nobody foresaw", step, exc_info=raised)
            error = SaveError(f"save step {step}: {type(raised).__name__}: {raised}")
        if error is not None:
            logger.error("the save of step %d, behind the training, failed: %s", step, error)
        self._outcome = Outcome(step, self.started, report, error)

    def _end_aloud(self) -> None:
        """A program that ends right after its last save must not end with status 0 where that save has failed."""
        outcome = self.take(wait=True)
        if outcome is not None and outcome.error is not None:
            print(f"megaresume: the last save failed: {outcome.error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            logging.shutdown()
            os._exit(_LOST_SAVE)  # nothing else can change the exit status here
