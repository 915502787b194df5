"""Which base a set of adapters belongs to: one number over the names, shapes, dtypes and bits of its frozen parameters.

Each parameter's is a sum over its elements of their bits times a weight that follows from the element's place in the
*global* parameter. So parts that lie on different ranks add up to the whole's, and the same base has the same
fingerprint in every topology; any single changed element changes it. It finds mistakes, not tampering.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from megaresume.errors import StateMismatchError
from megaresume.state.description import Chunk, Parameter, ReplicaGroup
from megaresume.store.control import ControlPlane

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUND = 2**22  # elements at a time: a few of their 8-byte images are in memory at once


def base_fingerprint(
    parameters: Mapping[str, Parameter], replicas: Mapping[str, ReplicaGroup], control: ControlPlane
) -> str:
    """32 hex digits, the same on every rank. Collective; each replica reads its share of the parameters once.

    Raises StateMismatchError, on all ranks, where two ranks hold different copies of one part.
    """

    def own_share() -> list[Any]:
        share = []
        for number, name in enumerate(sorted(parameters)):
            parameter = parameters[name]
            group = replicas[parameter.replica]
            if number % group.size == group.rank:
                sums = [[list(chunk.global_offset), str(_chunk_sum(parameter, chunk))] for chunk in parameter.chunks]
                share.append([name, _form(parameter), sums])
        return share

    answers = control.together("fingerprint the base", own_share)
    told: str = control.decide("fingerprint the base", lambda: _join(answers or []))
    return told


def _form(parameter: Parameter) -> list[Any]:
    return [list(parameter.global_shape), str(parameter.tensor.dtype).removeprefix("torch.")]


def _chunk_sum(parameter: Parameter, chunk: Chunk) -> int:
    live = parameter.tensor.detach()
    box = live.as_strided(chunk.shape, chunk.strides, live.storage_offset() + chunk.offset)
    box = box.reshape(1) if box.ndim == 0 else box
    rows = max(1, _ROUND // max(1, math.prod(box.shape[1:])))
    total = 0
    for begin in range(0, box.shape[0], rows):
        part = box[begin : begin + rows].contiguous()
        first = [at + begin if axis == 0 else at for axis, at in enumerate(chunk.global_offset)]
        places = _places(part.shape, first or [0], parameter.global_shape or (1,), live.device)
        total += int((part.view(_BITS[live.element_size()]).to(torch.int64) * _weight(places)).sum())
    return total % 2**64


def _places(
    shape: Sequence[int], offset: Sequence[int], global_shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The flat global positions of the elements of a box, int64 in the box's shape."""
    places, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for axis in reversed(range(len(shape))):
        along = (torch.arange(shape[axis], device=device) + offset[axis]) * stride
        places = along.reshape(-1, *(1 for _ in shape[axis + 1 :])) + places
        stride *= global_shape[axis]
    return places


def _weight(place: torch.Tensor) -> torch.Tensor:
    """An odd 64-bit number that looks random, from an element's place: odd, so that no change of its bits cancels."""
    mixed = (place + 1) * -7046029254386353131  # 2**64 divided by the golden ratio, as splitmix64 has it
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed | 1


def _join(answers: Sequence[Sequence[Any]]) -> str:
    sums: dict[str, dict[str, str]] = {}
    forms: dict[str, Any] = {}
    for rank, share in enumerate(answers):
        for name, form, chunks in share:
            forms[name] = form
            for offset, value in chunks:
                at = json.dumps(offset)
                known = sums.setdefault(name, {}).setdefault(at, value)
                if known != value:
                    raise StateMismatchError(
                        f"{name}: rank {rank} holds other values at {at} than a rank before it, though both are copies "
                        "of one part of the base: load the base on every rank"
                    )
    whole = [[name, forms[name], sum(map(int, sums[name].values())) % 2**64] for name in sorted(sums)]
    return xxhash.xxh3_128_hexdigest(json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode())
