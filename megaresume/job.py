"""Which job this process belongs to and whether it was started before, from the environment that Slurm, torchrun and
`megaresume run` give it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megaresume.supervised import EARLIER_TRIES, RESTARTS_IN_PLACE, RUN_ID


@dataclass(frozen=True)
class Job:
    """`job_id` is None outside a scheduler; `restart_count` counts starts of the same job before this one.

    `requeued` is whether the scheduler itself started the job again, on whatever hosts, with no record in this root
    of an earlier start, and not torchrun or a supervisor that started it again in place.
    """

    job_id: str | None
    restart_count: int
    requeued: bool = False


def read_job(environment: Mapping[str, str] = os.environ) -> Job:
    """The job of this process. A Slurm array task is a job of its own; restarts in place add to Slurm's."""
    in_place = _count(environment.get("TORCHELASTIC_RESTART_COUNT")) + _count(environment.get(RESTARTS_IN_PLACE))
    job = slurm_job(environment)
    if job is not None:
        requeues = _count(environment.get("SLURM_RESTART_COUNT"))
        # Stopped before it came to resume(), an earlier start left no attempt: its record then says that it was here.
        recorded = _count(environment.get(EARLIER_TRIES)) > 0
        return Job(job, requeues + in_place, requeued=requeues > 0 and not recorded)
    run_id = environment.get(RUN_ID) or environment.get("TORCHELASTIC_RUN_ID")
    return Job(run_id if run_id and run_id != "none" else None, in_place)


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """The id of this Slurm job; `array_task` for a task of an array, whose plain id can name the whole array."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
