"""Whether a checkpoint holds this adapter: by name and shape, counted, and by its numbers. Touches nothing live.

Loading with `strict=False` and reporting success with nothing matched is how adapters get lost. Here every tensor is
matched, or the load is refused with the counts. Called in the first phase of a restore, on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaresume.adapters.assemble import weights_in
from megaresume.errors import CheckpointDamagedError, ConfigurationError, FormatError, StateMismatchError
from megaresume.run_objects import Place
from megaresume.state.description import Parameter
from megaresume.state.index import check_index
from megaresume.state.tensors import empty_for, target_for
from megaresume.store import layout
from megaresume.store.control import ControlPlane
from megaresume.store.manifest import parse_manifest
from megaresume.store.shard import ShardHeader, read_header, stream_tensors

CHECKS = frozenset({"nonfinite", "zero_b"})
"""The checks of numbers that can be switched off by name."""

_SHOWN = 8


@dataclass(frozen=True)
class Tally:
    """How an adapter's tensors met what was loaded, by global name."""

    matched: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    other_shape: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = f"{len(self.matched)} tensors matched, {len(self.missing)} missing, {len(self.unexpected)} unexpected"
        return f"{counts}, {len(self.other_shape)} of another shape" if self.other_shape else counts

    def details(self) -> str:
        """One line per tensor that did not match, up to eight of each kind."""
        lines = []
        for kind in ("missing", "unexpected", "other_shape"):
            names = getattr(self, kind)
            lines += [f"\n  {kind.replace('_', ' ')}: {name}" for name in names[:_SHOWN]]
            lines += [f"\n  {kind.replace('_', ' ')}: {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        return "".join(lines)


def tally(saved: Mapping[str, Sequence[int]], live: Mapping[str, Sequence[int]]) -> Tally:
    """Compare two sets of tensors, name -> global shape. Pure."""
    both = saved.keys() & live.keys()
    other = {name for name in both if list(saved[name]) != list(live[name])}
    return Tally(
        tuple(sorted(both - other)),
        tuple(sorted(live.keys() - saved.keys())),
        tuple(sorted(saved.keys() - live.keys())),
        tuple(f"{name}: {list(saved[name])}, in this run {list(live[name])}" for name in sorted(other)),
    )


def check_allowed(allow: Collection[str], config: Mapping[str, Any], where: str) -> frozenset[str]:
    """The names in `allow`; ConfigurationError for one that nothing can be allowed by."""
    known = CHECKS | {"base", "missing", "unexpected"} | (config.keys() - {"name", "rank"})
    if unknown := sorted(set(allow) - known):
        raise ConfigurationError(
            f"{where}: allow={unknown}: expected some of {', '.join(sorted(known))}. Tensors of another rank cannot be "
            "loaded at all."
        )
    return frozenset(allow)


def admit(
    path: Path,
    control: ControlPlane,
    place: Place,
    parameters: Mapping[str, Parameter],
    *,
    b_matrices: bool,
    allow: Collection[str],
) -> Tally:
    """Match the checkpoint's tensors with the adapter's, and look at their numbers. Collective; the same on all ranks.

    With `b_matrices` an adapter whose every B is zero although it was trained is refused. `allow` switches checks of
    numbers off. Raises StateMismatchError for a refusal, CheckpointDamagedError for bytes that are not those written.
    """
    what = f"match the tensors of {path.name}"
    answers = control.together(what, lambda: _look(path, place, parameters, b_matrices))
    told = control.decide(what, lambda: _judge(path, answers or [], allow))
    return Tally(*(tuple(names) for names in told))


def _look(path: Path, place: Place, parameters: Mapping[str, Parameter], b_matrices: bool) -> dict[str, Any]:
    """What this rank's file says; the names from one rank of each pipeline stage are enough."""
    shard = path / f"{place.stem}{layout.SHARD_SUFFIX}"
    manifest = parse_manifest(path / layout.MANIFEST)
    if shard.name not in manifest.files:
        raise CheckpointDamagedError(f"{path / layout.MANIFEST} lists no {shard.name}, the file of this rank")
    header = read_header(shard, record=manifest.files[shard.name])
    check_index(header.index, header.tensors)
    names_stage = place.coordinate.tp == 0 and place.coordinate.dp == 0 and place.coordinate.cp == 0
    bad, b_elements, b_nonzero = _numbers(shard, header, b_matrices)
    members = [m for o in header.index["optimizers"] for group in o["groups"] for m in group["members"]]
    return {
        "saved": _shapes(header, shard) if names_stage else {},
        "live": {name: list(each.global_shape) for name, each in parameters.items()} if names_stage else {},
        "nonfinite": bad[:_SHOWN],
        "b": [b_elements, b_nonzero],
        # Its optimizer has stepped; the first step of a warm-up from zero moves nothing, so more than one is asked for.
        "trained": manifest.step > 1 and any(any(member["state"].values()) for member in members),
    }


def _shapes(header: ShardHeader, shard: Path) -> dict[str, list[int]]:
    shapes = {}
    for name, entry in header.index["parameters"].items():
        shape = entry.get("global_shape")
        if type(shape) is not list or any(type(size) is not int for size in shape):
            raise FormatError(f"{shard}: parameter {name}: expected a global shape, found {str(shape)[:80]!r}")
        shapes[name] = shape
    return shapes


def _numbers(shard: Path, header: ShardHeader, b_matrices: bool) -> tuple[list[str], int, int]:
    """(tensors with NaN or Inf, elements of B in this file, those of them that are not zero)."""
    listed = header.index["tensors"]
    tensors = {
        name: empty_for(name, header.tensors) for name in header.tensors if listed[name]["parameter"] is not None
    }
    stream_tensors(shard, header, {name: target_for(tensor) for name, tensor in tensors.items()})
    b = [
        values
        for _, entry, values in (weights_in(shard, header) if b_matrices else ())
        if ".lora_B." in (entry["parameter"] or "")
    ]
    return nonfinite(tensors.items()), sum(each.numel() for each in b), sum(int(each.count_nonzero()) for each in b)


def nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the floating-point tensors that hold NaN or Inf."""
    return [name for name, tensor in tensors if tensor.is_floating_point() and not bool(tensor.isfinite().all())]


def _judge(path: Path, answers: Sequence[Mapping[str, Any]], allow: Collection[str]) -> list[list[str]]:
    found = tally(_joined(answers, "saved"), _joined(answers, "live"))
    if found.missing or found.unexpected or found.other_shape:
        raise StateMismatchError(
            f"{path}: {found}; nothing was loaded.{found.details()}\nAttach the adapter as it was saved. To begin "
            "a new one with what matches, export it, and resume(init_from=...) under another name."
        )
    bad = [name for answer in answers for name in answer["nonfinite"]]
    if bad and "nonfinite" not in allow:
        raise StateMismatchError(
            f"{path}: NaN or Inf in {len(bad)} tensors: {', '.join(bad[:_SHOWN])}. Go back to an older step "
            "(resume_from), or take it as it is: allow={'nonfinite'}."
        )
    elements, nonzero = (sum(answer["b"][i] for answer in answers) for i in (0, 1))
    if elements and not nonzero and any(answer["trained"] for answer in answers) and "zero_b" not in allow:
        raise StateMismatchError(
            f"{path}: every B is zero, as in an adapter that was never trained, but its optimizer has stepped. "
            "Something reset it before the save: go back to an older step (resume_from), or take it as it is: "
            "allow={'zero_b'}."
        )
    return [list(found.matched), [], [], []]


def _joined(answers: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[int]]:
    return {name: shape for answer in answers for name, shape in answer[key].items()}
