"""Optimizer state: masters, moments, steps and options, kept under parameter names whatever the optimizer's layout is.

Nothing is known of Adam here. A state value is a tensor, which keeps dtype, shape and place, or a number, which stays one; `step` may
stand per parameter or per group; a parameter without state has none afterwards either. Values are read raw, never unscaled.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megaresume.errors import FormatError
from megaresume.state.description import Live, Optimizer, OptimizerMember
from megaresume.state.tensors import dtype_code, dtype_of
from megaresume.state.tree import from_json, to_json

# Options that a schedule or a person moves during a run: they may differ between checkpoint and run. All others decide what the
# stored moments mean, and must be equal.
SCHEDULED_OPTIONS = frozenset(
    {
        "lr",
        "initial_lr",
        "weight_decay",
        "max_lr",
        "min_lr",
        "lr_mult",
        "wd_mult",
        "start_wd",
        "end_wd",
        "momentum_schedule",
    }
)
# Options that are state: Apex's and TE's FusedAdam count steps per group.
_COUNTED_OPTIONS = frozenset({"step"})


@dataclass
class OptimizerCapture:
    """What one rank stores of its optimizers: tensors by file name, their index entries, and the `optimizers` part of the index."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    index: list[dict[str, Any]] = field(default_factory=list)


def capture_optimizers(live: Live) -> OptimizerCapture:
    """Describe and collect the state of every optimizer of this rank (no copy, no collective)."""
    capture = OptimizerCapture()
    for number, optimizer in enumerate(live.optimizers):
        prefix = f"optim/{number}"
        groups = []
        for group_number, group in enumerate(optimizer.groups):
            options_tensors: dict[str, torch.Tensor] = {}
            options = {key: value for key, value in group.options.items() if key != "params"}
            encoded = to_json(options, f"{prefix}/group{group_number}", options_tensors)
            for name, tensor in options_tensors.items():
                capture.tensors[name] = tensor
                capture.entries[name] = {"parameter": None, "slot": "option", "range": None, "kind": "stored"}
            members = []
            for member in group.members:
                _capture_member(capture, optimizer, member, prefix)
                members.append(
                    {
                        "parameter": member.parameter,
                        "range": [member.start, member.end],
                        "state": _capture_state(capture, optimizer, member, prefix),
                    }
                )
            groups.append({"options": encoded, "members": members})
        capture.index.append({"kind": optimizer.kind, "groups": groups, "scaler": _scaler_state(optimizer.scaler)})
    return capture


def _capture_member(capture: OptimizerCapture, optimizer: Optimizer, member: OptimizerMember, prefix: str) -> None:
    if member.master is not None:
        name = f"{prefix}/master/{member.parameter}"
        capture.tensors[name] = member.master
        capture.entries[name] = _entry(member, "master", ranged=True)


def _capture_state(
    capture: OptimizerCapture, optimizer: Optimizer, member: OptimizerMember, prefix: str
) -> dict[str, dict[str, Any]]:
    """Per state map, slot -> where its value is: {"tensor": name, "place": ...} or {"value": JSON}. A map without an entry is left out."""
    stored: dict[str, dict[str, Any]] = {}
    for map_prefix, state_map in optimizer.state_maps.items():
        if member.key not in state_map:
            continue
        slots: dict[str, Any] = {}
        for slot, value in state_map[member.key].items():
            name = f"{prefix}/{map_prefix}{slot}/{member.parameter}"
            if isinstance(value, torch.Tensor):
                capture.tensors[name] = value
                capture.entries[name] = _entry(
                    member, f"{map_prefix}{slot}", ranged=value.numel() == member.end - member.start
                )
                slots[slot] = {"tensor": name, "place": _place(value)}
            else:
                nested: dict[str, torch.Tensor] = {}
                slots[slot] = {"value": to_json(value, name, nested)}
                for nested_name, tensor in nested.items():
                    capture.tensors[nested_name] = tensor
                    capture.entries[nested_name] = _entry(member, f"{map_prefix}{slot}", ranged=False)
        stored[map_prefix] = slots
    return stored


def _entry(member: OptimizerMember, slot: str, *, ranged: bool) -> dict[str, Any]:
    return {
        "parameter": member.parameter,
        "slot": slot,
        "range": [member.start, member.end] if ranged else None,
        "kind": "stored",
    }


def _place(value: torch.Tensor) -> str:
    # torch keeps an uncaptured `step` on the host whatever the parameter's device; on a host-only run the two look alike, and a
    # zero-dimensional tensor is what the difference is made for.
    return "host" if value.device.type == "cpu" and value.ndim == 0 else "parameter"


def _scaler_state(scaler: Any | None) -> Any:
    if scaler is None:
        return None
    tensors: dict[str, torch.Tensor] = {}
    return {
        key: {"tensor": value.flatten().tolist(), "dtype": dtype_code(value.dtype, f"loss scaler {key}")}
        if isinstance(value, torch.Tensor)
        else {"value": to_json(value, f"scaler/{key}", tensors)}
        for key, value in scaler.state_dict().items()
    }


@dataclass
class OptimizerPlan:
    """Where stored optimizer tensors go. Made without touching anything; `install()` puts the parts that are not read in place."""

    destinations: dict[str, torch.Tensor] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    _states: list[tuple[MutableMapping[Any, dict[str, Any]], torch.Tensor, dict[str, Any] | None]] = field(
        default_factory=list
    )
    _options: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = field(default_factory=list)
    _scalers: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def install(self) -> None:
        """Put states, options and loss scalers in place once all `destinations` are filled."""
        for state_map, key, slots in self._states:
            if slots is None:
                state_map.pop(key, None)
            else:
                state_map[key] = {
                    slot: from_json(where["value"], self.destinations)
                    if "value" in where
                    else self.destinations[where["tensor"]]
                    for slot, where in slots.items()
                }
        for live_options, stored in self._options:
            for name in _COUNTED_OPTIONS - set(stored):
                live_options.pop(name, None)
            for name, value in from_json(stored, self.destinations).items():
                live_options[name] = value
        for scaler, state in self._scalers:
            scaler.load_state_dict(_decode_scaler(state))


def optimizer_mismatches(index: Mapping[str, Any], live: Live) -> list[str]:
    """Every way in which the stored optimizer is not this one (class, groups, members, options that give moments their meaning)."""
    saved = index["optimizers"]
    if len(saved) != len(live.optimizers):
        return [f"the checkpoint holds {len(saved)} optimizers on this rank, this run has {len(live.optimizers)}"]
    problems: list[str] = []
    for number, (stored, optimizer) in enumerate(zip(saved, live.optimizers, strict=True)):
        where = f"optimizer {number}"
        if stored["kind"] != optimizer.kind:
            problems.append(f"{where} is a {stored['kind']} in the checkpoint, a {optimizer.kind} in this run")
            continue
        if (stored["scaler"] is None) != (optimizer.scaler is None):
            has, lacks = ("the checkpoint", "this run") if optimizer.scaler is None else ("this run", "the checkpoint")
            problems.append(f"{where}: {has} has a loss scaler, {lacks} has none (--fp16 differs?)")
        problems += _group_mismatches(where, stored["groups"], optimizer)
    return problems


def _group_mismatches(where: str, saved_groups: list[dict[str, Any]], optimizer: Optimizer) -> list[str]:
    saved_home = {m["parameter"]: i for i, group in enumerate(saved_groups) for m in group["members"]}
    live_home = {m.parameter: i for i, group in enumerate(optimizer.groups) for m in group.members}
    problems = [
        f"{where}: {name} is trained in the checkpoint, not in this run"
        for name in sorted(set(saved_home) - set(live_home))
    ]
    problems += [
        f"{where}: {name} is trained in this run, not in the checkpoint"
        for name in sorted(set(live_home) - set(saved_home))
    ]
    if len(saved_groups) != len(optimizer.groups):
        problems.append(
            f"{where} has {len(saved_groups)} parameter groups in the checkpoint, {len(optimizer.groups)} in this run"
        )
    problems += [
        f"{where}: {name} moved from parameter group {saved_home[name]} to {live_home[name]}"
        for name in sorted(set(saved_home) & set(live_home))
        if saved_home[name] != live_home[name]
    ]
    if problems:
        return problems
    for number, (stored, group) in enumerate(zip(saved_groups, optimizer.groups, strict=True)):
        ranges = {m["parameter"]: tuple(m["range"]) for m in stored["members"]}
        problems += [
            f"{where}: this rank holds elements {m.start} to {m.end} of {m.parameter}, the file {ranges[m.parameter]}"
            for m in group.members
            if ranges[m.parameter] != (m.start, m.end)
        ]
        options: dict[str, torch.Tensor] = {}
        current = to_json({k: v for k, v in group.options.items() if k != "params"}, f"group{number}", options)
        for key in sorted((set(stored["options"]) | set(current)) - SCHEDULED_OPTIONS - _COUNTED_OPTIONS):
            before, now = stored["options"].get(key, "absent"), current.get(key, "absent")
            if before != now:
                problems.append(
                    f"{where}, parameter group {number}: option {key} is {before} in the checkpoint, {now} in this run"
                )
    return problems


def plan_optimizers(
    index: Mapping[str, Any], spans: Mapping[str, Any], live: Live, *, keep_run_options: bool
) -> OptimizerPlan:
    """Find a destination for every stored optimizer tensor; nothing live is touched. Call after `optimizer_mismatches` was empty.

    `spans[name]` has `.dtype` (safetensors code) and `.shape`. With `keep_run_options` the run's learning rates and weight decays stay;
    otherwise the checkpoint's win and each difference is listed in the plan.
    """
    plan = OptimizerPlan()
    for stored, optimizer in zip(index["optimizers"], live.optimizers, strict=True):
        for number, (stored_group, group) in enumerate(zip(stored["groups"], optimizer.groups, strict=True)):
            members = {m.parameter: m for m in group.members}
            for stored_member in stored_group["members"]:
                _plan_member(plan, stored_member, members[stored_member["parameter"]], optimizer, spans)
            _plan_options(plan, stored_group["options"], group.options, number, spans, keep_run_options)
        if optimizer.scaler is not None:
            plan._scalers.append((optimizer.scaler, stored["scaler"]))
    for name, entry in index["tensors"].items():
        if entry["slot"] == "master":
            plan.destinations[name] = _masters(live, int(name.split("/")[1]))[entry["parameter"]]
    return plan


def _masters(live: Live, number: int) -> dict[str, torch.Tensor]:
    return {
        member.parameter: member.master
        for group in live.optimizers[number].groups
        for member in group.members
        if member.master is not None
    }


def _plan_member(
    plan: OptimizerPlan,
    stored: Mapping[str, Any],
    member: OptimizerMember,
    optimizer: Optimizer,
    spans: Mapping[str, Any],
) -> None:
    for map_prefix, state_map in optimizer.state_maps.items():
        slots = stored["state"].get(map_prefix)
        plan._states.append((state_map, member.key, slots))
        current = state_map[member.key] if member.key in state_map else {}
        for slot, where in (slots or {}).items():
            if "tensor" not in where:
                continue
            name = where["tensor"]
            live_value = current.get(slot)
            span = spans[name]
            dtype, shape = dtype_of(span.dtype, name), tuple(span.shape)
            device = torch.device("cpu") if where["place"] == "host" else member.key.device
            if isinstance(live_value, torch.Tensor) and _same_kind(live_value, dtype, shape, device):
                plan.destinations[name] = live_value
            else:
                plan.destinations[name] = torch.empty(shape, dtype=dtype, device=device)
    unknown = set(stored["state"]) - set(optimizer.state_maps)
    if unknown:
        raise FormatError(f"the checkpoint holds optimizer state {sorted(unknown)} that this optimizer has no room for")


def _same_kind(value: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> bool:
    same_form = value.dtype == dtype and tuple(value.shape) == shape
    return same_form and value.device == device and value.is_contiguous()


def _plan_options(
    plan: OptimizerPlan,
    stored: Mapping[str, Any],
    live_options: MutableMapping[str, Any],
    number: int,
    spans: Mapping[str, Any],
    keep_run_options: bool,
) -> None:
    ignored: dict[str, torch.Tensor] = {}
    taken = {}
    for key, value in stored.items():
        if key in SCHEDULED_OPTIONS and key in live_options:
            now = to_json(live_options[key], f"group{number}/{key}", ignored)
            if now != value:
                side = "the run's is kept" if keep_run_options else "the checkpoint's is taken"
                plan.differences.append(
                    f"parameter group {number}: {key} is {value} in the checkpoint, {now} in this run: {side}"
                )
            if keep_run_options:
                continue
        taken[key] = value
        if isinstance(value, dict) and value.get("~") == "tensor":
            span = spans[value["v"]]
            plan.destinations[value["v"]] = torch.empty(tuple(span.shape), dtype=dtype_of(span.dtype, value["v"]))
    plan._options.append((live_options, taken))


def _decode_scaler(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: torch.tensor(where["tensor"], dtype=dtype_of(where["dtype"], f"loss scaler {key}"))
        if "tensor" in where
        else from_json(where["value"], {})
        for key, where in state.items()
    }
