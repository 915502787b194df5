"""Shard files: the safetensors library reads what we write, and no damaged or hostile byte is handed on."""

from __future__ import annotations

import errno
import json
import math
import os
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.errors import CheckpointDamagedError, ConfigurationError
from megaresume.store import fs, shard, shard_header
from megaresume.store.shard import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    Entry,
    ShardRecord,
    Target,
    check_identity,
    read_header,
    stream_tensors,
    verify_shard,
    write_shard,
)
from tests.store.shards import IDENTITY, INDEX, collect, entry, small_entries, split, with_digests, write
from tests.store.test_fs import FailingOs, open_descriptors

# --- what is written -------------------------------------------------------------------------------------------------


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = [*small_entries(), *(entry(f"dtype/{dtype}", dtype, (4, 3)) for dtype in DTYPE_BYTES)]
    write(path, entries)
    theirs = dict(safetensors.deserialize(path.read_bytes()))
    assert theirs.keys() == {each.name for each in entries}
    for each in entries:
        found = theirs[each.name]
        assert (found["dtype"], tuple(found["shape"])) == (each.dtype, each.shape), each.name
        assert bytes(found["data"]) == bytes(each.data), each.name
    assert collect(path) == {each.name: bytes(each.data) for each in entries}
    with safetensors.safe_open(path, "numpy") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["index"]) == INDEX
    assert [metadata[key] for key in ("root_id", "attempt", "step", "coordinate")] == [
        "3f2a",
        "3",
        "1200",
        "tp00-pp01-dp00",
    ]


def test_numpy_arrays_come_back_by_the_safetensors_library(tmp_path: Path) -> None:
    arrays = {
        "f64": np.linspace(0, 1, 12).reshape(3, 4),
        "bool": np.array([True, False, True]),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float32),
    }
    codes = {"f64": "F64", "bool": "BOOL", "scalar": "I64", "empty": "F32"}
    entries = [Entry(name, codes[name], array.shape, memoryview(array)) for name, array in arrays.items()]
    write(tmp_path / "x.safetensors", entries)
    for name, array in safetensors.numpy.load_file(tmp_path / "x.safetensors").items():
        assert array.dtype == arrays[name].dtype and np.array_equal(array, arrays[name]), name


def test_the_file_is_as_specified(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = [entry("a", "U8", (CHUNK_BYTES - 3,)), entry("b", "F32", (5,)), entry("c", "BF16", (CHUNK_BYTES,))]
    record = write(path, entries)
    raw = path.read_bytes()
    table, data = split(path)
    start = len(raw) - len(data)
    assert start % 4096 == 0 and raw[8:9] == b"{" and raw[:start].rstrip(b" ")[-1:] == b"}"
    assert data == b"".join(bytes(each.data) for each in entries), "in the order given, without holes"
    assert table == with_digests(json.loads(json.dumps(table)), data)
    assert len(table["__metadata__"]["chunk_digests"]) == 16 * 4
    assert record == ShardRecord(size=len(raw), header_digest=xxhash.xxh3_128_hexdigest(raw[:start]))


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    record = write(path, small_entries())
    header = read_header(path, record=record)
    assert (header.identity, header.index) == (IDENTITY, INDEX)
    assert [(span.name, span.dtype, span.shape) for span in header.tensors.values()] == [
        (each.name, each.dtype, each.shape) for each in small_entries()
    ]
    assert (header.size, header.digest) == (record.size, record.header_digest)
    check_identity(header, IDENTITY, path)
    verify_shard(path, header)


@pytest.mark.parametrize("entries", [[], [entry("empty", "F32", (0,)), entry("also empty", "U8", (3, 0, 2))]])
def test_a_shard_without_data(entries: list[Entry], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    record = write(path, entries)
    header = read_header(path, record=record)
    assert (header.size, header.data_start, header.chunk_digests) == (4096, 4096, ())
    assert list(header.tensors) == [each.name for each in entries]
    verify_shard(path, header)
    assert collect(path) == {each.name: b"" for each in entries}
    assert {name for name, _ in safetensors.deserialize(path.read_bytes())} == {each.name for each in entries}


@pytest.mark.parametrize(
    "size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * CHUNK_BYTES, 9 * CHUNK_BYTES + 7]
)
def test_tensors_around_the_ends_of_chunks_and_batches(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = [entry("before", "U8", (5,)), entry("large", "U8", (size,)), entry("after", "F32", (3,))]
    write(path, entries)
    assert collect(path) == {each.name: bytes(each.data) for each in entries}
    assert collect(path, verify=False) == collect(path)
    assert len(read_header(path).chunk_digests) == math.ceil((5 + size + 12) / CHUNK_BYTES)


def test_thousands_of_small_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = [entry(f"t{number}", "BF16", (number % 700,)) for number in range(4000)]
    write(path, entries)
    assert collect(path) == {each.name: bytes(each.data) for each in entries}


@settings(deadline=None, max_examples=25)
@given(
    described=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable() or text.isascii()),
        st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 4), max_size=4)),
        max_size=6,
    )
)
def test_any_names_and_shapes(
    described: dict[str, tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    entries = [entry(name, dtype, tuple(shape)) for name, (dtype, shape) in described.items()]
    write(path, entries)
    expected = {each.name: bytes(each.data) for each in entries}
    assert collect(path) == expected
    assert {name: bytes(found["data"]) for name, found in safetensors.deserialize(path.read_bytes())} == expected


def test_a_header_just_at_and_just_over_a_page(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    sizes = set()
    for length in range(3300, 3900, 7):
        write_shard(path, [entry("w", "U8", (3,))], identity=IDENTITY, index={"note": "x" * length})
        header = read_header(path)
        assert header.index == {"note": "x" * length}
        sizes.add(header.data_start)
    assert sizes == {4096, 8192}


def test_live_memory_is_not_copied(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal(32 << 17)  # 32 MiB
    tracemalloc.start()
    write(tmp_path / "x.safetensors", [Entry("x", "F64", array.shape, memoryview(array))])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert split(tmp_path / "x.safetensors")[1] == array.tobytes()


def test_a_file_there_already_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("long", "U8", (50_000,))])
    record = write(path, small_entries())
    assert path.stat().st_size == record.size
    assert collect(path) == {each.name: bytes(each.data) for each in small_entries()}


def strided() -> memoryview:
    return memoryview(np.zeros((4, 4), np.float32))[::2]


@pytest.mark.parametrize(
    ("entries", "index", "message"),
    [
        ([entry("w", "U8", (1,)), entry("w", "U8", (1,))], {}, "'w'.*name of its own"),
        ([entry("__metadata__", "U8", (1,))], {}, "__metadata__"),
        ([Entry("w", "F4", (2,), memoryview(b"x"))], {}, "'w'.*dtype.*F4"),
        ([Entry("w", "F32", (2,), memoryview(b"1234567"))], {}, r"'w'.*8 contiguous bytes for F32 \[2\], found 7"),
        ([Entry("w", "F32", (2, 4), strided())], {}, "'w'.*not contiguous"),
        ([Entry("half \ud800", "U8", (1,), memoryview(b"x"))], {}, "surrogate"),
        ([], {"loss": float("nan")}, r"loss.*nan"),
        ([], {"array": np.zeros(1)}, "ndarray"),
    ],
)
def test_what_makes_no_valid_file_is_refused_before_it_is_begun(
    entries: list[Entry], index: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        write_shard(tmp_path / "x.safetensors", entries, identity=IDENTITY, index=index)
    assert os.listdir(tmp_path) == []


def test_a_header_over_the_limit_of_safetensors_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shard_header.MAX_TEXT_BYTES == 100_000_000
    monkeypatch.setattr(shard_header, "MAX_TEXT_BYTES", 8184)  # two pages, less the length before the text
    write_shard(tmp_path / "x.safetensors", [], identity=IDENTITY, index={"long": "x" * 7000})
    with pytest.raises(ConfigurationError, match=r"tp00-pp01-dp00.*needs 12280 bytes, safetensors allows 8184"):
        write_shard(tmp_path / "y.safetensors", [], identity=IDENTITY, index={"long": "x" * 9000})
    assert os.listdir(tmp_path) == ["x.safetensors"]


# --- writing fails ---------------------------------------------------------------------------------------------------


def test_the_last_thing_is_one_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FailingOs()
    monkeypatch.setattr(fs, "os", recorder)
    write(tmp_path / "x.safetensors", [entry("x", "U8", (9 * CHUNK_BYTES,))])
    assert recorder.calls == ["open", "write", *["writev"] * 3, "pwrite", "fsync", "close"]


def test_each_call_of_a_write_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    entries = [entry("x", "U8", (9 * CHUNK_BYTES,))]
    before = open_descriptors()
    for position in range(8):
        with monkeypatch.context() as patch:
            patch.setattr(fs, "os", FailingOs(position, errno.ENOSPC))
            with pytest.raises(OSError, match="No space left"):
                write(path, entries)
        if 0 < position < 5:  # before the digests are in, nothing reads it; from then on it may even be whole
            with pytest.raises(CheckpointDamagedError):
                verify_shard(path, read_header(path))
    assert open_descriptors() == before
    verify_shard(path, read_header(path, record=write(path, entries)))


# --- streaming -------------------------------------------------------------------------------------------------------


def test_only_the_chunks_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    entries = [entry(f"t{number}", "U8", (CHUNK_BYTES // 2,)) for number in range(40)]
    write(path, entries)
    read: list[tuple[int, int]] = []
    real = fs.read_vectors_at

    def spy(descriptor: int, views: list[memoryview], offset: int, where: Path) -> None:
        if offset >= 4096:
            read.append(((offset - 4096) // CHUNK_BYTES, sum(map(len, views)) // CHUNK_BYTES))
        real(descriptor, views, offset, where)

    monkeypatch.setattr(fs, "read_vectors_at", spy)
    assert collect(path, ["t39", "t2", "t3", "t21"]) == {
        f"t{number}": bytes(entries[number].data) for number in (2, 3, 21, 39)
    }
    assert sorted(read) == [(1, 1), (10, 1), (19, 1)]
    read.clear()
    collect(path)
    assert sorted(read) == [(chunk, 1) for chunk in range(20)], "each once, and hashed right after it was read"
    read.clear()
    collect(path, verify=False)
    assert sorted(read) == [(start, 4) for start in range(0, 20, 4)], "a few large reads"


def test_damage_elsewhere_does_not_concern_who_does_not_read_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = [entry(f"t{number}", "U8", (CHUNK_BYTES,)) for number in range(3)]
    write(path, entries)
    with path.open("r+b") as file:
        file.seek(4096 + CHUNK_BYTES)
        file.write(b"damage")
    assert collect(path, ["t0", "t2"]) == {f"t{number}": bytes(entries[number].data) for number in (0, 2)}
    with pytest.raises(CheckpointDamagedError):
        collect(path, ["t1"])


def test_a_name_that_is_not_there_is_named_before_any_sink_is_called(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, small_entries())

    def sink(offset: int, data: memoryview) -> None:
        pytest.fail("called")

    with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors.*'model/v'"):
        stream_tensors(path, read_header(path), {"model/w": Target(sink=sink), "model/v": Target(sink=sink)})


def test_what_follows_a_part_is_asked_before_anything_is_read_and_done_when_it_is_there(tmp_path: Path) -> None:
    path, size = tmp_path / "x.safetensors", 3 * CHUNK_BYTES + 100
    expected = entry("a", "U8", (size,))
    write(path, [entry("before", "U8", (CHUNK_BYTES // 2,)), expected])
    memory = bytearray(size)
    asked: list[tuple[int, int]] = []
    done: list[tuple[int, int]] = []

    def follow(begin: int, end: int) -> Callable[[], None]:
        assert not any(memory)
        asked.append((begin, end))

        def act() -> None:
            assert memory[begin:end] == expected.data[begin:end]
            done.append((begin, end))

        return act

    stream_tensors(path, read_header(path), {"a": Target(memoryview(memory), follow=follow)})
    assert sorted(done) == asked
    assert [0, *(end for _, end in asked)] == [*(begin for begin, _ in asked), size], "all of it, once"


def test_an_error_of_a_sink_is_its_own_and_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, small_entries())
    before = open_descriptors()

    def sink(offset: int, data: memoryview) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream_tensors(path, read_header(path), {"model/w": Target(sink=sink)})
    assert open_descriptors() == before


def test_headers_of_large_shards_fit(tmp_path: Path) -> None:
    data = 256 << 30  # bytes of one rank
    spans = [shard.TensorSpan("x", "U8", (data,), 0, data)]
    head = shard_header.encode_head(spans, identity=IDENTITY, index=INDEX)
    assert len(head) < 5_000_000
    parsed = shard_header.parse_head(bytes(head), size=len(head) + data, path=tmp_path)
    assert len(parsed.chunk_digests) == 256 << 10
