"""One rank's shard file: a valid safetensors file that carries its identity, its index and the digests of its bytes.

Writes a shard in one pass and reads it back in one pass, trusting no byte of it. Knows tensors as names, dtype codes,
shapes and bytes; what they mean is said by the index, which is stored and returned unread.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    "Target",
    "TensorSpan",
    "check_identity",
    "read_header",
    "stream_tensors",
    "verify_shard",
    "write_shard",
]

# Read or written by one system call: few calls, yet what was just hashed or read is still in the processor's cache.
_BATCH_BYTES = 4 * CHUNK_BYTES

_WRITE_BACK_BYTES = 8 * _BATCH_BYTES
_READERS = 2  # threads; more do not make memory or one disk faster

# Takes (byte offset inside the tensor, bytes): in order, several times for a large tensor, never for one without bytes.
# The bytes are only valid during the call.
Sink: TypeAlias = Callable[[int, memoryview], None]
# Where a tensor is read to: all of its bytes in memory (flat, writable), or a sink.
Target: TypeAlias = memoryview | Sink


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
    path: Path,
    entries: Sequence[Entry],
    *,
    identity: ShardIdentity,
    index: Mapping[str, Any],
    overwrite: bool = False,
) -> ShardRecord:
    """Write `entries`, in this order, to the file `path` and fsync it; a file there already is emptied first or, with
    `overwrite`, written over, whatever is in it.

    Local to this rank. Copies no tensor: the bytes go from `Entry.data` to the system and must not change meanwhile.
    Raises `ConfigurationError` for what makes no valid file, before anything is written; `OSError` as the disk does.
    """
    spans = _lay_out(entries)
    head = encode_head(spans, identity=identity, index=index)
    size = len(head) + (spans[-1].end if spans else 0)
    with fs.open_for_overwriting(path) if overwrite else fs.open_for_writing(path) as descriptor:
        if overwrite:
            fs.truncate(descriptor, size)
        fs.reserve(descriptor, size)
        fs.write_all(descriptor, head)
        set_digests(head, list(_write_data(descriptor, entries)))
        fs.write_all_at(descriptor, head, 0)
        fs.fsync_file(descriptor)
    return ShardRecord(size=size, header_digest=head_digest(head))


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
    batched = written = 0
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
                written += batched
                batch, batched = [], 0
                if written % _WRITE_BACK_BYTES == 0:
                    # The disk is to be busy from now on, not from the fsync on.
                    fs.start_write_back(descriptor)
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


def stream_tensors(
    path: Path,
    header: ShardHeader,
    targets: Mapping[str, Target],
    *,
    verify: bool = True,
    scratch: memoryview | None = None,
) -> None:
    """Read the tensors named in `targets`: into a writable view of a tensor's bytes directly, to a sink in file order.

    Chunks in which no target has a part are not read. With `verify` each chunk is checked, before any of it is handed
    to a sink; a view may hold bad bytes by the time that this raises. `scratch` (bytes, at least one chunk) is used for
    what has no view instead of memory of our own: page-locked memory, where a sink copies to an accelerator.

    Raises `CheckpointDamagedError` for a name the file does not hold (before anything is read), and for a file that has
    changed since `header` was read or differs from its digests (sinks called before had good bytes).
    """
    missing = sorted(targets.keys() - header.tensors.keys())
    if missing:
        raise CheckpointDamagedError(
            f"{path}: expected tensor {missing[0]!r} in it, found none ({len(missing)} missing)."
        )
    for name, target in targets.items():
        span = header.tensors[name]
        assert not isinstance(target, memoryview) or target.nbytes == span.end - span.begin, name
    wanted = [span for span in header.tensors.values() if span.name in targets and span.begin < span.end]
    _read_runs(path, header, _chunk_runs(wanted), targets, verify=verify, scratch=scratch)


def verify_shard(path: Path, header: ShardHeader) -> None:
    """Read the whole data section and raise `CheckpointDamagedError` where it differs from its digests."""
    _read_runs(path, header, [range(len(header.chunk_digests))], {}, verify=True, scratch=None)


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


@dataclass(frozen=True)
class _Piece:
    """Where some bytes of one tensor, all of one chunk, are read to, and who is told of them once they are checked."""

    memory: memoryview
    sink: Sink | None
    offset: int  # in the tensor


def _read_runs(
    path: Path,
    header: ShardHeader,
    runs: Sequence[range],
    targets: Mapping[str, Target],
    *,
    verify: bool,
    scratch: memoryview | None,
) -> None:
    spans = [span for span in header.tensors.values() if span.begin < span.end]
    ends = [span.end for span in spans]
    size = len(scratch) // CHUNK_BYTES * CHUNK_BYTES if scratch is not None else _BATCH_BYTES
    data_bytes = header.size - header.data_start
    # Small reads near one another: the chunk is hashed while it is in the processor's cache, and the disk reads on.
    batches = iter(
        [
            (start, min(start + size, run.stop * CHUNK_BYTES, data_bytes))
            for run in runs
            for start in range(run.start * CHUNK_BYTES, min(run.stop * CHUNK_BYTES, data_bytes), size)
        ]
    )

    def read(room: memoryview) -> None:
        # Each thread opens it: the system reads ahead by open file, and would take two threads' turns for disorder.
        with fs.open_for_reading(path) as (descriptor, found):
            if found != header.size:
                raise CheckpointDamagedError(f"{path}: changed meanwhile: expected {header.size} bytes, found {found}.")
            read_from(descriptor, room)

    def read_from(descriptor: int, room: memoryview) -> None:
        for start, stop in batches:
            first = bisect.bisect_right(ends, start)
            chunks = [
                _cut(spans, first, begin, min(begin + CHUNK_BYTES, stop), targets, room[begin - start :])
                for begin in range(start, stop, CHUNK_BYTES)
            ]
            memory = [piece.memory for pieces in chunks for piece in pieces]
            fs.read_vectors_at(descriptor, memory, header.data_start + start, path)
            for number, pieces in enumerate(chunks, start // CHUNK_BYTES):
                if verify:
                    _check_chunk([piece.memory for piece in pieces], number, header, path)
                for piece in pieces:
                    if piece.sink is not None:
                        piece.sink(piece.offset, piece.memory)

    if scratch is not None or any(not isinstance(target, memoryview) for target in targets.values()):
        # A sink is promised its bytes in order.
        read(scratch if scratch is not None else memoryview(bytearray(min(size, data_bytes))))
    else:
        _in_threads(_READERS, lambda: read(memoryview(bytearray(min(size, data_bytes)))))


def _cut(
    spans: Sequence[TensorSpan],
    position: int,
    begin: int,
    end: int,
    targets: Mapping[str, Target],
    room: memoryview,
) -> list[_Piece]:
    """The bytes `[begin, end)` of the data section tensor by tensor; `spans[position]` is not behind them."""
    pieces = []
    while spans[position].end <= begin:
        position += 1
    while position < len(spans) and spans[position].begin < end:
        span, target = spans[position], targets.get(spans[position].name)
        low, high = max(span.begin, begin), min(span.end, end)
        if isinstance(target, memoryview):
            pieces.append(_Piece(target[low - span.begin : high - span.begin], None, low - span.begin))
        else:
            pieces.append(_Piece(room[low - begin : high - begin], target, low - span.begin))
        position += 1
    return pieces


def _in_threads(count: int, work: Callable[[], None]) -> None:
    """Run `work`, which takes its share from what is left, on `count` threads; raise what one of them raised."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result()


def _check_chunk(pieces: Sequence[memoryview], number: int, header: ShardHeader, path: Path) -> None:
    if len(pieces) == 1:
        found = xxhash.xxh3_64_hexdigest(pieces[0])
    else:
        hasher = xxhash.xxh3_64()
        for piece in pieces:
            hasher.update(piece)
        found = hasher.hexdigest()
    expected = header.chunk_digests[number]
    if expected != found:
        first = header.data_start + number * CHUNK_BYTES
        size = sum(len(piece) for piece in pieces)
        raise CheckpointDamagedError(
            f"{path}: damaged between bytes {first} and {first + size}: expected digest {expected}, "
            f"found {found}. Resume from another checkpoint."
        )
