"""Optimizer state: masters, moments, steps and options, kept under parameter names whatever the optimizer's layout is.

Nothing is known of Adam here. A state value is a tensor, which keeps dtype, shape and place, or plain data, which stays
what it is; `step` may stand per parameter or per group; a parameter without state has none afterwards either. Values
are read raw, never unscaled. Whether stored state fits this run is asked in `optimizer_match`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch

from megaresume.errors import FormatError, UnsupportedError
from megaresume.state.description import Live, Optimizer, OptimizerGroup, OptimizerMember
from megaresume.state.loss_scaler import capture_scaler, decode_scaler
from megaresume.state.tensors import HOST, empty_for, same_form
from megaresume.state.tree import from_json, tensor_names, to_json

# Options that a schedule or a person moves during a run: they may differ between checkpoint and run. All others decide
# what the stored moments mean, and must be equal.
_SCHEDULED = frozenset(
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
    }
)
# Options that are state: Apex's and TE's FusedAdam count steps per group.
COUNTED = frozenset({"step"})


def scheduled(options: Mapping[str, Any]) -> frozenset[str]:
    """The names of those options of a group that a schedule moves."""
    # torch's OneCycleLR and CyclicLR move the momentum too, and leave these marks where they do.
    return _SCHEDULED | {"momentum", "betas"} if "max_momentum" in options else _SCHEDULED


@dataclass
class OptimizerCapture:
    """What one rank stores of its optimizers: tensors and index entries by file name, and `index["optimizers"]`."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    index: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor, slot: str, member: OptimizerMember | None, *, ranged: bool) -> None:
        """Take a tensor in; with `ranged` it has one element for each of the member's elements."""
        if name in self.tensors:
            raise UnsupportedError(f"two tensors of the optimizer would both be stored as {name}: rename one's slot")
        self.tensors[name] = tensor
        self.entries[name] = {
            "parameter": None if member is None else member.parameter,
            "slot": slot,
            "range": [member.start, member.end] if member is not None and ranged else None,
            "kind": "stored",
        }


def capture_optimizers(live: Live) -> OptimizerCapture:
    """Describe and collect the state of every optimizer of this rank (no copy, no collective).

    Raises UnsupportedError naming state that cannot be told by parameter and slot.
    """
    capture = OptimizerCapture()
    for number, optimizer in enumerate(live.optimizers):
        _refuse_homeless_state(optimizer, number)
        groups = [_capture_group(capture, optimizer, number, each) for each in range(len(optimizer.groups))]
        capture.index.append({"kind": optimizer.kind, "groups": groups, "scaler": capture_scaler(optimizer.scaler)})
    return capture


def _refuse_homeless_state(optimizer: Optimizer, number: int) -> None:
    homes = {id(member.key) for group in optimizer.groups for member in group.members}
    for state_map in optimizer.state_maps.values():
        for key in state_map:
            if id(key) not in homes:
                what = f"a tensor of shape {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
                raise UnsupportedError(
                    f"optimizer {number} ({optimizer.kind}) keeps state under {what}, which is no parameter of its "
                    "groups: state is stored by parameter name, so this would be lost"
                )


def _capture_group(capture: OptimizerCapture, optimizer: Optimizer, number: int, group_number: int) -> dict[str, Any]:
    group = optimizer.groups[group_number]
    options, tensors = encode_options(group, number, group_number)
    members = []
    for member in group.members:
        if member.master is not None:
            capture.add(master_name(number, member.parameter), member.master, "master", member, ranged=True)
        state = {
            map_prefix: {
                slot: _capture_value(capture, value, f"optim/{number}", f"{map_prefix}{slot}", member)
                for slot, value in state_map[member.key].items()
            }
            for map_prefix, state_map in optimizer.state_maps.items()
            if member.key in state_map
        }
        members.append({"parameter": member.parameter, "range": [member.start, member.end], "state": state})
    stored: dict[str, Any] = {"options": options, "members": members}
    if tensors:
        stored["places"] = {name: _place(tensor, _device(group)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            capture.add(name, tensor, "option", None, ranged=False)
    return stored


def encode_options(
    group: OptimizerGroup, number: int, group_number: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A group's options as JSON, and the tensors among them by file name."""
    tensors: dict[str, torch.Tensor] = {}
    prefix = f"optim/{number}/group{group_number}"
    options = {
        key: to_json(value, f"{prefix}/{key}", tensors) for key, value in group.options.items() if key != "params"
    }
    return options, tensors


def master_name(number: int, parameter: str) -> str:
    """The name in the file of a parameter's higher-precision copy in optimizer `number`."""
    return f"optim/{number}/master/{parameter}"


def _capture_value(
    capture: OptimizerCapture, value: Any, prefix: str, slot: str, member: OptimizerMember
) -> dict[str, Any]:
    """Where a state value is: {"tensor": name, "place": ...}, or {"value": JSON} with "places" of the tensors in it."""
    name = f"{prefix}/{slot}/{member.parameter}"
    device = member.key.device
    if isinstance(value, torch.Tensor):
        # A one-element parameter's `step` has as many elements as the parameter; it is a number all the same.
        whole = value.ndim > 0 or value.shape == member.key.shape
        capture.add(name, value, slot, member, ranged=whole and value.numel() == member.end - member.start)
        return {"tensor": name, "place": _place(value, device)}
    inside: dict[str, torch.Tensor] = {}
    stored = {"value": to_json(value, name, inside)}
    for inner_name, tensor in inside.items():
        capture.add(inner_name, tensor, slot, member, ranged=False)
    return {**stored, "places": {each: _place(tensor, device) for each, tensor in inside.items()}} if inside else stored


def _place(value: torch.Tensor, device: torch.device) -> str:
    # torch keeps an uncaptured `step` on the host whatever the parameter's device. On a host-only run the two look
    # alike, and a zero-dimensional tensor is what the difference is made for.
    on_host = value.device.type == "cpu" and (device.type != "cpu" or value.ndim == 0)
    return "host" if on_host else "parameter"


def _device(group: OptimizerGroup) -> torch.device:
    return group.members[0].key.device if group.members else HOST


@dataclass
class OptimizerPlan:
    """Where stored optimizer tensors go. Made without touching anything; `install()` puts in place what is not read."""

    destinations: dict[str, torch.Tensor] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    """Tensors of options that stay the run's."""
    _states: list[tuple[MutableMapping[Any, dict[str, Any]], torch.Tensor, dict[str, Any] | None]] = field(
        default_factory=list
    )
    _options: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = field(default_factory=list)
    _scalers: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def claim(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Make `tensor` the destination of the file's tensor `name`, which nothing else may refer to."""
        if name in self.destinations:
            raise FormatError(f"the index refers to tensor {name!r} twice")
        self.destinations[name] = tensor
        return tensor

    def install(self) -> None:
        """Put states, options and loss scalers in place once all `destinations` are filled."""
        for state_map, key, slots in self._states:
            if slots is None:
                state_map.pop(key, None)
            else:
                state_map[key] = slots
        for live_options, stored in self._options:
            for name in COUNTED - stored.keys():
                live_options.pop(name, None)
            live_options.update(stored)
        for scaler, state in self._scalers:
            scaler.load_state_dict(state)


def plan_optimizers(
    index: Mapping[str, Any],
    spans: Mapping[str, Any],
    live: Live,
    *,
    keep_run_options: bool,
    set_by_schedule: AbstractSet[str] = frozenset(),
) -> OptimizerPlan:
    """Find a destination for every stored optimizer tensor; nothing live is touched.

    Call it after `optimizer_mismatches` was empty. `spans[name]` has `.dtype` (safetensors code) and `.shape`. With
    `keep_run_options` the run's learning rates and weight decays stay; otherwise the checkpoint's win. Each difference
    is listed in the plan, but for options `set_by_schedule`. Raises FormatError for an index that refers to what the
    file does not hold, or twice to it.
    """
    plan = OptimizerPlan()
    for number, (stored, optimizer) in enumerate(zip(index["optimizers"], live.optimizers, strict=True)):
        for group_number, (stored_group, group) in enumerate(zip(stored["groups"], optimizer.groups, strict=True)):
            members = {member.parameter: member for member in group.members}
            for stored_member in stored_group["members"]:
                member = members[stored_member["parameter"]]
                if member.master is not None:
                    plan.claim(master_name(number, member.parameter), member.master)
                _plan_member(plan, stored_member["state"], member, optimizer, spans)
            where = (number, group_number)
            _plan_options(plan, stored_group, group, where, spans, keep_run_options, set_by_schedule)
        if optimizer.scaler is not None:
            plan._scalers.append((optimizer.scaler, decode_scaler(stored["scaler"])))
    return plan


def _plan_member(
    plan: OptimizerPlan,
    stored: Mapping[str, Mapping[str, Any]],
    member: OptimizerMember,
    optimizer: Optimizer,
    spans: Mapping[str, Any],
) -> None:
    for map_prefix, state_map in optimizer.state_maps.items():
        slots = stored.get(map_prefix)
        current = state_map.get(member.key, {})
        planned = (
            None
            if slots is None
            else {
                slot: _plan_value(plan, where, current.get(slot), member.key.device, spans)
                for slot, where in slots.items()
            }
        )
        plan._states.append((state_map, member.key, planned))


def _plan_value(
    plan: OptimizerPlan, where: Mapping[str, Any], current: Any, device: torch.device, spans: Mapping[str, Any]
) -> Any:
    """The value that will stand in the slot: its tensors are destinations, which are filled before it is installed."""
    if "tensor" in where:
        name = where["tensor"]
        wanted = _device_of(where["place"], device)
        reuse = isinstance(current, torch.Tensor) and same_form(current, name, spans) and current.device == wanted
        return plan.claim(name, current if reuse and current.is_contiguous() else empty_for(name, spans, wanted))
    return _plan_tree(plan, where["value"], where.get("places", {}), {}, device, spans)


def _plan_tree(
    plan: OptimizerPlan,
    node: Any,
    places: Mapping[str, str],
    current: Mapping[str, torch.Tensor],
    device: torch.device,
    spans: Mapping[str, Any],
) -> Any:
    for name in tensor_names(node):
        if name in current and same_form(current[name], name, spans) and current[name].is_contiguous():
            plan.claim(name, current[name])
        elif name in places:
            plan.claim(name, empty_for(name, spans, _device_of(places[name], device)))
        else:
            raise FormatError(f"the index refers to tensor {name!r} without the place where it belongs")
    return from_json(node, plan.destinations)


def _device_of(place: str, device: torch.device) -> torch.device:
    return HOST if place == "host" else device


def _plan_options(
    plan: OptimizerPlan,
    stored_group: Mapping[str, Any],
    group: OptimizerGroup,
    where: tuple[int, int],
    spans: Mapping[str, Any],
    keep_run_options: bool,
    set_by_schedule: AbstractSet[str],
) -> None:
    stored = stored_group["options"]
    current, tensors = encode_options(group, *where)
    movable = scheduled(stored)
    taken = {}
    for key, value in stored.items():
        kept = keep_run_options and key in movable
        if key not in COUNTED | set_by_schedule:
            plan.differences += _option_difference(
                f"parameter group {where[1]}: {key}", key, stored, current, kept=kept
            )
        if kept:
            plan.left_out.update(tensor_names(value))
        else:
            places = stored_group.get("places", {})
            taken[key] = _plan_tree(plan, value, places, tensors, _device(group), spans)
    plan.differences += [
        f"parameter group {where[1]}: {key} is not in the checkpoint, {value} in this run: the run's is kept"
        for key, value in current.items()
        if key in movable and key not in stored
    ]
    plan._options.append((group.options, taken))


def _option_difference(
    what: str, key: str, stored: Mapping[str, Any], current: Mapping[str, Any], *, kept: bool
) -> Iterator[str]:
    side = "the run's is kept" if kept else "the checkpoint's is taken"
    if key not in current:
        yield f"{what} is {stored[key]} in the checkpoint, not set in this run: {side}"
    elif any(tensor_names(stored[key])):
        yield f"{what} is held in a tensor: {side}"
    elif stored[key] != current[key]:
        yield f"{what} is {stored[key]} in the checkpoint, {current[key]} in this run: {side}"
