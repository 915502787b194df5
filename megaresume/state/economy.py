"""What of a rank's state need not be written: weights that are their rounded masters, and frozen weights of before.

Decided entry by entry from the bytes themselves, at every save: a weight that differs from its rounded master in one
bit is stored, and so is a frozen one whose digest is not that of the bytes in the earlier checkpoint. Knows the logical
index and bytes, no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from megaresume.state.tensors import SERIAL_ELEMENTS, dtype_of
from megaresume.store.manifest import Reference
from megaresume.store.references import Source
from megaresume.store.shard import Entry

_ROUNDED = ("BF16", "F16")


@dataclass(frozen=True)
class Economy:
    """`entries` are those to write, `index` says of the others where they are, `sources` are those referred to."""

    entries: list[Entry]
    index: dict[str, Any]
    sources: list[Source]


def leave_out(entries: Sequence[Entry], index: Mapping[str, Any], known: Mapping[str, Source]) -> Economy:
    """Sort out what is to be written. `known` says where earlier frozen tensors lie, as `sources_in` gave it."""
    listed: dict[str, dict[str, Any]] = dict(index["tensors"])
    masters = {
        entry.name: entry for entry in entries if listed[entry.name]["slot"] == "master" and entry.dtype == "F32"
    }
    homes = {listed[name]["parameter"]: name for name in masters}
    kept: list[Entry] = []
    sources: list[Source] = []
    for entry in entries:
        listing = listed[entry.name]
        parameter = index["parameters"].get(listing["parameter"]) if listing["slot"] == "weight" else None
        master = homes.get(listing["parameter"])
        if parameter is None or entry.data.nbytes == 0:
            kept.append(entry)
        elif master is not None and _is_rounded(entry, listing["range"], masters[master], listed[master]["range"]):
            listed[entry.name] = {**listing, "kind": "derived", "from": master}
        elif parameter["trainable"]:
            kept.append(entry)
        else:
            digest = xxhash.xxh3_128_hexdigest(entry.data)
            source = known.get(_key(entry.name, listing, parameter))
            if source is not None and source.digest == digest:
                place: dict[str, Any] = {"step": source.reference.step, "attempt": source.reference.attempt}
                place |= {"file": source.reference.name, "tensor": source.tensor}
                listed[entry.name] = {**listing, "kind": "referenced", "digest": digest, "from": place}
                sources.append(source)
            else:
                listed[entry.name] = {**listing, "digest": digest}
                kept.append(entry)
    return Economy(kept, {**index, "tensors": listed}, sources)


def sources_in(index: Mapping[str, Any], written: Reference, references: Iterable[Reference] = ()) -> dict[str, Source]:
    """Where the frozen weights lie that a later save may refer to: in the file `written`, whose index this is, or in
    the `references` of its checkpoint."""
    files = {(each.step, each.attempt, each.name): each for each in references}
    sources = {}
    for name, entry in index["tensors"].items():
        if "digest" not in entry or entry["parameter"] not in index["parameters"]:
            continue
        key = _key(name, entry, index["parameters"][entry["parameter"]])
        if entry["kind"] == "stored":
            sources[key] = Source(written, name, entry["digest"])
        elif entry["kind"] == "referenced" and (file := files.get(place_of(entry["from"]))) is not None:
            sources[key] = Source(file, entry["from"]["tensor"], entry["digest"])
    return sources


def place_of(place: Mapping[str, Any]) -> tuple[int, int, str]:
    """(step, attempt, file) that an index refers to."""
    return place["step"], place["attempt"], place["file"]


def _key(name: str, listing: Mapping[str, Any], parameter: Mapping[str, Any]) -> str:
    """Frozen tensors of the same name, elements and dtype may have the same bytes; others are not asked."""
    return f"{name} {listing['range']} {parameter['dtype']} {parameter['local_shape']}"


def _is_rounded(weight: Entry, at: list[int], master: Entry, master_at: list[int]) -> bool:
    if weight.dtype not in _ROUNDED or not (master_at[0] <= at[0] and at[1] <= master_at[1]):
        return False
    dtype = dtype_of(weight.dtype, weight.name)
    have = torch.frombuffer(weight.data, dtype=torch.int16)
    full = torch.frombuffer(master.data, dtype=torch.float32)[at[0] - master_at[0] : at[1] - master_at[0]]
    # Bits are compared, not numbers: -0.0 is not 0.0 to a run that is to go on bit for bit, and NaN is itself.
    blocks = zip(torch.split(have, SERIAL_ELEMENTS), torch.split(full, SERIAL_ELEMENTS), strict=True)
    return all(torch.equal(bits, numbers.to(dtype).view(torch.int16)) for bits, numbers in blocks)
