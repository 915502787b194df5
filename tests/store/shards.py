"""Shard files for tests: made, taken apart and put together again, the latter two without the code under test."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megaresume.store.shard import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    Entry,
    ShardIdentity,
    ShardRecord,
    Target,
    read_header,
    stream_tensors,
    write_shard,
)

IDENTITY = ShardIdentity(root_id="3f2a", attempt=3, step=1200, coordinate="tp00-pp01-dp00")
INDEX = {"version": 1, "tensors": {"model/w": {"parameter": "w", "slot": "weight"}}, "groups": ["größer"]}


def entry(name: str, dtype: str, shape: tuple[int, ...], seed: int = 0) -> Entry:
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    return Entry(name, dtype, shape, memoryview(np.random.default_rng([seed, *name.encode()]).bytes(size)))


def small_entries() -> list[Entry]:
    return [
        entry("model/w", "BF16", (3, 5)),
        entry("model/empty", "F32", (0, 7)),
        entry("optim/exp_avg/w", "F32", (11,)),
        entry("rng/torch", "U8", (7,)),
        entry("optim/step", "I64", ()),
        entry("model/last empty", "F16", (2, 0)),
    ]


def write(path: Path, entries: Sequence[Entry]) -> ShardRecord:
    return write_shard(path, entries, identity=IDENTITY, index=INDEX)


def collect(path: Path, names: Sequence[str] | None = None, *, verify: bool = True) -> dict[str, bytes]:
    header = read_header(path)
    found = {
        name: bytearray(header.tensors[name].end - header.tensors[name].begin)
        for name in (header.tensors if names is None else names)
    }

    def sink(name: str) -> Callable[[int, memoryview], None]:
        def take(offset: int, data: memoryview) -> None:
            found[name][offset : offset + len(data)] = data

        return take

    stream_tensors(path, header, {name: Target(sink=sink(name)) for name in found}, verify=verify)
    return {name: bytes(data) for name, data in found.items()}


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header as JSON, data section), read independently of the code under test."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(path: Path, table: Any, data: bytes, *, align: int = 4096) -> Path:
    """A file with any header at all, its digests as they were."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text = text.ljust(-(-(8 + len(text)) // align) * align - 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def with_digests(table: dict[str, Any], data: bytes) -> dict[str, Any]:
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    table["__metadata__"]["chunk_digests"] = "".join(map(xxhash.xxh3_64_hexdigest, chunks))
    return table
