"""Which job this process belongs to and whether a scheduler has started it before: Slurm's and torchrun's environment, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """`job_id` is None outside a scheduler; `restart_count` counts starts of the same job before this one."""

    job_id: str | None
    restart_count: int


def read_job(environment: Mapping[str, str] = os.environ) -> Job:
    """The job of this process. A Slurm array task is a job of its own; torchrun's restarts add to Slurm's."""
    elastic = _count(environment.get("TORCHELASTIC_RESTART_COUNT"))
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID")
    if job:
        return Job(job, _count(environment.get("SLURM_RESTART_COUNT")) + elastic)
    run_id = environment.get("TORCHELASTIC_RUN_ID")
    return Job(run_id if run_id and run_id != "none" else None, elastic)


def _count(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0
