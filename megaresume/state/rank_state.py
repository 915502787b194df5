"""One rank's whole state: collected into the tensors and the index of its shard file, and put back from them.

Restoring has two phases. `plan_restore` compares the file's index with the live objects and finds a destination for
every stored byte; it touches nothing and raises on any difference. Then the caller fills the destinations, `complete`
shares what replicas read for each other, and `install` puts the rest in place. Knows descriptions and the logical index
(docs/on-disk-format.md), no files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch

from megaresume.errors import FormatError, PoisonedError, StateMismatchError, UnsupportedError
from megaresume.state.description import Live
from megaresume.state.economy import place_of
from megaresume.state.index import INDEX_VERSION, check_index
from megaresume.state.model import (
    Piece,
    complete_replicas,
    model_mismatches,
    own_pieces,
    piece_mismatches,
    piece_name,
    slice_of,
)
from megaresume.state.optimizer import OptimizerPlan, capture_optimizers, plan_optimizers
from megaresume.state.optimizer_match import optimizer_mismatches
from megaresume.state.registered import Registered
from megaresume.state.rng import RngPlan, Stream, plan_rng, rng_mismatches
from megaresume.state.tensors import (
    check_storable,
    dtype_code,
    empty_for,
    same_form,
    sink_rounding_into,
    target_for,
)
from megaresume.state.tree import from_json, tensor_names, to_json
from megaresume.store.shard import Target

# Differences in one message; a person reads a dozen, and a wrong model has thousands.
_SHOWN = 12


@dataclass(frozen=True)
class RankState:
    """What one rank stores: tensors by file name (live memory where possible, not copies) and the logical index."""

    tensors: dict[str, torch.Tensor]
    index: dict[str, Any]

    def settled(self, name: str) -> bool:
        """Whether nothing but an optimizer's step changes the tensor of this name: its state, and not the weights,
        which loops exchange for averaged ones and the like."""
        entry = self.index["tensors"][name]
        return name.startswith("optim/") and entry["parameter"] is not None


def capture(live: Live, streams: Mapping[str, Stream] | None, registered: Registered) -> RankState:
    """Collect this rank's state. No collective, no copy of weights or moments; random streams are copied.

    `streams` is None where random numbers are not to be stored, which the index then says. Raises UnsupportedError
    naming what cannot be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}

    def add(
        name: str, tensor: torch.Tensor, slot: str, parameter: str | None = None, at: list[int] | None = None
    ) -> None:
        if name in tensors:
            raise UnsupportedError(f"two tensors of this rank would both be stored as {name}: rename one")
        tensors[name] = tensor
        entries[name] = {"parameter": parameter, "slot": slot, "range": at, "kind": "stored"}

    for piece in own_pieces(live):
        parameter = live.parameters[piece.parameter]
        tensor = slice_of(parameter, piece.start, piece.end)
        add(piece_name(piece), tensor, "weight", piece.parameter, [piece.start, piece.end])
    for name, buffer in live.buffers.items():
        add(f"buffer/{name}", buffer, "buffer")
    extra_states = {}
    for extra in live.extra_states:
        nested: dict[str, torch.Tensor] = {}
        extra_states[extra.name] = to_json(extra.get(), f"extra_state/{extra.name}", nested)
        for name, tensor in nested.items():
            add(name, tensor, "extra_state")
    optimizers = capture_optimizers(live)
    tensors.update(optimizers.tensors)
    entries.update(optimizers.entries)
    for name, stream in (streams or {}).items():
        add(f"rng/{name}", stream.get(), "rng")
    values, registered_tensors = registered.capture()
    for name, tensor in registered_tensors.items():
        add(name, tensor, "registered")

    index = {
        "version": INDEX_VERSION,
        "parameters": {name: parameter.to_index() for name, parameter in live.parameters.items()},
        "tensors": entries,
        "buffers": sorted(live.buffers),
        "extra_states": extra_states,
        "optimizers": optimizers.index,
        "rng": None if streams is None else sorted(streams),
        "registered": values,
    }
    for name, tensor in tensors.items():
        check_storable(tensor, name)
    return RankState(tensors, index)


@dataclass
class RestorePlan:
    """Where every stored tensor goes. `destinations` are live tensors, or fresh ones that `install` puts in place.

    `rounded` maps a master in the file to the weights that take its rounded values, and the element of it that they
    begin at; the master itself may be restored or not. `elsewhere` are the tensors that lie in files of earlier
    checkpoints: by (step, attempt, file), each tensor's name there and its destination.
    """

    live: Live
    destinations: dict[str, torch.Tensor] = field(default_factory=dict)
    rounded: dict[str, list[tuple[torch.Tensor, int]]] = field(default_factory=dict)
    elsewhere: dict[tuple[int, int, str], dict[str, torch.Tensor]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _extra_states: Mapping[str, Any] = field(default_factory=dict)
    _optimizers: OptimizerPlan | None = None
    _registered: tuple[Registered, Mapping[str, Any]] | None = None
    _rng: RngPlan | None = None

    def targets(self) -> dict[str, Target]:
        """What the tensors of this rank's file are read through; weights that were not stored are rounded on the
        way."""
        targets = {name: target_for(tensor, self.rounded.get(name, ())) for name, tensor in self.destinations.items()}
        targets |= {
            master: Target(sink=sink_rounding_into(weights))
            for master, weights in self.rounded.items()
            if master not in targets
        }
        return targets

    def complete(self) -> None:
        """Share the model pieces that each rank now has, when all destinations are filled.

        Collective over the replica groups.
        """
        complete_replicas(self.live)

    def install(self) -> None:
        """Put in place what was not read straight into live tensors, random numbers last. Local; follows `complete`.

        Raises PoisonedError naming the part where an object refuses what it is given: by then, others have changed.
        """
        for extra in self.live.extra_states:
            with _installing(f"extra state {extra.name}"):
                extra.set(from_json(self._extra_states[extra.name], self.destinations))
        with _installing("the optimizer's state"):
            if self._optimizers is None:
                self.live.reload_masters()
            else:
                self._optimizers.install()
        if self._registered is not None:
            registered, values = self._registered
            with _installing("the registered objects"):
                registered.restore(values, self.destinations)
        if self._rng is not None:
            with _installing("the random streams"):
                self._rng.install()

    def _claim(self, destinations: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in destinations.items():
            if name in self.destinations:
                raise FormatError(f"the index refers to tensor {name!r} twice")
            self.destinations[name] = tensor

    def _claim_fresh(self, values: Mapping[str, Any], spans: Mapping[str, Any]) -> None:
        """Find room for the tensors that encoded values refer to."""
        for node in values.values():
            for name in tensor_names(node):
                self._claim({name: empty_for(name, spans)})
            from_json(node, self.destinations)  # what cannot be decoded is to fail now, not when it is installed


@contextlib.contextmanager
def _installing(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PoisonedError(f"{what} could not be put back ({type(error).__name__}: {error})") from error


def plan_restore(
    index: Mapping[str, Any],
    spans: Mapping[str, Any],
    live: Live,
    streams: Mapping[str, Stream] | None,
    registered: Registered,
    *,
    weights_only: bool = False,
    keep_run_options: bool = False,
    set_by_schedule: AbstractSet[str] = frozenset(),
) -> RestorePlan:
    """Compare the stored index with this rank and plan the restore; touches nothing live.

    `spans[name]` has `.dtype`, `.shape` and `.begin` (bytes). `streams` is None where random numbers are not to be
    restored. With `weights_only` the model alone is taken: parameters, buffers and extra states; masters are then
    refreshed from the weights. With `keep_run_options` the run's learning rates and weight decays stay. Differences in
    options that are `set_by_schedule` are not listed.

    Raises StateMismatchError listing the differences (up to a dozen), FormatError for an index that is not of the
    documented form, of another version, or at odds with the tensors of its file.
    """
    check_index(index, spans)
    problems = model_mismatches(index, live) + _buffer_mismatches(index, live)
    if not weights_only:
        problems += optimizer_mismatches(index, spans, live) + registered.mismatches(index["registered"], spans)
        if streams is not None and index["rng"] is not None:
            problems += rng_mismatches(index["rng"], spans, streams)
    _refuse(problems)
    _refuse(piece_mismatches(index, live))

    plan = RestorePlan(live, _extra_states=index["extra_states"])
    pieces = {piece_name(piece): piece for piece in own_pieces(live)}
    stored = {name: piece for name, piece in pieces.items() if index["tensors"][name]["kind"] == "stored"}
    for name, piece in stored.items():
        plan._claim({name: slice_of(live.parameters[piece.parameter], piece.start, piece.end)})
    plan._claim({f"buffer/{name}": buffer for name, buffer in live.buffers.items()})
    plan._claim_fresh(index["extra_states"], spans)
    if weights_only:
        plan.left_out = ["optimizer", "random numbers", "registered objects"]
        unread = {name for name in index["tensors"] if name.startswith(("optim/", "rng/", "registered/"))}
    else:
        unread = _plan_all_but_model(
            plan,
            index,
            spans,
            streams,
            registered,
            keep_run_options=keep_run_options,
            set_by_schedule=set_by_schedule,
        )
    for name in pieces.keys() - stored.keys():
        _plan_unstored(plan, index["tensors"], name, pieces[name])
    unread |= pieces.keys() - stored.keys()
    for name in index["tensors"]:
        if name not in plan.destinations and name not in unread:
            raise FormatError(f"the index names tensor {name!r}, but nothing in it refers to that tensor")
    _refuse(_form_mismatches(plan.destinations, spans))
    _check_ranges(index, plan.destinations)
    return plan


def _plan_all_but_model(
    plan: RestorePlan,
    index: Mapping[str, Any],
    spans: Mapping[str, Any],
    streams: Mapping[str, Stream] | None,
    registered: Registered,
    *,
    keep_run_options: bool,
    set_by_schedule: AbstractSet[str],
) -> set[str]:
    """Plan optimizers, registered objects and random numbers; return the names of the tensors left out on purpose."""
    plan._optimizers = plan_optimizers(
        index, spans, plan.live, keep_run_options=keep_run_options, set_by_schedule=set_by_schedule
    )
    plan._claim(plan._optimizers.destinations)
    plan.differences += plan._optimizers.differences
    plan._registered = (registered, index["registered"])
    plan._claim_fresh(index["registered"], spans)
    if streams is None or index["rng"] is None:
        why = "not asked for" if streams is None else "not in the checkpoint, by its writer's choice"
        plan.left_out.append(f"random numbers ({why})")
        return plan._optimizers.left_out | {f"rng/{name}" for name in index["rng"] or ()}
    plan._rng = plan_rng(index["rng"], streams)
    plan._claim(plan._rng.destinations)
    plan.left_out += plan._rng.left_out
    return plan._optimizers.left_out | {f"rng/{name}" for name in index["rng"] if name not in streams}


def _plan_unstored(plan: RestorePlan, listed: Mapping[str, Any], name: str, piece: Piece) -> None:
    """Where the bytes of a weight come from that this file does not hold."""
    entry = listed[name]
    weight = plan.live.parameters[piece.parameter].tensor.detach().view(-1)[piece.start : piece.end]
    if entry["kind"] == "referenced":
        place = entry["from"]
        key = place_of(place)
        if place["tensor"] in plan.elsewhere.setdefault(key, {}):
            raise FormatError(f"the index refers to tensor {place['tensor']!r} of {place['file']} twice")
        plan.elsewhere[key][place["tensor"]] = slice_of(plan.live.parameters[piece.parameter], piece.start, piece.end)
        return
    begin = piece.start - listed[entry["from"]]["range"][0]
    plan.rounded.setdefault(entry["from"], []).append((weight, begin))


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StateMismatchError(
            "the checkpoint is not of this model and optimizer:\n  " + "\n  ".join(problems[:_SHOWN]) + more
        )


def _buffer_mismatches(index: Mapping[str, Any], live: Live) -> list[str]:
    saved, current = set(index["buffers"]), set(live.buffers)
    problems = [f"buffer {name} is in the checkpoint, not in this model" for name in sorted(saved - current)]
    problems += [f"buffer {name} is in this model, not in the checkpoint" for name in sorted(current - saved)]
    known, wanted = set(index["extra_states"]), {extra.name for extra in live.extra_states}
    problems += [
        f"extra state {name} is only in {'the checkpoint' if name in known else 'this model'}"
        for name in sorted(known ^ wanted)
    ]
    return problems


def check_form(destinations: Mapping[str, torch.Tensor], spans: Mapping[str, Any]) -> None:
    """Raise as `plan_restore` does unless the file's tensors have the form of these destinations."""
    _refuse(_form_mismatches(destinations, spans))


def _form_mismatches(destinations: Mapping[str, torch.Tensor], spans: Mapping[str, Any]) -> list[str]:
    """Destinations of another dtype or shape than the file's tensors; the index alone does not say these."""
    problems = []
    for name, tensor in destinations.items():
        if name not in spans:
            raise FormatError(f"{name} is to be restored, but the file does not hold it")
        if not same_form(tensor, name, spans):
            saved, wanted = spans[name], (dtype_code(tensor.dtype, name), list(tensor.shape))
            problems.append(
                f"{name} is {saved.dtype} {list(saved.shape)} in the checkpoint, {wanted[0]} {wanted[1]} in this run"
            )
    return problems


def _check_ranges(index: Mapping[str, Any], destinations: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in destinations.items():
        at = index["tensors"][name]["range"]
        if at is not None and tensor.numel() != at[1] - at[0]:
            raise FormatError(f"{name}: the index says elements {at[0]} to {at[1]}, the file holds {tensor.numel()}")
