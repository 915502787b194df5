"""One rank's whole state: collected into the tensors and the index of its shard file, and put back from them.

Restoring has two phases. `plan_restore` compares the file's index with the live objects and finds a destination for every stored byte;
it touches nothing and raises on any difference. Then the caller fills the destinations, `complete` shares what replicas read for each other, and `install` puts the rest in place. Knows
descriptions and the logical index (docs/on-disk-format.md), no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megaresume.errors import FormatError, StateMismatchError
from megaresume.state.description import Live
from megaresume.state.model import check_pieces, complete_replicas, model_mismatches, own_pieces, slice_of
from megaresume.state.optimizer import OptimizerPlan, capture_optimizers, optimizer_mismatches, plan_optimizers
from megaresume.state.registered import Registered
from megaresume.state.rng import RngPlan, Stream, plan_rng, rng_mismatches
from megaresume.state.tensors import dtype_code, dtype_of
from megaresume.state.tree import from_json, to_json

INDEX_VERSION = 1
_SHOWN = 12


@dataclass(frozen=True)
class RankState:
    """What one rank stores: tensors by file name (live memory where possible, not copies) and the logical index."""

    tensors: dict[str, torch.Tensor]
    index: dict[str, Any]


def capture(live: Live, streams: Mapping[str, Stream] | None, registered: Registered) -> RankState:
    """Collect this rank's state. No collective, no copy of weights or moments; random streams are copied.

    `streams` is None where random numbers are not to be stored, which the index then says.
    """
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}

    def add(
        name: str, tensor: torch.Tensor, slot: str, parameter: str | None = None, at: list[int] | None = None
    ) -> None:
        tensors[name] = tensor
        entries[name] = {"parameter": parameter, "slot": slot, "range": at, "kind": "stored"}

    for piece in own_pieces(live):
        parameter = live.parameters[piece.parameter]
        name = f"model/{piece.parameter}"
        add(name, slice_of(parameter, piece.start, piece.end), "weight", piece.parameter, [piece.start, piece.end])
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
        dtype_code(tensor.dtype, name)
    return RankState(tensors, index)


@dataclass
class RestorePlan:
    """Where every stored tensor goes. `destinations` are live tensors, or fresh ones that `install` puts in place."""

    live: Live
    destinations: dict[str, torch.Tensor] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _optimizers: OptimizerPlan | None = None
    _rng: RngPlan | None = None
    _registered: Registered | None = None
    _registered_values: Any = None
    _extra_states: Mapping[str, Any] = field(default_factory=dict)

    def complete(self) -> None:
        """Share the model pieces that each rank has read. Collective over the replica groups; all destinations are filled by now."""
        complete_replicas(self.live)

    def install(self) -> None:
        """Put in place what was not read straight into live tensors, random numbers last. Local; follows `complete`."""
        for extra in self.live.extra_states:
            extra.set(from_json(self._extra_states[extra.name], self.destinations))
        if self._optimizers is None:
            self.live.reload_masters()
        else:
            self._optimizers.install()
        if self._registered is not None:
            self._registered.restore(self._registered_values, self.destinations)
        if self._rng is not None:
            self._rng.install()


def plan_restore(
    index: Mapping[str, Any],
    spans: Mapping[str, Any],
    live: Live,
    streams: Mapping[str, Stream] | None,
    registered: Registered,
    *,
    weights_only: bool = False,
    keep_run_options: bool = False,
) -> RestorePlan:
    """Compare the stored index with this rank and plan the restore; touches nothing live.

    `spans[name]` has `.dtype` and `.shape`. `streams` is None where random numbers are not to be restored. With `weights_only` the
    model alone is taken: parameters, buffers and extra states; masters are then refreshed from the weights.

    Raises StateMismatchError listing the differences (all of them up to a dozen), FormatError for an index of another version.
    """
    if index.get("version") != INDEX_VERSION:
        raise FormatError(
            f"the index is of version {index.get('version')!r}, this release reads version {INDEX_VERSION}"
        )
    problems = model_mismatches(index, live) + _buffer_mismatches(index, spans, live)
    if not weights_only:
        problems += optimizer_mismatches(index, live) + registered.mismatches(index["registered"])
        if streams is not None and index["rng"] is not None:
            problems += rng_mismatches(index["rng"], streams)
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StateMismatchError(
            "the checkpoint is not of this model and optimizer:\n  " + "\n  ".join(problems[:_SHOWN]) + more
        )
    check_pieces(index, live)

    plan = RestorePlan(live, _extra_states=index["extra_states"])
    for name, entry in index["tensors"].items():
        if entry["slot"] == "weight":
            parameter = live.parameters[entry["parameter"]]
            plan.destinations[name] = slice_of(parameter, *entry["range"])
        elif entry["slot"] == "buffer":
            plan.destinations[name] = live.buffers[name.removeprefix("buffer/")]
        elif entry["slot"] == "extra_state":
            plan.destinations[name] = _fresh(name, spans)
    if weights_only:
        plan.left_out = ["optimizer", "random numbers", "registered objects"]
        _check_spans(plan.destinations, spans)
        return plan
    plan._optimizers = plan_optimizers(index, spans, live, keep_run_options=keep_run_options)
    plan.destinations.update(plan._optimizers.destinations)
    plan.differences += plan._optimizers.differences
    if streams is None or index["rng"] is None:
        plan.left_out.append(
            "random numbers (not asked for)"
            if streams is None
            else "random numbers (not in the checkpoint, by its writer's choice)"
        )
    else:
        plan._rng = plan_rng(index["rng"], spans, streams)
        plan.destinations.update(plan._rng.destinations)
    plan._registered, plan._registered_values = registered, index["registered"]
    plan.destinations.update(
        {name: _fresh(name, spans) for name, e in index["tensors"].items() if e["slot"] == "registered"}
    )
    _check_spans(plan.destinations, spans)
    return plan


def _fresh(name: str, spans: Mapping[str, Any]) -> torch.Tensor:
    span = spans[name]
    return torch.empty(tuple(span.shape), dtype=dtype_of(span.dtype, name))


def _buffer_mismatches(index: Mapping[str, Any], spans: Mapping[str, Any], live: Live) -> list[str]:
    saved, current = set(index["buffers"]), set(live.buffers)
    problems = [f"buffer {name} is in the checkpoint, not in this model" for name in sorted(saved - current)]
    problems += [f"buffer {name} is in this model, not in the checkpoint" for name in sorted(current - saved)]
    known, wanted = set(index["extra_states"]), {extra.name for extra in live.extra_states}
    problems += [
        f"extra state {name} is only in {'the checkpoint' if name in known else 'this model'}"
        for name in sorted(known ^ wanted)
    ]
    return problems


def _check_spans(destinations: Mapping[str, torch.Tensor], spans: Mapping[str, Any]) -> None:
    """The index and the file's own tensor table come from the same bytes, but nothing so far made them agree."""
    for name, tensor in destinations.items():
        if name not in spans:
            raise FormatError(f"the index names tensor {name}, which the file does not hold")
        found = (spans[name].dtype, tuple(spans[name].shape))
        wanted = (dtype_code(tensor.dtype, name), tuple(tensor.shape))
        if found != wanted:
            raise StateMismatchError(
                f"{name} is {found[0]} {list(found[1])} in the checkpoint, {wanted[0]} {list(wanted[1])} in this run"
            )
