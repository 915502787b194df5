"""One rank's shard file: a valid safetensors file that carries its identity, its index and the digests of its bytes.

Writes a shard in one pass and reads it back in one pass, trusting no byte of it. Knows tensors as names, dtype codes,
shapes and bytes; what they mean is said by the index, which is stored and returned unread.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
    "read_ahead",
    "read_header",
    "stream_tensors",
    "verify_shard",
    "write_shard",
]

# Written by one system call, or read by one thread in a row: few calls, and a disk that can read on.
_BATCH_BYTES = 4 * CHUNK_BYTES

_WRITE_BACK_BYTES = 8 * _BATCH_BYTES
_READERS = 2  # threads; more make memory no faster, and get in the way of other ranks of the host
_AHEAD_BYTES = 64 << 20  # what a disk gives while a restore is planned; little, should nobody come for it

# Takes (byte offset inside the tensor, bytes): several times for a large tensor, never for one without bytes, from
# several threads and in any order. The bytes are only valid during the call.
Sink: TypeAlias = Callable[[int, memoryview], None]
Room: TypeAlias = bytearray | memoryview  # writable bytes


@dataclass(frozen=True)
class Target:
    """Where a tensor is read to: `memory`, all of its bytes (flat, writable), or a `sink`; without either its bytes are
    read for nothing but their digests.

    `follow`, for memory, is asked before anything is read what to do once the bytes [first, end) of the tensor are
    there and checked; that is then done by the thread that read them.
    """

    memory: memoryview | None = None
    sink: Sink | None = None
    follow: Callable[[int, int], Callable[[], object]] | None = None


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
    batch: list[memoryview] = []
    written = 0

    def batched() -> Iterator[memoryview]:
        # An empty entry may have a zero in its shape, which `cast` refuses.
        for piece in _pieces([entry.data.cast("B") for entry in entries if entry.data.nbytes]):
            batch.append(piece)
            yield piece

    for digest, size in _digests(batched()):
        yield digest
        written += size
        if written % _BATCH_BYTES == 0:
            fs.write_vectors(descriptor, batch)
            batch.clear()
            if written % _WRITE_BACK_BYTES == 0:
                # The disk is to be busy from now on, not from the fsync on.
                fs.start_write_back(descriptor)
    fs.write_vectors(descriptor, batch)


def _pieces(data: Iterable[memoryview]) -> Iterator[memoryview]:
    """The bytes of all, cut so that no piece crosses the end of a chunk."""
    room = CHUNK_BYTES
    for rest in data:
        while rest:
            piece, rest = rest[:room], rest[room:]
            room = room - len(piece) or CHUNK_BYTES
            yield piece


def _digests(pieces: Iterable[memoryview]) -> Iterator[tuple[str, int]]:
    """(digest, bytes) of each chunk that the pieces make up, as soon as it is complete."""
    hasher, size = xxhash.xxh3_64(), 0
    for piece in pieces:
        hasher.update(piece)
        size += len(piece)
        if size == CHUNK_BYTES:
            yield hasher.hexdigest(), size
            hasher, size = xxhash.xxh3_64(), 0
    if size:
        yield hasher.hexdigest(), size


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


def read_ahead(path: Path, header: ShardHeader) -> None:
    """Have the disk begin with the tensors that will soon be read. Returns at once, and never fails."""
    fs.read_ahead(path, header.data_start, min(_AHEAD_BYTES, header.size - header.data_start))


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
    make_room: Callable[[int], Room] = bytearray,
) -> None:
    """Read the tensors named in `targets` with threads of its own; returns when all are there.

    Chunks in which no target has a part are not read. With `verify` each chunk is checked, before any sink is told of
    it; memory may hold bad bytes by the time that this raises. `make_room` gives a reader its memory (as many bytes as
    asked for) for what has none: page-locked, where a sink copies to an accelerator.

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
        assert target.memory is None or target.memory.nbytes == span.end - span.begin, name
    wanted = [span for span in header.tensors.values() if span.name in targets and span.begin < span.end]
    _read_runs(path, header, _chunk_runs(wanted), targets, verify=verify, make_room=make_room)


def verify_shard(path: Path, header: ShardHeader) -> None:
    """Read the whole data section and raise `CheckpointDamagedError` where it differs from its digests."""
    _read_runs(path, header, [range(len(header.chunk_digests))], {}, verify=True, make_room=bytearray)


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


class _Part(NamedTuple):
    """Bytes that are read at once: where they begin in the data section, the memory for them tensor by tensor (None: a
    reader's own) with its sizes, and once they are checked, which sink is told of which of these (first byte in the
    tensor) and what else is done."""

    begin: int
    sizes: list[int]
    memory: list[memoryview | None]
    told: list[tuple[Sink, int, int]]
    then: list[Callable[[], object]]


_NOWHERE = Target()


def _read_runs(
    path: Path,
    header: ShardHeader,
    runs: Sequence[range],
    targets: Mapping[str, Target],
    *,
    verify: bool,
    make_room: Callable[[int], Room],
) -> None:
    # What is checked is read chunk by chunk: it is still in the processor's cache when it is hashed and rounded.
    step = CHUNK_BYTES if verify else _BATCH_BYTES
    data_bytes = header.size - header.data_start
    spans = [span for span in header.tensors.values() if span.begin < span.end]
    # All that can be done before is: what readers do in Python, one waits for while the other does it.
    batches = iter(
        [
            [_plan_part(spans, begin, min(begin + step, batch.stop), targets) for begin in batch[::step]]
            for run in runs
            for batch in _batches(run, data_bytes)
        ]
    )

    def read() -> None:
        room = memoryview(make_room(min(step, data_bytes)))
        # Each thread opens it: the system reads ahead by open file, and would take two threads' turns for disorder.
        with fs.open_for_reading(path) as (descriptor, found):
            if found != header.size:
                raise CheckpointDamagedError(f"{path}: changed meanwhile: expected {header.size} bytes, found {found}.")
            for batch in batches:
                for part in batch:
                    memory = _memory_for(part, room)
                    fs.read_vectors_at(descriptor, memory, header.data_start + part.begin, path)
                    if verify:
                        _check_chunk(memory, part.begin // CHUNK_BYTES, header, path)
                    for sink, number, offset in part.told:
                        sink(offset, memory[number])
                    for action in part.then:
                        action()

    _in_threads(_READERS, read)


def _batches(run: range, data_bytes: int) -> Iterator[range]:
    """The bytes of a run of chunks, in shares for one thread."""
    end = min(run.stop * CHUNK_BYTES, data_bytes)
    for begin in range(run.start * CHUNK_BYTES, end, _BATCH_BYTES):
        yield range(begin, min(begin + _BATCH_BYTES, end))


def _plan_part(spans: Sequence[TensorSpan], begin: int, end: int, targets: Mapping[str, Target]) -> _Part:
    """The bytes `[begin, end)` of the data section; `spans` are the file's tensors in order, none empty."""
    part = _Part(begin, [], [], [], [])
    position = bisect.bisect_right(spans, begin, key=lambda span: span.end)
    while begin < end:
        span = spans[position]
        target = targets.get(span.name, _NOWHERE)
        low, high = begin - span.begin, min(span.end, end) - span.begin
        if target.sink is not None:
            part.told.append((target.sink, len(part.memory), low))
        if target.follow is not None:
            part.then.append(target.follow(low, high))
        part.memory.append(None if target.memory is None else target.memory[low:high])
        part.sizes.append(high - low)
        begin += high - low
        position += 1
    return part


def _in_threads(count: int, work: Callable[[], None]) -> None:
    """Run `work`, which takes its share from what is left, on `count` threads; raise what one of them raised."""
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work) for _ in range(count)]:
            future.result()


def _memory_for(part: _Part, room: memoryview) -> list[memoryview]:
    memory = []
    for view, size in zip(part.memory, part.sizes, strict=True):
        if view is None:
            view, room = room[:size], room[size:]
        memory.append(view)
    return memory


def _check_chunk(memory: Sequence[memoryview], number: int, header: ShardHeader, path: Path) -> None:
    if len(memory) == 1:
        found = xxhash.xxh3_64_hexdigest(memory[0])
    else:
        ((found, _),) = _digests(memory)
    expected = header.chunk_digests[number]
    if found != expected:
        begin, size = header.data_start + number * CHUNK_BYTES, sum(map(len, memory))
        raise CheckpointDamagedError(
            f"{path}: damaged between bytes {begin} and {begin + size}: expected digest {expected}, found {found}. "
            "Resume from another checkpoint."
        )
