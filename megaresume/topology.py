"""The parallel layout of a run: its sizes, where a rank stands in it, and how a checkpoint's differs from this run's.

Plain values and pure functions. Knows no torch and no megatron-core (`megaresume/megatron/` reads the live sizes and
coordinates), no files and no tensors. The rank arithmetic is that of megatron-core's `RankGenerator`: the first axis
of `order` varies fastest over global ranks; experts have a second grid (etp, ep, expert dp, pp) over the same ranks,
in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from megaresume.errors import ConfigurationError, FormatError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

DEFAULT_ORDER = "tp-cp-ep-dp-pp"  # megatron-core's default
MAX_WORLD_SIZE = 1 << 20  # so that a hostile file cannot ask for a billion shard names

_SIZES = ("tp", "pp", "dp", "cp", "ep", "etp", "vpp")
_ORDER_AXES = ("tp", "pp", "dp", "ep", "cp")  # the sequence in which megatron-core appends axes that `order` leaves out


@dataclass(frozen=True)
class Topology:
    """Sizes of every parallel axis. Two equal topologies give every rank the same coordinate.

    tp, pp, dp, cp, ep, etp: tensor, pipeline, data, context, expert and expert-tensor parallel sizes (>= 1).
    vpp: virtual pipeline chunks per stage (1 = not interleaved).
    order: megatron-core's rank order. Axes left out must have size 1.
    extra: axes megaresume does nothing with but records and compares (name -> size); not part of the world size.

    Raises ConfigurationError for sizes that no run can have.
    """

    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    order: str = DEFAULT_ORDER
    extra: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", dict(self.extra))
        for name in self.extra:
            if not isinstance(name, str) or name in (*_SIZES, "order", "world_size", "extra"):
                raise ConfigurationError(f"topology: {name!r} cannot be the name of an extra axis")
        for name, size in (*((name, getattr(self, name)) for name in _SIZES), *self.extra.items()):
            if type(size) is not int or size < 1:
                raise ConfigurationError(f"topology: {name} must be a whole number of at least 1, found {size!r}")
        if self.world_size > MAX_WORLD_SIZE:
            raise ConfigurationError(f"topology: {self.world_size} ranks, at most {MAX_WORLD_SIZE} are supported")
        if self.world_size % (self.etp * self.ep * self.pp):
            raise ConfigurationError(
                f"topology: world size {self.world_size} is not divisible by etp x ep x pp = "
                f"{self.etp} x {self.ep} x {self.pp}, so experts cannot be laid out"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigurationError(f"topology: vpp {self.vpp} needs pp > 1, found pp 1")
        self._check_order()

    def _check_order(self) -> None:
        if not isinstance(self.order, str):
            raise ConfigurationError(f"topology: order must be text such as {DEFAULT_ORDER!r}, found {self.order!r}")
        axes = self.order.split("-")
        if len(set(axes)) != len(axes) or not set(axes) <= set(_ORDER_AXES):
            raise ConfigurationError(
                f"topology: order must name each of {', '.join(_ORDER_AXES)} at most once, found {self.order!r}"
            )
        active = set(self.order_of_active_axes())
        if missing := active - set(axes):
            raise ConfigurationError(
                f"topology: order {self.order!r} leaves out {', '.join(sorted(missing))}, whose size is not 1"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: tp x pp x dp x cp (experts are laid out over the same ranks)."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def expert_dp(self) -> int:
        """Number of true replicas of an expert: world size / (etp x ep x pp)."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def order_of_active_axes(self) -> tuple[str, ...]:
        """The axes whose position in `order` matters (size above 1 in the dense or the expert grid), in order."""
        axes = self.order.split("-")
        axes += [axis for axis in _ORDER_AXES if axis not in axes]
        dense, expert = _dense_sizes(self), _expert_sizes(self)
        return tuple(axis for axis in axes if dense[axis] > 1 or expert[axis] > 1)

    def to_json(self) -> dict[str, JSON]:
        """A flat dict: one key per axis, extra axes beside the known ones, and `order`."""
        return {**{name: getattr(self, name) for name in _SIZES}, "order": self.order, **self.extra}

    @classmethod
    def from_json(cls, value: JSON, *, source: str) -> Topology:
        """Read `to_json`'s form; keys it does not know are extra axes. FormatError names `source` and the field."""
        if not isinstance(value, Mapping):
            raise FormatError(f"{source}: topology must be an object, found {_render(value)}")
        if missing := [name for name in (*_SIZES, "order") if name not in value]:
            raise FormatError(f"{source}: topology lacks {', '.join(missing)}")
        known = {name: value[name] for name in (*_SIZES, "order")}
        extra = {name: size for name, size in value.items() if name not in known}
        try:
            return cls(**cast("dict[str, int]", known), extra=cast("dict[str, int]", extra))  # type: ignore[arg-type]
        except ConfigurationError as error:
            raise FormatError(f"{source}: {error}") from None

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in _SIZES}
        if self.etp == self.tp or self.ep == self.etp == 1:
            del sizes["etp"]  # megatron-core's default, or no experts: nothing a person has set
        shown = [f"{name}={size}" for name, size in sizes.items() if size > 1 or name in ("tp", "pp", "dp")]
        shown += [f"{name}={size}" for name, size in self.extra.items()]
        if self.order != DEFAULT_ORDER:
            shown.append(f"order={self.order}")
        return f"{' '.join(shown)} ({self.world_size} ranks)"


@dataclass(frozen=True)
class Coordinate:
    """A rank's position on each axis, from 0. `ep` and `etp` follow from the others, given topology and order."""

    tp: int
    pp: int
    dp: int
    cp: int = 0
    ep: int = 0
    etp: int = 0


def coordinate_of_rank(rank: int, topology: Topology) -> Coordinate:
    """Where megatron-core's `initialize_model_parallel` puts this global rank. ConfigurationError if out of range."""
    if not 0 <= rank < topology.world_size:
        raise ConfigurationError(f"topology: rank {rank} is not one of the {topology.world_size} ranks of {topology}")
    dense = _position(rank, _dense_sizes(topology), topology.order)
    expert = _position(rank, _expert_sizes(topology), topology.order)
    return Coordinate(tp=dense["tp"], pp=dense["pp"], dp=dense["dp"], cp=dense["cp"], ep=expert["ep"], etp=expert["tp"])


def file_stem(coordinate: Coordinate, topology: Topology) -> str:
    """The name of a rank's shard without its ending, "tp00-pp01-dp00"; "-cp00", "-ep00" follow where their size > 1.

    Unique over the ranks of one topology, the same for a rank whatever host or global number it has.
    Raises ConfigurationError for a position outside the topology.
    """
    parts = []
    for axis in ("tp", "pp", "dp", "cp", "ep"):
        position, size = getattr(coordinate, axis), getattr(topology, axis)
        if not 0 <= position < size:
            raise ConfigurationError(f"topology: {axis} position {position} is outside 0..{size - 1} of {topology}")
        if size > 1 or axis in ("tp", "pp", "dp"):
            parts.append(f"{axis}{position:02d}")
    return "-".join(parts)


def shard_names(topology: Topology) -> list[str]:
    """The file names of all ranks' shards, by global rank."""
    return [
        f"{file_stem(coordinate_of_rank(rank, topology), topology)}.safetensors" for rank in range(topology.world_size)
    ]


def _dense_sizes(topology: Topology) -> dict[str, int]:
    return {"tp": topology.tp, "pp": topology.pp, "dp": topology.dp, "ep": 1, "cp": topology.cp}


def _expert_sizes(topology: Topology) -> dict[str, int]:
    return {"tp": topology.etp, "pp": topology.pp, "dp": topology.expert_dp, "ep": topology.ep, "cp": 1}


def _position(rank: int, sizes: Mapping[str, int], order: str) -> dict[str, int]:
    position = dict.fromkeys(sizes, 0)
    for axis in order.split("-"):
        rank, position[axis] = divmod(rank, sizes[axis])
    return position


@dataclass(frozen=True)
class RunShape:
    """What must be the same for a checkpoint to load: the topology, and facts about the model.

    model: JSON facts by name (hidden_size, num_layers, layers_per_stage, padded_vocab_size, params_dtype, trainable,
    ...), equal on all ranks. A fact that is None is the same as one that is absent.
    """

    topology: Topology
    model: Mapping[str, JSON]


@dataclass(frozen=True)
class Difference:
    """One thing that differs. `reshapable`: a reshard could bridge it (this release has none)."""

    field: str
    checkpoint: str
    this_run: str
    remedy: str
    reshapable: bool


def compare(saved: RunShape, current: RunShape) -> list[Difference]:
    """Every difference at once, topology first, each with what a person can do about it today. Empty: no difference."""
    return [*_topology_differences(saved.topology, current.topology), *_model_differences(saved, current)]


def _topology_differences(saved: Topology, current: Topology) -> Iterator[Difference]:
    remedies = {
        "tp": f"run with --tensor-model-parallel-size {saved.tp}",
        "pp": f"run with --pipeline-model-parallel-size {saved.pp}",
        "dp": f"nothing more: dp = {saved.world_size} ranks / (tp {saved.tp} x pp {saved.pp} x cp {saved.cp})",
        "cp": f"run with --context-parallel-size {saved.cp}",
        "ep": f"run with --expert-model-parallel-size {saved.ep}",
        "etp": f"run with --expert-tensor-parallel-size {saved.etp}",
        "vpp": (
            f"run with --num-virtual-stages-per-pipeline-rank {saved.vpp}"
            if saved.vpp > 1
            else "run without virtual pipeline stages"
        ),
    }
    if (saved.etp, current.etp) == (saved.tp, current.tp):
        remedies["etp"] = "nothing more: it follows tp"
    for axis in _SIZES:
        here, now = getattr(saved, axis), getattr(current, axis)
        if here != now:
            yield Difference(axis, str(here), str(now), remedies[axis], reshapable=True)
    if saved.world_size != current.world_size:
        remedy = f"start {saved.world_size} ranks (torchrun: --nnodes x --nproc-per-node)"
        yield Difference("world_size", str(saved.world_size), str(current.world_size), remedy, reshapable=True)
    yield from _order_differences(saved, current)
    for axis in sorted({*saved.extra, *current.extra}):
        here = saved.extra.get(axis, 1)
        if here != current.extra.get(axis, 1):
            remedy = f"declare the axis {axis} with size {here}"
            yield Difference(axis, _extra_size(saved, axis), _extra_size(current, axis), remedy, reshapable=False)


def _extra_size(topology: Topology, axis: str) -> str:
    return str(topology.extra[axis]) if axis in topology.extra else "1 (not declared)"


def _order_differences(saved: Topology, current: Topology) -> Iterator[Difference]:
    active = {*saved.order_of_active_axes(), *current.order_of_active_axes()}
    orders = []
    for topology in (saved, current):
        axes = topology.order.split("-")
        axes += [axis for axis in _ORDER_AXES if axis not in axes]
        orders.append([axis for axis in axes if axis in active])
    if orders[0] == orders[1]:  # only axes of size 1 stand elsewhere: every rank has the same coordinate
        return
    remedy = {
        DEFAULT_ORDER: "run without --use-tp-pp-dp-mapping",
        "tp-cp-ep-pp-dp": "run with --use-tp-pp-dp-mapping",
    }.get(saved.order, f'call initialize_model_parallel(order="{saved.order}")')
    yield Difference("order", saved.order, current.order, remedy, reshapable=True)


_MODEL_REMEDIES = {
    "hidden_size": "run with --hidden-size {saved}",
    "num_layers": "run with --num-layers {saved}",
    "layers_per_stage": "split the layers as the checkpoint does (--pipeline-model-parallel-layout)",
    "padded_vocab_size": "use its tokenizer and --make-vocab-size-divisible-by, so that the padded size is {saved}",
    "trainable": "freeze and train the same parameters as the checkpoint",
    "model_chunks": "build the model in {saved} chunks per stage",
}
_DTYPE_REMEDIES = {
    "bfloat16": "run with --bf16",
    "float16": "run with --fp16",
    "float32": "run without --bf16 and --fp16",
}


def _model_differences(saved: RunShape, current: RunShape) -> Iterator[Difference]:
    before, after = dict(_leaves(saved.model)), dict(_leaves(current.model))
    for name in dict.fromkeys((*before, *after)):
        here, now = before.get(name), after.get(name)
        if _same(here, now):
            continue
        fact = name.split(".")[0]
        follows = (fact == "layers_per_stage" and _split_follows(here, now, saved.topology, current.topology)) or (
            fact == "model_chunks" and saved.topology.vpp != current.topology.vpp
        )
        shown_here, shown_now = _excerpts(_render(here), _render(now))
        if follows:
            remedy = "nothing more: it follows pp and vpp"
        elif fact == "params_dtype":
            remedy = _DTYPE_REMEDIES.get(str(here).rsplit(".", 1)[-1], f"run with parameters of {shown_here}")
        else:
            remedy = _MODEL_REMEDIES.get(fact, "give this run the checkpoint's value").format(saved=shown_here)
        yield Difference(name, shown_here, shown_now, remedy, reshapable=follows)


def _split_follows(saved: JSON, current: JSON, before: Topology, after: Topology) -> bool:
    """Whether the layer split differs only because the pipeline does: even on both sides, over other stages."""
    if (before.pp, before.vpp) == (after.pp, after.vpp):
        return False
    counts = [list(_flatten(split)) for split in (saved, current)]
    return all(split and all(_same(count, split[0]) for count in split) for split in counts)


def _flatten(value: JSON) -> Iterator[JSON]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from _flatten(part)
    else:
        yield value


def _leaves(facts: Mapping[str, JSON], prefix: str = "") -> Iterator[tuple[str, JSON]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _same(first: JSON, second: JSON) -> bool:
    # Through JSON, for one side has been on disk: tuples are lists there, while true is not 1 and 1 is not 1.0.
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def _render(value: JSON) -> str:
    if value is None:
        return "not recorded"
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _excerpts(first: str, second: str, width: int = 36) -> tuple[str, str]:
    """Both texts cut to about `width` characters around the first place where they differ."""
    shorter = min(len(first), len(second))
    differs = next((place for place in range(shorter) if first[place] != second[place]), shorter)
    start = max(0, differs - width // 2) if max(len(first), len(second)) > width else 0

    def cut(text: str) -> str:
        return ("..." if start else "") + text[start : start + width] + ("..." if len(text) > start + width else "")

    return cut(first), cut(second)


def format_differences(differences: Sequence[Difference]) -> str:
    """The table for the person on call: field, checkpoint, this run, what to do; then what no reshard could change."""
    if not differences:
        return "no differences"
    rows = [("field", "checkpoint", "this run", "what to do")]
    rows += [(each.field, each.checkpoint, each.this_run, each.remedy) for each in differences]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "-" * widths[3]))
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if reshapable := [each.field for each in differences if each.reshapable]:
        lines.append(f"Resharding is not in this release, so these must be the checkpoint's: {', '.join(reshapable)}.")
    if fixed := [each.field for each in differences if not each.reshapable]:
        lines.append(f"No reshard can change these, the checkpoint is of another run or model: {', '.join(fixed)}.")
    return "\n".join(lines)
