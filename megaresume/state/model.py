"""Model weights: which part of them a rank writes, where a stored part goes, how replicas complete each other.

All ranks of a replica group hold the same weights, so each writes one share of the bytes and a load reads each byte
once; the rest travels through memory. Knows descriptions and ranges, no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from megaresume.state.description import Live, Parameter, ReplicaGroup
from megaresume.state.tensors import byte_view


@dataclass(frozen=True)
class Piece:
    """Elements `[start, end)` of a flattened local parameter."""

    parameter: str
    start: int
    end: int


# Pieces, none empty, that lie one behind the other in memory.
Stretch: TypeAlias = list[Piece]


def split_over_replicas(sizes: Mapping[str, tuple[int, int]], ranks: int) -> list[list[Piece]]:
    """Cut the parameters, laid end to end in order of their names, into `ranks` runs of nearly equal bytes.

    `sizes` maps a name to (elements, bytes per element). Element `[i]` of the result is what rank i writes. Every
    element is in exactly one piece, and a rank has at most one piece of a parameter; a rank gets one run, so at most
    two of its parameters are cut however large the group is. A pure function of its arguments: all ranks of the group
    compute the same split without talking.
    """
    total = sum(elements * width for elements, width in sizes.values())
    runs: list[list[Piece]] = [[] for _ in range(ranks)]
    begin = 0
    for name in sorted(sizes):
        elements, width = sizes[name]
        position = 0
        if elements == 0:
            runs[0].append(Piece(name, 0, 0))
        while position < elements:
            rank = min((begin + position * width) * ranks // total, ranks - 1)
            run_end = -(-(rank + 1) * total // ranks)
            # An element belongs to the rank in whose run its first byte lies.
            stop = min(elements, -(-(run_end - begin) // width))
            runs[rank].append(Piece(name, position, stop))
            position = stop
        begin += elements * width
    return runs


def own_pieces(live: Live) -> Iterator[Piece]:
    """The pieces that this rank stores, over all its replica groups: its share of the bytes, and those whose masters it
    holds where replicas split these."""
    for replica, group in sorted(live.replicas.items()):
        yield from _split_by_bytes(live, replica)[group.rank]
        for name in _split_by_masters(live, replica):
            start, end = live.shares[name]
            if start < end:
                yield Piece(name, start, end)


def _split_by_bytes(live: Live, replica: str) -> list[list[Piece]]:
    sizes = {
        name: (parameter.tensor.numel(), parameter.tensor.element_size())
        for name, parameter in live.parameters.items()
        if parameter.replica == replica and name not in live.shares
    }
    return split_over_replicas(sizes, live.replicas[replica].size)


def _split_by_masters(live: Live, replica: str) -> list[str]:
    return sorted(name for name in live.shares if live.parameters[name].replica == replica)


def slice_of(parameter: Parameter, start: int, end: int) -> torch.Tensor:
    """The live elements `[start, end)`, in the parameter's own shape where that is all of it, else flat."""
    tensor = parameter.tensor.detach()
    return tensor if (start, end) == (0, tensor.numel()) else tensor.view(-1)[start:end]


def model_mismatches(index: Mapping[str, Any], live: Live) -> list[str]:
    """Every way (name, shape, place, dtype) in which the stored parameters are not this model's; empty where none."""
    saved: Mapping[str, Any] = index["parameters"]
    problems = [
        f"parameter {name} is in the checkpoint, not in this model"
        for name in sorted(set(saved) - set(live.parameters))
    ]
    problems += [
        f"parameter {name} is in this model, not in the checkpoint"
        for name in sorted(set(live.parameters) - set(saved))
    ]
    for name in sorted(set(saved) & set(live.parameters)):
        current = live.parameters[name].to_index()
        for field, wanted in current.items():
            found = saved[name].get(field)
            if found != wanted:
                problems.append(f"parameter {name}: {field} is {found} in the checkpoint, {wanted} in this run")
    return problems


def complete_replicas(live: Live) -> None:
    """Give every rank the pieces its replicas loaded. Collective over each replica group; call it on all ranks or none.

    Every rank broadcasts what it loaded, from and into the parameters themselves: no memory is needed.
    """
    for replica in sorted(live.replicas):
        group = live.replicas[replica]
        if group.size > 1 and any(parameter.replica == replica for parameter in live.parameters.values()):
            _exchange(live, group, _stretches_by_rank(live, replica))


def _exchange(live: Live, group: ReplicaGroup, runs: list[list[Stretch]]) -> None:
    sources = dist.get_process_group_ranks(group.process_group)
    under_way = [
        dist.broadcast(byte_view(_memory_of(live, stretch)), src=source, group=group.process_group, async_op=True)
        for source, run in zip(sources, runs, strict=True)
        for stretch in run
    ]
    for work in under_way:
        work.wait()


def _memory_of(live: Live, stretch: Stretch) -> torch.Tensor:
    first, elements = stretch[0], sum(piece.end - piece.start for piece in stretch)
    tensor = live.parameters[first.parameter].tensor.detach()
    return tensor.as_strided((elements,), (1,), tensor.storage_offset() + first.start)


def _stretches_by_rank(live: Live, replica: str) -> list[list[Stretch]]:
    """For each rank of the replica group the pieces that it has loaded. Collective over the group."""
    group, runs = live.replicas[replica], _split_by_bytes(live, replica)
    stretches = [[[piece] for piece in run if piece.start < piece.end] for run in runs]
    names = _split_by_masters(live, replica)
    if not names:
        return stretches
    # Which masters the others hold follows from an optimizer's buckets, which only it can tell.
    device = live.parameters[names[0]].tensor.device
    shares = torch.tensor([live.shares[name] for name in names], dtype=torch.int64)
    mine = torch.cat([shares, torch.tensor(_places(live, names), dtype=torch.int64)], dim=1).to(device)
    tables = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(tables, mine, group=group.process_group)
    # Only what lies next to one another on every rank is sent as one.
    alike = all(torch.equal(table[:, 2:], mine[:, 2:]) for table in tables)
    places = dict(zip(names, mine[:, 2:].tolist(), strict=True)) if alike else {}
    for run, table in zip(stretches, tables, strict=True):
        loaded = [Piece(name, start, end) for name, (start, end, *_) in zip(names, table.tolist(), strict=True)]
        run += join_neighbours([piece for piece in loaded if piece.start < piece.end], places)
    return stretches


def _places(live: Live, names: Sequence[str]) -> list[tuple[int, int]]:
    """(number of the block of memory, first element in it) of each parameter."""
    blocks: dict[tuple[int, torch.dtype], int] = {}
    tensors = [live.parameters[name].tensor for name in names]
    return [
        (
            blocks.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), len(blocks)),
            int(tensor.storage_offset()),
        )
        for tensor in tensors
    ]


def join_neighbours(pieces: Sequence[Piece], places: Mapping[str, Sequence[int]]) -> list[Stretch]:
    """Pieces (none empty) that begin where another one ends in the same block of memory, together. megatron-core lays
    the parameters of a bucket end to end and gives each rank one part of it: one message instead of a hundred.

    `places[name]` is (block, first element in it); pieces of other parameters stay alone. Pure.
    """
    joined: list[Stretch] = [[piece] for piece in pieces if piece.parameter not in places]
    end: tuple[int, int] | None = None
    for piece in sorted(
        (piece for piece in pieces if piece.parameter in places),
        key=lambda piece: (places[piece.parameter][0], places[piece.parameter][1] + piece.start),
    ):
        block, begin = places[piece.parameter]
        if end == (block, begin + piece.start):
            joined[-1].append(piece)
        else:
            joined.append([piece])
        end = (block, begin + piece.end)
    return joined


def piece_name(piece: Piece) -> str:
    """The name in the file; a rank stores at most one piece of a parameter."""
    return f"model/{piece.parameter}"


def piece_mismatches(index: Mapping[str, Any], live: Live) -> list[str]:
    """Why the file does not hold exactly the model pieces that this rank is to load; empty where it does."""
    stored = {name: entry for name, entry in index["tensors"].items() if name.startswith("model/")}
    wanted = {piece_name(piece): [piece.start, piece.end] for piece in own_pieces(live)}
    return [
        f"{name}: the file holds elements {_range(stored.get(name, {}).get('range'))}, this rank loads "
        f"{_range(wanted.get(name))}; the checkpoint was written with another split over replicas"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name, {}).get("range") != wanted.get(name)
    ]


def _range(at: list[int] | None) -> str:
    return "none" if at is None else f"{at[0]} to {at[1]}"
