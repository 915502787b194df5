"""When this job will be killed, and how long before that the run has to stop so that its last save is whole.

Learns how long steps and saves take. Decides; saves nothing, and knows no ranks: one rank asks, and the others hear it
by the status word.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime

from megaresume.job import slurm_job

logger = logging.getLogger("megaresume.walltime")

# torchrun ends up to 15 s after its workers; the rest is for clocks and file systems that are a little off.
EXIT_S = 15.0
MARGIN_S = 5.0
UNKNOWN_SAVE_S = 30.0
_SLOWER_SAVE = 1.5  # than the longest one seen
_REMEMBERED_SAVES = 5
_SQUEUE_TIMEOUT_S = 10.0


class Pace:
    """How long the slowest step and the slowest of the last saves took, in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self.longest_step = 0.0
        self._saves: deque[float] = deque(maxlen=_REMEMBERED_SAVES)
        self._mark: float | None = None
        self._warm = False

    def pause(self) -> None:
        """What happens until the next step ends is not part of a step (a save, the resume)."""
        self._mark = None

    def step_ended(self, now: float) -> float | None:
        """Count a step, with whatever came since the one before (evaluation too); returns its seconds if known."""
        seconds = None if self._mark is None else now - self._mark
        self._mark = now
        if seconds is not None:
            # The first one compiles and warms up; stopping early by twice that much would cost the job its time.
            if self._warm:
                self.longest_step = max(self.longest_step, seconds)
            self._warm = True
        return seconds

    def saved(self, seconds: float) -> None:
        """Count a save."""
        self._saves.append(seconds)

    @property
    def longest_save(self) -> float | None:
        """Of the last few saves, those of earlier starts included; None where none is known."""
        return max(self._saves, default=None)


def lead_time(*, longest_step: float, longest_save: float | None) -> float:
    """Seconds before the job's end at which a step must be the last one.

    Two steps, since a stop is agreed on one step after it is wanted and that step may be the slow one; the save;
    torchrun's exit; a margin.
    """
    save = UNKNOWN_SAVE_S if longest_save is None else longest_save
    return 2 * longest_step + _SLOWER_SAVE * save + EXIT_S + MARGIN_S


def worth_saving(*, seconds_left: float | None, longest_save: float | None, recent: bool) -> bool:
    """Whether to begin a save: not where it cannot be finished and a `recent` checkpoint is there to go on from."""
    return seconds_left is None or not recent or seconds_left >= (longest_save or 0.0)


class Walltime:
    """The job's end (Unix seconds; None is unknown) beside the pace of the run."""

    def __init__(self, end: float | None, pace: Pace) -> None:
        self.end, self._pace = end, pace

    def seconds_left(self) -> float | None:
        return None if self.end is None else self.end - time.time()

    def near(self) -> str | None:
        """Why to stop now; None where there is time for another step."""
        left = self.seconds_left()
        if left is None:
            return None
        lead = lead_time(longest_step=self._pace.longest_step, longest_save=self._pace.longest_save)
        if left > lead:
            return None
        save = self._pace.longest_save
        guess = f"{UNKNOWN_SAVE_S:.0f} s by guess" if save is None else f"{save:.1f} s"
        step = self._pace.longest_step
        return f"the job ends in {left:.0f} s: {lead:.0f} s are needed (step {step:.1f} s, save {guess})"


def find_job_end(given: float | None, environment: Mapping[str, str] = os.environ) -> float | None:
    """When this job will be killed, in Unix seconds: SLURM_JOB_END_TIME, else what `squeue` says, else `given`."""
    text = environment.get("SLURM_JOB_END_TIME", "")
    if text.isascii() and text.isdigit() and int(text) > 0:
        return _say(float(text), "SLURM_JOB_END_TIME")
    job = slurm_job(environment)
    if job is not None:
        end = parse_end(_ask_squeue(job))
        if end is not None:
            return _say(end, "squeue")
        logger.info("squeue knows no end of job %s; it is watched only if job_end= is given", job)
    return None if given is None else _say(given, "job_end")


def parse_end(text: str) -> float | None:
    """Unix seconds of what `squeue -o %e` printed, which is local time without a zone; None for N/A and the like."""
    lines = text.split()
    try:
        return datetime.strptime(lines[0], "%Y-%m-%dT%H:%M:%S").timestamp() if len(lines) == 1 else None
    except ValueError:
        return None


def _ask_squeue(job: str) -> str:
    command = ["squeue", "-h", "-j", job, "-o", "%e"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the end of job %s is unknown: %s", job, error)
        return ""


def _say(end: float, source: str) -> float:
    when = datetime.fromtimestamp(end).astimezone().isoformat(timespec="seconds")
    logger.info("this job ends at %s by %s; the run will save in time by itself", when, source)
    return end


def save_seconds(events: Iterable[Mapping[str, object]]) -> list[float]:
    """How long the last saves in an event log took, oldest first."""
    found = [event.get("seconds") for event in events if event.get("event") == "save"]
    return [float(each) for each in found if isinstance(each, (int, float)) and each >= 0][-_REMEMBERED_SAVES:]
