"""Whether a Slurm job that has ended its run goes back into the queue; and doing it, once.

Slurm itself requeues after a lost node and after a preemption that had to kill. What it does not do is requeue a job
that saved and left in time, for to Slurm that is a success; and it never asks whether a requeue is wanted. The one
handler of all that is here, and it always says why it did not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from megaresume.errors import ConfigurationError
from megaresume.job import slurm_job
from megaresume.launch.records import End, Launch
from megaresume.launch.slurm import JobState, SlurmError, job_state, requeue_job
from megaresume.outcome import CRASHED, EXIT_CODES, STOPPED

logger = logging.getLogger("megaresume.launch.requeue")

WAYS = ("scontrol", "exit-code")
REQUEUED = EXIT_CODES[STOPPED]
NOT_REQUEUED = 76  # stopped, and must stay so
SLURM_FAILED = 71  # to be queued again, but Slurm did not answer: someone has to look
_END_MAY_COME_LATE_S = 5.0


@dataclass(frozen=True)
class Facts:
    """end: how the launch ended; None: without a word, after so many tries. job: Slurm's view now. restarts: the job's
    when this launch began."""

    end: End | None
    tries: int
    job: JobState
    restarts: int
    limit: int


@dataclass(frozen=True)
class Decision:
    """Whether to requeue, and why or why not."""

    requeue: bool
    why: str


def decide(facts: Facts) -> Decision:
    """Requeue only a run that has more to do, of a job that nobody has cancelled or queued again since."""
    if facts.end is not None and facts.end.outcome != STOPPED:
        return Decision(False, f"the run has {facts.end.outcome}: {facts.end.reason or 'all trained'}")
    if facts.end is None and facts.tries == 0:
        return Decision(False, "no try was begun: is megaresume installed on the nodes? The log above may say")
    if facts.job.restarts != facts.restarts:
        return Decision(False, f"this is start {facts.restarts} of the job, and start {facts.job.restarts} has begun")
    if facts.job.state != "RUNNING":
        return Decision(
            False, f"the job is {facts.job.state}: cancelled, out of time, or queued again by Slurm already"
        )
    if facts.restarts >= facts.limit:
        return Decision(False, f"the job was restarted {facts.restarts} times, which is the limit")
    if facts.end is None:
        return Decision(True, "the run ended without a word (its processes were killed)")
    return Decision(True, f"the run has saved and stopped: {facts.end.reason}")


def requeue(launch: Launch, *, environment: Mapping[str, str], limit: int, way: str) -> int:
    """Decide, say it, write it down and do it; returns the exit code for the job script.

    That is the outcome's own code for a run that needs no requeue; 75 where it was requeued, 76 where it was stopped
    and is not, 71 where Slurm failed. Raises ConfigurationError outside a job.
    """
    job = slurm_job(environment)
    if job is None:
        raise ConfigurationError("SLURM_JOB_ID is not set: this is called by a job script, at its end")
    end = _read_end(launch)
    try:
        state = job_state(job)
    except SlurmError as error:
        return _say(launch, Decision(False, f"Slurm cannot be asked about job {job}: {error}"), SLURM_FAILED)
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    decision = decide(Facts(end, len(launch.tries()), state, int(restarts) if restarts.isdigit() else 0, limit))
    if not decision.requeue:
        outcome = CRASHED if end is None else end.outcome
        return _say(launch, decision, NOT_REQUEUED if outcome == STOPPED else EXIT_CODES[outcome])
    # Written down first: scontrol's requeue kills this process within milliseconds.
    code = _say(launch, decision, REQUEUED)
    if way == "scontrol":
        try:
            requeue_job(job)
        except SlurmError as error:
            return _say(launch, Decision(False, f"it should be, but {error}"), SLURM_FAILED)
    return code


def _say(launch: Launch, decision: Decision, code: int) -> int:
    verdict = "queued again" if decision.requeue else "NOT queued again"
    logger.info("%s: %s. Exit code %d", verdict, decision.why.rstrip("."), code)
    try:
        launch.write_requeue(requeued=decision.requeue, why=decision.why, time=time.time())
    except OSError as error:
        logger.warning("%s: %s", launch.directory, error)
    return code


def _read_end(launch: Launch) -> End | None:
    """The launch's end; another host wrote it, and a network file system may show it late."""
    deadline = time.monotonic() + _END_MAY_COME_LATE_S
    while (end := launch.read_end()) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    return end
