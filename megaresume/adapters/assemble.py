"""Whole (unsharded) weights of a committed checkpoint, from any topology, put together from its files alone.

Knows the logical index (docs/on-disk-format.md); no live object, no process group. For checkpoints that fit into one
process's memory, as adapters do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megaresume.errors import CheckpointDamagedError, FormatError, UnsupportedError
from megaresume.state.index import check_index
from megaresume.state.tensors import empty_for, target_for
from megaresume.store import layout
from megaresume.store.manifest import Manifest, parse_manifest
from megaresume.store.shard import ShardHeader, ShardIdentity, check_identity, read_header, stream_tensors

_ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class _Part:
    """A local (tensor parallel) part of a parameter, filled from the files of its replicas."""

    values: torch.Tensor
    filled: torch.Tensor
    entry: Mapping[str, Any]


@dataclass
class _Whole:
    shape: list[int]
    parts: dict[str, _Part] = field(default_factory=dict)


def assemble_weights(checkpoint: Path) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """(manifest, weights by global name, whole, on the host). Every byte is verified against its digest.

    Raises CheckpointDamagedError where the files do not cover a parameter, or copies of one part differ; FormatError
    for an index that is not of the documented form.
    """
    manifest = parse_manifest(checkpoint / layout.MANIFEST)
    wholes: dict[str, _Whole] = {}
    for name, record in sorted(manifest.files.items()):
        shard = checkpoint / name
        header = read_header(shard, record=record)
        stem = name.removesuffix(layout.SHARD_SUFFIX)
        check_identity(header, ShardIdentity(manifest.root_id, manifest.attempt, manifest.step, stem), shard)
        try:
            check_index(header.index, header.tensors)
            _take(wholes, shard, header, most=manifest.total_bytes)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise FormatError(f"{shard}: its index is not of the documented form ({error})") from error
    return manifest, {name: _join(checkpoint, name, whole) for name, whole in sorted(wholes.items())}


def _take(wholes: dict[str, _Whole], shard: Path, header: ShardHeader, *, most: int) -> None:
    """Take in what one file holds. A part of more than `most` elements is not in files of that many bytes."""
    index = header.index
    for name, entry in index["parameters"].items():
        _check_part(entry, f"{shard}: parameter {name}", most)
        whole = wholes.setdefault(name, _Whole(entry["global_shape"]))
        if whole.shape != entry["global_shape"]:
            raise FormatError(f"{shard}: parameter {name} is of another global shape than in the files before")
    for name, each, values in weights_in(shard, header):
        entry = index["parameters"][each["parameter"]]
        start, end = each["range"]
        size = math.prod(entry["local_shape"])
        if not 0 <= start <= end <= size or values.numel() != end - start:
            raise FormatError(f"{shard}: {name}: elements {start} to {end} of {size}, the file holds {values.numel()}")
        key = json.dumps(entry["chunks"])
        parts = wholes[each["parameter"]].parts
        if key not in parts:
            parts[key] = _Part(values.new_empty(size), torch.zeros(size, dtype=torch.bool), entry)
        part = parts[key]
        again = part.filled[start:end]
        if not torch.equal(part.values[start:end][again], values[again]):
            raise CheckpointDamagedError(f"{shard}: {name} differs from another rank's copy of the same elements")
        part.values[start:end] = values
        again[:] = True


def weights_in(shard: Path, header: ShardHeader) -> Iterator[tuple[str, Mapping[str, Any], torch.Tensor]]:
    """(name, index entry, flat values) of each weight in the file, those rounded from their masters included.

    Call it after `check_index`. Raises UnsupportedError for weights that lie in an earlier checkpoint: those were not
    trained.
    """
    index = header.index
    weights = {name: each for name, each in index["tensors"].items() if each["slot"] == "weight"}
    if elsewhere := [name for name, each in weights.items() if each["kind"] == "referenced"]:
        raise UnsupportedError(f"{shard}: {elsewhere[0]} lies in an earlier checkpoint: an adapter's weights never do")
    sources = {each["from"] if each["kind"] == "derived" else name for name, each in weights.items()}
    tensors = {name: empty_for(name, header.tensors) for name in sources}
    stream_tensors(shard, header, {name: target_for(tensor) for name, tensor in tensors.items()})
    for name, each in weights.items():
        if each["kind"] == "stored":
            yield name, each, tensors[name].reshape(-1)
        else:
            dtype, first = index["parameters"][each["parameter"]]["dtype"], index["tensors"][each["from"]]["range"][0]
            if dtype not in _ROUNDED:
                raise FormatError(f"{shard}: {name}: no weight of dtype {str(dtype)[:40]!r} is rounded from a master")
            start, end = each["range"]
            yield name, each, tensors[each["from"]].reshape(-1)[start - first : end - first].to(_ROUNDED[dtype])


def _check_part(entry: Mapping[str, Any], where: str, most: int) -> None:
    """Numbers that address memory may come from anywhere."""
    local = math.prod(_sizes(entry["local_shape"], where))
    if local > most:
        raise FormatError(f"{where}: a local part of {local} elements in a checkpoint of {most} bytes")
    shape = _sizes(entry["global_shape"], where)
    covered = 0
    for chunk in entry["chunks"]:
        sizes, strides, at = (_sizes(chunk[key], where) for key in ("shape", "strides", "global_offset"))
        offset = _sizes([chunk["offset"]], where)[0]
        if not len(sizes) == len(strides) == len(at) == len(shape):
            raise FormatError(f"{where}: a chunk of {len(sizes)} dimensions in a parameter of {len(shape)}")
        last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        outside = any(begin + size > bound for begin, size, bound in zip(at, sizes, shape, strict=True))
        size = math.prod(sizes)
        covered += size
        if outside or (size and last >= local):
            raise FormatError(f"{where}: a chunk lies outside of the parameter")
    if covered != local:
        raise FormatError(f"{where}: its chunks hold {covered} elements, its local part {local}")


def _sizes(values: Any, where: str) -> list[int]:
    if type(values) is not list or any(type(value) is not int or value < 0 for value in values):
        raise FormatError(f"{where}: expected whole numbers, found {str(values)[:80]!r}")
    return values


def _join(checkpoint: Path, name: str, whole: _Whole) -> torch.Tensor:
    held = sum(part.values.numel() for part in whole.parts.values())
    missing = sum(int((~part.filled).sum()) for part in whole.parts.values())
    # Before memory is taken: what is not held cannot be joined, however large the file says it is.
    if missing or held != math.prod(whole.shape):
        raise CheckpointDamagedError(
            f"{checkpoint}: its files hold {held - missing} elements of {name}, whose shape is {whole.shape}"
        )
    parts = list(whole.parts.values())
    if not parts:
        raise CheckpointDamagedError(f"{checkpoint}: no file holds {name}")
    joined = parts[0].values.new_empty(whole.shape)
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    for part in parts:
        for chunk in part.entry["chunks"]:
            box = tuple(slice(at, at + n) for at, n in zip(chunk["global_offset"], chunk["shape"], strict=True))
            joined[box] = part.values.as_strided(chunk["shape"], chunk["strides"], chunk["offset"])
            covered[box] = True
    if not bool(covered.all()):
        raise CheckpointDamagedError(f"{checkpoint}: two ranks hold the same elements of {name}, and none some others")
    return joined
