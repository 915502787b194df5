"""Whether stored optimizer state is this run's: class, groups, members, masters, and the options that give it meaning.

Says every difference in words and decides nothing else; touches nothing. Options that a schedule moves may differ:
`optimizer.plan_optimizers` says which side wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megaresume.state.description import Live, Optimizer, OptimizerGroup
from megaresume.state.loss_scaler import scaler_mismatches
from megaresume.state.optimizer import COUNTED, encode_options, master_name, scheduled
from megaresume.state.tensors import same_form
from megaresume.state.tree import from_json, kind_of, tensor_names


def optimizer_mismatches(index: Mapping[str, Any], spans: Mapping[str, Any], live: Live) -> list[str]:
    """Every way in which the stored optimizers are not this rank's; empty where they are."""
    saved = index["optimizers"]
    if len(saved) != len(live.optimizers):
        return [f"the checkpoint holds {len(saved)} optimizers on this rank, this run has {len(live.optimizers)}"]
    problems: list[str] = []
    for number, (stored, optimizer) in enumerate(zip(saved, live.optimizers, strict=True)):
        where = f"optimizer {number}"
        if stored["kind"] != optimizer.kind:
            problems.append(f"{where} is a {stored['kind']} in the checkpoint, a {optimizer.kind} in this run")
            continue
        problems += [f"{where}: {each}" for each in scaler_mismatches(stored["scaler"], optimizer.scaler)]
        misplaced = list(_misplaced(where, stored["groups"], optimizer))
        problems += misplaced
        if not misplaced:
            for group_number, stored_group in enumerate(stored["groups"]):
                group = optimizer.groups[group_number]
                problems += _member_mismatches(where, number, stored_group["members"], group, optimizer, index)
                problems += _option_mismatches(number, group_number, stored_group["options"], group, spans)
    return problems


def _misplaced(where: str, saved_groups: list[dict[str, Any]], optimizer: Optimizer) -> Iterator[str]:
    """Parameters that are trained on one side only, in another group, or twice."""
    names = Counter(member["parameter"] for group in saved_groups for member in group["members"])
    yield from (f"{where}: {name} is listed {n} times in the checkpoint" for name, n in sorted(names.items()) if n > 1)
    saved_home = {member["parameter"]: i for i, group in enumerate(saved_groups) for member in group["members"]}
    live_home = {member.parameter: i for i, group in enumerate(optimizer.groups) for member in group.members}
    for name in sorted(saved_home.keys() - live_home.keys()):
        yield f"{where}: {name} is trained in the checkpoint, not in this run"
    for name in sorted(live_home.keys() - saved_home.keys()):
        yield f"{where}: {name} is trained in this run, not in the checkpoint"
    if len(saved_groups) != len(optimizer.groups):
        yield f"{where} has {len(saved_groups)} parameter groups in the checkpoint, {len(optimizer.groups)} in this run"
    for name in sorted(saved_home.keys() & live_home.keys()):
        if saved_home[name] != live_home[name]:
            yield f"{where}: {name} moved from parameter group {saved_home[name]} to {live_home[name]}"


def _member_mismatches(
    where: str,
    number: int,
    saved_members: list[dict[str, Any]],
    group: OptimizerGroup,
    optimizer: Optimizer,
    index: Mapping[str, Any],
) -> Iterator[str]:
    saved = {member["parameter"]: member for member in saved_members}
    for member in group.members:
        stored, name = saved[member.parameter], f"{where}: {member.parameter}"
        if stored["range"] != [member.start, member.end]:
            begin, end = stored["range"]
            yield f"{name}: this rank holds elements {member.start} to {member.end}, the file {begin} to {end}"
        for prefix in sorted(stored["state"].keys() - optimizer.state_maps.keys()):
            yield f"{name}: the checkpoint holds state {prefix!r} that a {optimizer.kind} has no room for here"
        master = master_name(number, member.parameter)
        slots = [where for slots in stored["state"].values() for where in slots.values()]
        # A slot of the optimizer's may be called "master" too, where it keeps no master apart.
        has_master = master in index["tensors"] and all(slot.get("tensor") != master for slot in slots)
        if has_master and member.master is None:
            yield f"{name} has a master of higher precision in the checkpoint, not in this run"
        if not has_master and member.master is not None:
            yield f"{name} has a master of higher precision in this run, not in the checkpoint"


def _option_mismatches(
    number: int, group_number: int, stored: Mapping[str, Any], group: OptimizerGroup, spans: Mapping[str, Any]
) -> Iterator[str]:
    current, tensors = encode_options(group, number, group_number)
    movable = scheduled(stored)
    for key in sorted((stored.keys() | current.keys()) - COUNTED):
        where = f"optimizer {number}, parameter group {group_number}: option {key}"
        if key not in stored or key not in current:
            if key not in movable:
                yield f"{where} is {_shown(key, stored)} in the checkpoint, {_shown(key, current)} in this run"
        elif stored[key] == current[key]:
            if not all(same_form(tensors[name], name, spans) for name in tensor_names(stored[key])):
                yield f"{where} is held in a tensor of another dtype or shape in the checkpoint than in this run"
        elif not (_may_stand_for if key in movable else _means_the_same)(stored[key], current[key]):
            yield f"{where} is {_shown(key, stored)} in the checkpoint, {_shown(key, current)} in this run"


def _may_stand_for(before: Any, now: Any) -> bool:
    if any(tensor_names([before, now])):
        return False
    before, now = from_json(before, {}), from_json(now, {})
    return before is None or now is None or kind_of(before) == kind_of(now)


def _means_the_same(before: Any, now: Any) -> bool:
    # 0.1 and numpy's 0.1 are told apart on the way back, but are one setting.
    return not any(tensor_names([before, now])) and bool(from_json(before, {}) == from_json(now, {}))


def _shown(key: str, options: Mapping[str, Any]) -> str:
    if key not in options:
        return "not set"
    names = list(tensor_names(options[key]))
    return "held in a tensor" if names else repr(from_json(options[key], {}))
