"""One rank's watch over what lies outside its training loop: is a stop wanted, is there time to save, who is told?

Brings together the sources of a stop, the pace of the run and what a supervisor asked for. Not collective, and knows no
tensors: the manager agrees with the other ranks and saves.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path

from megaresume import outcome
from megaresume.job import read_job
from megaresume.stop import StopSignals, StopSources
from megaresume.store import fs
from megaresume.store.steplog import read_events
from megaresume.supervised import Heartbeat, read_supervised
from megaresume.walltime import Pace, Walltime, find_job_end, save_seconds, worth_saving

logger = logging.getLogger("megaresume.watch")

_PROGRESS_EVERY_S = 60.0


class Watch:
    """Listens from construction to `release`.

    Rank 0 alone knows the job's end and how long saves take: what it wants, the others hear by the status word.
    """

    def __init__(self, *, rank: int, stop_signals: Iterable[str], job_end: float | None) -> None:
        self._supervised = read_supervised()
        self._signals = StopSignals(stop_signals)
        self._signals.install()
        self._pace = Pace()
        self._walltime = Walltime(find_job_end(job_end) if rank == 0 else None, self._pace)
        self._sources = StopSources(self._signals, self._supervised.stop_files, walltime=self._walltime.near)
        self._heartbeat = Heartbeat(self._supervised.heartbeat_file)
        self._rank = rank
        self._told_at = -math.inf
        self._told_step = 0

    def asked(self) -> str | None:
        """Who has asked this rank to stop; None where nobody has."""
        return self._sources.asked()

    def wanted(self) -> str | None:
        """Why this rank wants to stop; None where it doesn't."""
        return self._sources.wanted()

    def resumed(self, events: Path, step: int) -> None:
        """Training begins at `step`. Rank 0 learns from the event log how long saves took, and forgets an earlier
        outcome: an error that was caught, or that of torchrun's worker before this one."""
        self.beat(f"resumed at step {step}")
        self._told_step = step
        if self._rank != 0:
            return
        for seconds in save_seconds(read_events(events)):
            self._pace.saved(seconds)
        if self._supervised.status_file is not None:
            try:
                fs.unlink(self._supervised.status_file)
            except OSError as error:
                logger.warning("%s: an earlier outcome stays: %s", self._supervised.status_file, error)

    def step_ended(self, step: int) -> None:
        """Count a finished step."""
        self._pace.step_ended(time.monotonic())
        self.beat(f"step {step}")

    def beat(self, what: str) -> None:
        """Tell the supervisor that there is progress."""
        self._heartbeat.beat(what)

    def saved(self, seconds: float, step: int) -> None:
        """Count a save that took so long."""
        self._pace.saved(seconds)
        self._pace.pause()
        self.beat(f"saved step {step}")

    def worth_saving(self, *, recent: bool) -> bool:
        """Whether to begin a save before a stop; see `walltime.worth_saving`. On rank 0, which knows the time."""
        return worth_saving(
            seconds_left=self._walltime.seconds_left(), longest_save=self._pace.longest_save, recent=recent
        )

    def progress(self, *, step: int, loss: float | None, saved_step: int | None) -> None:
        """One line in the log, about once a minute."""
        now = time.monotonic()
        if now - self._told_at < _PROGRESS_EVERY_S:
            return
        steps, seconds = step - self._told_step, now - self._told_at
        pace = f", {seconds / steps:.3g} s per step" if steps > 0 and math.isfinite(seconds) else ""
        left = self._walltime.seconds_left()
        logger.info(
            "step %d: loss %s%s, %s%s",
            step,
            "unknown" if loss is None else f"{loss:.6g}",
            pace,
            "nothing saved yet" if saved_step is None else f"saved at step {saved_step}",
            "" if left is None else f", the job ends in {left:.0f} s",
        )
        self._told_at, self._told_step = now, step

    def ended(self, *, stopped: bool, step: int) -> None:
        """Tell the supervisor that the run ended as it should: finished, or stopped with all saved that could be."""
        word = outcome.STOPPED if stopped else outcome.FINISHED
        self._supervised.report(word, self.wanted() or ("asked of another rank" if stopped else ""), step=step)

    def release(self) -> None:
        """Stop listening."""
        self._signals.restore()


def tell_supervisor(error: BaseException, *, step: int | None, had_committed: bool = False) -> None:
    """Tell the supervisor with which error this rank ends; of several ranks the first one's counts."""
    word = outcome.outcome_of(error, had_committed=had_committed)
    read_supervised().report(word, f"{type(error).__name__}: {error}", step=step)


def describe_job() -> str:
    """Which start of which job this is, for a line in the log; empty outside a job."""
    job = read_job()
    return "" if job.job_id is None else f" (job {job.job_id}, restart {job.restart_count})"
