"""One rank's shard file: a valid safetensors file that carries its identity, its index and the digests of its bytes.

Writes a shard in one pass and reads it back in one pass, trusting no byte of it. Knows tensors as names, dtype codes,
shapes and bytes; what they mean is said by the index, which is stored and returned unread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from megaresume.errors import CheckpointDamagedError, ConfigurationError
from megaresume.store import fs
from megaresume.store.shard_header import (
    ALIGNMENT,
    CHUNK_BYTES,
    DTYPE_BYTES,
    LENGTH_BYTES,
    MAX_TEXT_BYTES,
    METADATA,
    ShardHeader,
    ShardIdentity,
    TensorSpan,
    encode_head,
    head_digest,
    parse_head,
    set_digests,
)

__all__ = [
    "CHUNK_BYTES",
    "DTYPE_BYTES",
    "Entry",
    "ShardHeader",
    "ShardIdentity",
    "ShardRecord",
    "Sink",
    "TensorSpan",
    "check_identity",
    "read_header",
    "stream_tensors",
    "verify_shard",
    "write_shard",
]

# Read or written by one system call: few calls, yet what was just hashed or read is still in the processor's cache.
_BATCH_BYTES = 4 * CHUNK_BYTES

# Takes (byte offset inside the tensor, bytes): in order, several times for a large tensor, never for one without bytes.
# The bytes are only valid during the call.
Sink: TypeAlias = Callable[[int, memoryview], None]


@dataclass(frozen=True)
class Entry:
    """A tensor to write: `data` is its bytes in C order, little-endian, as many as `dtype` and `shape` say."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says of a file: its size in bytes, and the digest (xxh3_128, hex) of all before the data."""

    size: int
    header_digest: str


# --- writing ---------------------------------------------------------------------------------------------------------


def write_shard(
    path: Path, entries: Sequence[Entry], *, identity: ShardIdentity, index: Mapping[str, Any]
) -> ShardRecord:
    """Write `entries`, in this order, to the file `path` and fsync it; a file there already is replaced.

    Local to this rank. Copies no tensor: the bytes go from `Entry.data` to the system and must not change meanwhile.
    Raises `ConfigurationError` for what makes no valid file, before anything is written; `OSError` as the disk does.
    """
    spans = _lay_out(entries)
    head = encode_head(spans, identity=identity, index=index)
    with fs.open_for_writing(path) as descriptor:
        fs.write_all(descriptor, head)
        set_digests(head, list(_write_data(descriptor, entries)))
        fs.write_all_at(descriptor, head, 0)
        fs.fsync_file(descriptor)
    return ShardRecord(size=len(head) + (spans[-1].end if spans else 0), header_digest=head_digest(head))


def _lay_out(entries: Sequence[Entry]) -> list[TensorSpan]:
    spans: list[TensorSpan] = []
    names = {METADATA}
    begin = 0
    for entry in entries:
        if entry.name in names:
            raise ConfigurationError(f"entry {entry.name!r}: expected a name of its own, found one taken before.")
        names.add(entry.name)
        if entry.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ConfigurationError(f"entry {entry.name!r}: expected a dtype of {known}, found {entry.dtype!r}.")
        expected = math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
        if entry.data.nbytes != expected or not entry.data.c_contiguous:
            raise ConfigurationError(
                f"entry {entry.name!r}: expected {expected} contiguous bytes for {entry.dtype} {list(entry.shape)}, "
                f"found {entry.data.nbytes}{'' if entry.data.c_contiguous else ', not contiguous'}."
            )
        spans.append(TensorSpan(entry.name, entry.dtype, tuple(entry.shape), begin, begin + expected))
        begin += expected
    return spans


def _write_data(descriptor: int, entries: Sequence[Entry]) -> Iterator[str]:
    """Write the data section, yielding the digest of each chunk."""
    hasher, room = xxhash.xxh3_64(), CHUNK_BYTES
    batch: list[memoryview] = []
    batched = 0
    for piece in _pieces(entries):
        hasher.update(piece)
        batch.append(piece)
        batched += len(piece)
        room -= len(piece)
        if room == 0:
            yield hasher.hexdigest()
            hasher, room = xxhash.xxh3_64(), CHUNK_BYTES
            if batched >= _BATCH_BYTES:
                fs.write_vectors(descriptor, batch)
                batch, batched = [], 0
    if room < CHUNK_BYTES:
        yield hasher.hexdigest()
    fs.write_vectors(descriptor, batch)


def _pieces(entries: Sequence[Entry]) -> Iterator[memoryview]:
    """The bytes of all entries, cut so that no piece crosses the end of a chunk."""
    room = CHUNK_BYTES
    for entry in entries:
        if entry.data.nbytes == 0:
            continue  # `cast` refuses a view with a zero in its shape
        data = entry.data.cast("B")
        while data:
            piece, data = data[:room], data[room:]
            room = room - len(piece) or CHUNK_BYTES
            yield piece


# --- the header ------------------------------------------------------------------------------------------------------


def read_header(path: Path, *, record: ShardRecord | None = None) -> ShardHeader:
    """Read and check all that stands before the data section, and the size of the file.

    With the manifest's `record`, size and digest are compared before the text is parsed, so that damage is not taken
    for another version. Raises `CheckpointDamagedError` naming file, expected and found; `FormatError` for a
    safetensors file that is no shard of ours, or one of a newer version.
    """
    with fs.open_for_reading(path) as (descriptor, size):
        if record is not None:
            _check_size(size, record, path)
        head = _read_head(descriptor, size, path)
    if record is not None:
        _check_digest(head_digest(head), record, path)
    return parse_head(head, size=size, path=path)


def check_identity(header: ShardHeader, identity: ShardIdentity, path: Path) -> None:
    """Raise `CheckpointDamagedError` unless the file says that it is `identity`'s: tells swapped and stray files."""
    for field in ("root_id", "attempt", "step", "coordinate"):
        expected, found = getattr(identity, field), getattr(header.identity, field)
        if expected != found:
            raise CheckpointDamagedError(
                f"{path}: another checkpoint's or another rank's file: expected {field} {expected!r}, found {found!r}. "
                "Put the right file back, or resume from another checkpoint."
            )


def _check_size(size: int, record: ShardRecord, path: Path) -> None:
    if size != record.size:
        cut = "truncated" if size < record.size else "longer than written"
        raise CheckpointDamagedError(f"{path}: {cut}: expected {record.size} bytes (manifest), found {size}.")


def _check_digest(digest: str, record: ShardRecord, path: Path) -> None:
    if digest != record.header_digest:
        raise CheckpointDamagedError(
            f"{path}: altered, or not this checkpoint's: expected header digest {record.header_digest} (manifest), "
            f"found {digest}. Resume from another checkpoint."
        )


def _read_head(descriptor: int, size: int, path: Path) -> bytes:
    if size < ALIGNMENT:
        raise CheckpointDamagedError(f"{path}: truncated: expected at least {ALIGNMENT} bytes, found {size}.")
    length = bytearray(LENGTH_BYTES)
    fs.read_into_at(descriptor, memoryview(length), 0, path)
    announced = int.from_bytes(length, "little")
    data_start = LENGTH_BYTES + announced
    # Before anything of that length is allocated.
    if announced > MAX_TEXT_BYTES or data_start > size:
        most = min(MAX_TEXT_BYTES, size - LENGTH_BYTES)
        raise CheckpointDamagedError(
            f"{path}: truncated or altered: expected a header of at most {most} bytes, found {announced} announced."
        )
    if announced == 0 or data_start % ALIGNMENT:
        raise CheckpointDamagedError(
            f"{path}: expected the data section at a multiple of {ALIGNMENT} bytes, found it at {data_start}."
        )
    head = bytearray(data_start)
    fs.read_into_at(descriptor, memoryview(head), 0, path)
    if head[LENGTH_BYTES] != ord("{"):
        raise CheckpointDamagedError(f"{path}: expected '{{' at byte {LENGTH_BYTES}, found {head[LENGTH_BYTES]:#04x}.")
    return bytes(head)


# --- the data --------------------------------------------------------------------------------------------------------


def stream_tensors(path: Path, header: ShardHeader, sinks: Mapping[str, Sink], *, verify: bool = True) -> None:
    """Hand the bytes of the tensors named in `sinks` to their sinks, in file order.

    Chunks in which no sink has a part are not read. With `verify`, a chunk's digest is checked before any of it is
    handed on. Raises `CheckpointDamagedError` for a name the file does not hold (before any sink is called), and for a
    file that has changed since `header` was read or differs from its digests (sinks called before had good bytes).
    """
    missing = sorted(sinks.keys() - header.tensors.keys())
    if missing:
        raise CheckpointDamagedError(
            f"{path}: expected tensor {missing[0]!r} in it, found none ({len(missing)} missing)."
        )
    wanted = [span for span in header.tensors.values() if span.name in sinks and span.begin < span.end]
    first = 0  # of `wanted` that reaches into the present chunk
    for begin, chunk in _read_chunks(path, header, _chunk_runs(wanted), verify=verify):
        end = begin + len(chunk)
        while wanted[first].end <= begin:
            first += 1
        position = first
        while position < len(wanted) and wanted[position].begin < end:
            span = wanted[position]
            low, high = max(span.begin, begin), min(span.end, end)
            sinks[span.name](low - span.begin, chunk[low - begin : high - begin])
            position += 1


def verify_shard(path: Path, header: ShardHeader) -> None:
    """Read the whole data section and raise `CheckpointDamagedError` where it differs from its digests."""
    for _ in _read_chunks(path, header, [range(len(header.chunk_digests))], verify=True):
        pass


def _chunk_runs(spans: Sequence[TensorSpan]) -> list[range]:
    """The chunks in which `spans` (in file order, none empty) lie, as runs of neighbours."""
    runs: list[range] = []
    for span in spans:
        start, stop = span.begin // CHUNK_BYTES, -(-span.end // CHUNK_BYTES)
        if runs and start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, stop)
        else:
            runs.append(range(start, stop))
    return runs


def _read_chunks(
    path: Path, header: ShardHeader, runs: Sequence[range], *, verify: bool
) -> Iterator[tuple[int, memoryview]]:
    """(first byte in the data section, bytes) of each chunk in `runs`; the bytes live until the next is asked for."""
    data_bytes = header.size - header.data_start
    buffer = memoryview(bytearray(min(_BATCH_BYTES, data_bytes)))
    with fs.open_for_reading(path) as (descriptor, size):
        if size != header.size:
            raise CheckpointDamagedError(f"{path}: changed meanwhile: expected {header.size} bytes, found {size}.")
        for run in runs:
            stop = min(run.stop * CHUNK_BYTES, data_bytes)
            for start in range(run.start * CHUNK_BYTES, stop, _BATCH_BYTES):
                batch = buffer[: min(_BATCH_BYTES, stop - start)]
                fs.read_into_at(descriptor, batch, header.data_start + start, path)
                for at in range(0, len(batch), CHUNK_BYTES):
                    chunk = batch[at : at + CHUNK_BYTES]
                    if verify:
                        _check_chunk(chunk, start + at, header, path)
                    yield start + at, chunk


def _check_chunk(chunk: memoryview, begin: int, header: ShardHeader, path: Path) -> None:
    expected, found = header.chunk_digests[begin // CHUNK_BYTES], xxhash.xxh3_64_hexdigest(chunk)
    if expected != found:
        first = header.data_start + begin
        raise CheckpointDamagedError(
            f"{path}: damaged between bytes {first} and {first + len(chunk)}: expected digest {expected}, "
            f"found {found}. Resume from another checkpoint."
        )
