"""The learning-rate schedule: captured as plain values, put back so that loading once or five times gives the same.

Works on any scheduler with `state_dict()` and either public attributes of the same names (megatron-core's
OptimizerParamScheduler, whose own `load_state_dict` adds the stored steps to what is there) or a `load_state_dict` that
replaces (torch's). Knows neither files nor optimizers: the learning rates themselves are the optimizer's options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megaresume.errors import FormatError, StateMismatchError, UnsupportedError
from megaresume.state.tree import from_json, kind_of, to_json

# The options of parameter groups that a schedule sets at each of its steps: before a resume they are those of its
# beginning, which is no difference anybody made.
SET_BY_SCHEDULE = frozenset({"lr", "weight_decay"})

_POSITION = "num_steps"
# They shape OptimizerParamScheduler's curve as much as what its state_dict() holds, which leaves them out.
_ALSO_SETTINGS = ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style")
# Where torch's schedulers stand, besides what begins with an underscore; all else in their state is a setting.
_TORCH_POSITIONS = frozenset({"last_epoch", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"})
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")


def capture_scheduler(scheduler: Any | None) -> Any:
    """The scheduler's state as JSON, with the name of its class; None without a scheduler.

    Raises UnsupportedError for a state that holds tensors, which `trainer_state.json` cannot.
    """
    if scheduler is None:
        return None
    state = dict(scheduler.state_dict())
    if _has_position(scheduler):
        state |= {name: getattr(scheduler, name) for name in _ALSO_SETTINGS if hasattr(scheduler, name)}
    tensors: dict[str, torch.Tensor] = {}
    encoded = to_json(state, "scheduler", tensors)
    if tensors:
        raise UnsupportedError(
            f"scheduler state holds tensors ({', '.join(tensors)}); only numbers can stand in trainer_state.json. Give "
            "the optimizer learning rates that are floats"
        )
    return {"kind": type(scheduler).__name__, "state": encoded}


def scheduler_mismatches(saved: Any, scheduler: Any | None) -> list[str]:
    """Why the stored schedule cannot be given to this scheduler; empty where it can.

    Raises FormatError for stored bytes that are no schedule.
    """
    if saved is None and scheduler is None:
        return []
    if saved is None:
        return ["the checkpoint has no scheduler state, this run has a scheduler: it would start its warm-up again"]
    state = _stored_state(saved)
    if scheduler is None:
        return [f"the checkpoint has the state of a {saved['kind']}, this run has no scheduler"]
    if saved["kind"] != type(scheduler).__name__:
        return [f"the scheduler is a {saved['kind']} in the checkpoint, a {type(scheduler).__name__} in this run"]
    return list(_value_mismatches(state, _live_state(scheduler), _position_key(scheduler)))


def _value_mismatches(state: Mapping[str, Any], current: Mapping[str, Any], position: str) -> Iterator[str]:
    if position in current and not (kind_of(state.get(position)) == "number" and math.isfinite(state[position])):
        yield f"scheduler: {position}, where the schedule stood, is {state.get(position)!r} in the checkpoint"
    for key in sorted(state.keys() & current.keys() - {position}):
        before, now = state[key], current[key]
        if kind_of(before) != kind_of(now) and before is not None and now is not None:
            yield f"scheduler: {key} is {before!r} in the checkpoint, {now!r} in this run"
        elif key in _PER_GROUP and (before is None or len(before) != len(now)):
            yield f"scheduler: {key} is {before!r} in the checkpoint, of {len(now)} parameter groups in this run"


def scheduler_differences(saved: Any, scheduler: Any | None, *, keep_run_options: bool) -> list[str]:
    """Settings (not the position) in which the stored schedule differs from the run's, each with the side that wins.

    Call it after `scheduler_mismatches` was empty. Raises StateMismatchError where `keep_run_options` asks for what the
    scheduler cannot do.
    """
    if saved is None or scheduler is None:
        return []
    _check_can_keep(scheduler, keep_run_options)
    state, current = _stored_state(saved), _live_state(scheduler)
    side = "the run's is kept" if keep_run_options else "the checkpoint's is taken"
    lines = [
        f"scheduler: {key} is {value!r} in the checkpoint, {current[key]!r} in this run: {side}"
        for key, value in state.items()
        if key in current and current[key] != value and not _is_position(scheduler, key)
    ]
    lines += [
        f"scheduler: {key} is in the checkpoint, unknown to this run's {type(scheduler).__name__}: left out"
        for key in state
        if key not in current
    ]
    lines += [
        f"scheduler: {key} is not in the checkpoint: the run's {value!r} is kept"
        for key, value in current.items()
        if key not in state
    ]
    return lines


def restore_scheduler(saved: Any, scheduler: Any | None, *, keep_run_options: bool) -> None:
    """Put the stored schedule in place. With `keep_run_options` only the position is taken; the run's settings stay.

    Learning rates of the parameter groups are recomputed from the position only where the run's settings were kept;
    otherwise they are the stored ones already.
    """
    if saved is None or scheduler is None:
        return
    _check_can_keep(scheduler, keep_run_options)
    current = _live_state(scheduler)
    state = {key: value for key, value in _stored_state(saved).items() if key in current}
    if not _has_position(scheduler):
        scheduler.load_state_dict(state)
        return
    for key, value in state.items():
        if key == _POSITION or not keep_run_options:
            setattr(scheduler, key, value)
    if keep_run_options:
        scheduler.step(increment=0)


def _check_can_keep(scheduler: Any, keep_run_options: bool) -> None:
    if keep_run_options and not _has_position(scheduler):
        raise StateMismatchError(
            f"{type(scheduler).__name__} cannot keep the run's settings and take the checkpoint's position: resume "
            "without override_opt_param_scheduler"
        )


def _stored_state(saved: Any) -> Mapping[str, Any]:
    if not isinstance(saved, dict) or type(saved.get("kind")) is not str:
        raise FormatError(f"scheduler: expected an object with kind and state, found {str(saved)[:80]!r}")
    state = from_json(saved.get("state"), {})
    if not isinstance(state, dict):
        raise FormatError(f"scheduler: expected a state that is an object, found {str(state)[:80]!r}")
    return state


def _live_state(scheduler: Any) -> Mapping[str, Any]:
    state: Mapping[str, Any] = from_json(capture_scheduler(scheduler)["state"], {})
    return state


def _has_position(scheduler: Any) -> bool:
    return hasattr(scheduler, _POSITION)


def _position_key(scheduler: Any) -> str:
    return _POSITION if _has_position(scheduler) else "last_epoch"


def _is_position(scheduler: Any, key: str) -> bool:
    if _has_position(scheduler):
        return key == _POSITION
    return key.startswith("_") or key in _TORCH_POSITIONS
