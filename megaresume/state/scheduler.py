"""The learning-rate schedule: captured as plain values, put back so that loading once or five times gives the same schedule.

Works on any scheduler with `state_dict()` and either public attributes of the same names (megatron-core's OptimizerParamScheduler,
whose own `load_state_dict` adds the stored steps to what is there) or a `load_state_dict` that replaces (torch's).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from megaresume.errors import StateMismatchError
from megaresume.state.tree import from_json, to_json

logger = logging.getLogger("megaresume.state.scheduler")

_POSITION = "num_steps"


def capture_scheduler(scheduler: Any | None) -> Any:
    """The scheduler's state as JSON, with the name of its class; None without a scheduler."""
    if scheduler is None:
        return None
    tensors: dict[str, torch.Tensor] = {}
    state = to_json(scheduler.state_dict(), "scheduler", tensors)
    if tensors:
        raise StateMismatchError(
            f"scheduler state holds tensors ({', '.join(tensors)}); only numbers can stand in trainer_state.json"
        )
    return {"kind": type(scheduler).__name__, "state": state}


def scheduler_mismatches(saved: Any, scheduler: Any | None) -> list[str]:
    """Why the stored schedule cannot be given to this scheduler; empty where it can."""
    if saved is None and scheduler is None:
        return []
    if saved is None:
        return ["the checkpoint has no scheduler state, this run has a scheduler: it would start its warm-up again"]
    if scheduler is None:
        return [f"the checkpoint has the state of a {saved.get('kind')}, this run has no scheduler"]
    if saved.get("kind") != type(scheduler).__name__:
        return [f"the scheduler is a {saved.get('kind')} in the checkpoint, a {type(scheduler).__name__} in this run"]
    return []


def scheduler_differences(saved: Any, scheduler: Any | None, *, keep_run_options: bool) -> list[str]:
    """Settings (not the position) in which the run's schedule differs from the stored one, each with the side that wins."""
    if saved is None or scheduler is None:
        return []
    current = capture_scheduler(scheduler)["state"]
    side = "the run's is kept" if keep_run_options else "the checkpoint's is taken"
    return [
        f"scheduler: {key} is {value} in the checkpoint, {current.get(key)} in this run: {side}"
        for key, value in saved["state"].items()
        if key in current and current[key] != value and not _is_position(scheduler, key)
    ]


def restore_scheduler(saved: Any, scheduler: Any | None, *, keep_run_options: bool) -> None:
    """Put the stored schedule in place. With `keep_run_options` only the position is taken and the run's settings stay.

    Learning rates of the parameter groups are recomputed from the position only where the run's settings were kept; otherwise they are
    the stored ones already.
    """
    if saved is None or scheduler is None:
        return
    state: Mapping[str, Any] = from_json(saved["state"], {})
    if not _has_position(scheduler):
        if keep_run_options:
            raise StateMismatchError(
                f"{type(scheduler).__name__} cannot keep the run's settings and take the checkpoint's position"
            )
        scheduler.load_state_dict(dict(state))
        return
    for key, value in state.items():
        if key == _POSITION or not keep_run_options:
            setattr(scheduler, key, value)
    if keep_run_options:
        scheduler.step(increment=0)


def _has_position(scheduler: Any) -> bool:
    return hasattr(scheduler, _POSITION)


def _is_position(scheduler: Any, key: str) -> bool:
    return key == _POSITION if _has_position(scheduler) else key in ("last_epoch", "_step_count", "_last_lr")
