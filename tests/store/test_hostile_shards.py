"""Damaged and hostile shard files: every one is a named error that names the file, and no bad byte is handed on."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.errors import CheckpointDamagedError, FormatError, MegaresumeError
from megaresume.store.shard import (
    CHUNK_BYTES,
    ShardRecord,
    Target,
    check_identity,
    read_header,
    stream_tensors,
    verify_shard,
    write_shard,
)
from tests.store.shards import IDENTITY, INDEX, collect, entry, join, small_entries, split, write

# --- damage ----------------------------------------------------------------------------------------------------------


def all_read(path: Path, record: ShardRecord | None) -> dict[str, bytes]:
    verify_shard(path, read_header(path, record=record))
    return collect(path)


def test_every_truncation_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    record = write(path, small_entries())
    raw = path.read_bytes()
    for size in range(len(raw) - 1, -1, -1):
        os.truncate(path, size)
        if size % 7 == 0 or size >= 4000 or size < 16:
            with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors: truncated"):
                read_header(path, record=record)
            with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors"):
                read_header(path)


@pytest.mark.parametrize("cut", [0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 99])
def test_a_truncation_after_the_header_was_read(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("a", "U8", (CHUNK_BYTES,)), entry("b", "U8", (CHUNK_BYTES + 100,))])
    header = read_header(path)
    os.truncate(path, 4096 + cut)
    with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors: changed meanwhile"):
        verify_shard(path, header)


@pytest.mark.parametrize("more", [b"\0", b" ", b"x" * 4096, bytes(CHUNK_BYTES)])
def test_bytes_after_the_end_are_damage(more: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    record = write(path, small_entries())
    with path.open("ab") as file:
        file.write(more)
    for known in (record, None):
        with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors"):
            read_header(path, record=known)


def test_a20_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = small_entries()
    record = write(path, entries)
    raw = bytearray(path.read_bytes())
    padding = range(len(bytes(raw[:4096]).rstrip(b" ")) + 8, 4096 - 8)
    for position in range(len(raw)):
        if position in padding and position % 61:
            continue
        raw[position] ^= 1 << position % 8
        path.write_bytes(raw)
        with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors"):
            all_read(path, record)
        try:  # and without the manifest: any result, but no other error
            all_read(path, None)
        except (CheckpointDamagedError, FormatError):
            pass
        raw[position] ^= 1 << position % 8
    path.write_bytes(raw)
    assert all_read(path, record) == {each.name: bytes(each.data) for each in entries}


def test_a20_a_zeroed_block_is_found_before_any_of_its_chunk_is_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(
        path,
        [entry("a", "U8", (CHUNK_BYTES + 5,)), entry("b", "U8", (CHUNK_BYTES,)), entry("c", "U8", (2 * CHUNK_BYTES,))],
    )
    header = read_header(path)
    sound = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(header.data_start + 2 * CHUNK_BYTES + 8192)
        file.write(bytes(4096))
    seen: list[range] = []

    def sink(name: str) -> Target:
        start = header.tensors[name].begin
        return Target(sink=lambda offset, data: seen.append(range(start + offset, start + offset + len(data))))

    damaged = header.data_start + 2 * CHUNK_BYTES
    with pytest.raises(CheckpointDamagedError, match=rf"x\.safetensors: damaged between bytes {damaged} and "):
        stream_tensors(path, header, {name: sink(name) for name in header.tensors})
    assert not [each for each in seen if each.stop > 2 * CHUNK_BYTES and each.start < 3 * CHUNK_BYTES]
    path.write_bytes(sound)
    seen.clear()
    stream_tensors(path, header, {name: sink(name) for name in header.tensors})
    assert sum(map(len, seen)) == 4 * CHUNK_BYTES + 5


def test_a20_swapped_files_are_told_apart(tmp_path: Path) -> None:
    coordinates = ("tp00-pp00-dp00", "tp00-pp00-dp01")
    paths = {name: tmp_path / f"{name}.safetensors" for name in coordinates}
    records = {}
    for coordinate, path in paths.items():
        identity = dataclasses.replace(IDENTITY, coordinate=coordinate)
        records[coordinate] = write_shard(path, [entry(coordinate, "U8", (64,))], identity=identity, index=INDEX)
    first, second = paths.values()
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    for coordinate, path in paths.items():
        header = read_header(path)
        with pytest.raises(CheckpointDamagedError, match=f"expected coordinate '{coordinate}', found 'tp00"):
            check_identity(header, dataclasses.replace(IDENTITY, coordinate=coordinate), path)
        with pytest.raises(CheckpointDamagedError, match="expected header digest"):
            read_header(path, record=records[coordinate])


@pytest.mark.parametrize("field", ["root_id", "attempt", "step", "coordinate"])
def test_a_file_of_another_step_attempt_or_root_is_named(field: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, small_entries())
    other: dict[str, Any] = {"root_id": "ffff", "attempt": 4, "step": 1100, "coordinate": "tp01-pp00-dp00"}
    expected = dataclasses.replace(IDENTITY, **{field: other[field]})
    with pytest.raises(CheckpointDamagedError) as caught:
        check_identity(read_header(path), expected, path)
    for part in (str(path), field, repr(other[field]), repr(getattr(IDENTITY, field))):
        assert part in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors: the file is missing"):
        read_header(tmp_path / "x.safetensors")


def test_without_verification_the_bytes_come_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("a", "U8", (100,))])
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert collect(path, verify=False) == {"a": bytes(raw[-100:])}


# --- hostile headers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length", [0, 1, 4087, 4089, 12280, 24_414 * 4096 - 8, 100_000_001, 1 << 31, 1 << 63, (1 << 64) - 1]
)
def test_a_false_header_length_allocates_nothing(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, small_entries())
    raw = path.read_bytes()
    path.write_bytes(length.to_bytes(8, "little") + raw[8:])
    tracemalloc.start()
    with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_header_over_the_limit_of_safetensors_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    length = -(-100_000_001 // 4096) * 4096 - 8
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{")
        file.truncate(8 + length)
    tracemalloc.start()
    with pytest.raises(CheckpointDamagedError, match="at most 100000000 bytes"):
        read_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


Table = dict[str, Any]


def span(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> Table:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HOSTILE_TABLES: dict[str, Table] = {
    "a hole": {"a": span(0, 10), "b": span(20, 100)},
    "a hole at the beginning": {"a": span(10, 100)},
    "a hole at the end": {"a": span(0, 90)},
    "an overlap": {"a": span(0, 60), "b": span(40, 100)},
    "one inside another": {"a": span(0, 100), "b": span(40, 60)},
    "the same bytes twice": {"a": span(0, 100), "b": span(0, 100)},
    "beyond the end": {"a": span(0, 101)},
    "an empty one beyond the end": {"a": span(0, 100), "b": span(101, 101)},
    "an empty one inside another": {"a": span(0, 100), "b": span(50, 50)},
    "end before begin": {"a": span(0, 100), "b": {"dtype": "U8", "shape": [0], "data_offsets": [100, 90]}},
    "shape and bytes differ": {"a": span(0, 100, "F32", [26])},
    "a huge shape": {"a": span(0, 100, "U8", [1 << 62, 1 << 62])},
    "a shape that wraps to the right size": {"a": span(0, 100, "U8", [1 << 32, 1 << 32, 100])},
    "a dimension beyond 63 bits": {"a": span(0, 100, "U8", [1 << 63]), "b": span(100, 100, "U8", [0])},
    "a huge dimension beside a zero": {"a": span(0, 100), "b": span(100, 100, "U8", [1 << 64, 0])},
    "a negative dimension": {"a": span(0, 100, "U8", [-10, -10])},
    "dimensions without end": {"a": span(0, 100), "b": span(100, 100, "U8", [0] * 1000)},
    "a float in the shape": {"a": span(0, 100, "U8", [100.0])},
    "a bool in the shape": {"a": span(0, 100, "U8", [100, True])},
    "a string for a shape": {"a": {"dtype": "U8", "shape": "100", "data_offsets": [0, 100]}},
    "negative offsets": {"a": {"dtype": "U8", "shape": [100], "data_offsets": [-100, 0]}},
    "three offsets": {"a": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100, 100]}},
    "no offsets": {"a": {"dtype": "U8", "shape": [100]}},
    "offsets as strings": {"a": {"dtype": "U8", "shape": [100], "data_offsets": ["0", "100"]}},
    "an unknown dtype": {"a": span(0, 100, "Q8", [100])},
    "a dtype that is no string": {"a": {"dtype": ["U8"], "shape": [100], "data_offsets": [0, 100]}},
    "one field more": {"a": {**span(0, 100), "file": "/etc/passwd"}},
    "no object": {"a": [0, 100]},
    "null": {"a": None},
    "no tensors for the data": {},
}


@pytest.mark.parametrize("what", HOSTILE_TABLES)
def test_hostile_tables(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("a", "U8", (100,))])
    table, data = split(path)
    join(path, {"__metadata__": table["__metadata__"], "a": span(0, 100)}, data)
    read_header(path)  # the frame itself is sound
    join(path, {"__metadata__": table["__metadata__"], **HOSTILE_TABLES[what]}, data)
    with pytest.raises(CheckpointDamagedError, match=r"x\.safetensors"):
        read_header(path)


def without(key: str) -> Callable[[Table], None]:
    return lambda table: table["__metadata__"].pop(key)


def metadata(**changes: Any) -> Callable[[Table], None]:
    return lambda table: table["__metadata__"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((without(key), key) for key in ("root_id", "attempt", "step", "coordinate", "index", "chunk_digests")),
        (metadata(attempt=3), "object of strings"),
        (metadata(index=INDEX), "object of strings"),
        (metadata(extra=None), "object of strings"),
        (lambda table: table.update(__metadata__=["x"]), "object of strings"),
        (lambda table: table.update(__metadata__=None), "object of strings"),
        *(
            (metadata(step=text), "'step'")
            for text in ("", "-1", "+1", "01", "1.0", " 1", "\u0661", "1_0", "9" * 50, "x")
        ),
        (metadata(megaresume_shard="0"), "version"),
        (metadata(megaresume_shard="one"), "version"),
        (metadata(megaresume_shard="9" * 5000), "version"),
        (metadata(chunk_digests=""), "chunk digests of 16"),
        (metadata(chunk_digests="0" * 15), "chunk digests of 16"),
        (metadata(chunk_digests="0" * 32), "chunk digests of 16"),
        (metadata(chunk_digests="A" * 16), "chunk digests of 16"),
        (metadata(chunk_digests="0" * 15 + "g"), "chunk digests of 16"),
        (metadata(chunk_digests="\u0660" * 16), "chunk digests of 16"),
        (metadata(index=""), "index"),
        (metadata(index="[]"), "index"),
        (metadata(index="NaN"), "index"),
        (metadata(index='{"a": NaN}'), "NaN"),
        (metadata(index='{"a": 1, "a": 2}'), "'a' stands twice"),
        (metadata(index='{"a":' * 100_000), "index"),
        (metadata(index="[" * 101 + "]" * 101), "levels deep"),
    ],
)
def test_hostile_metadata(change: Callable[[Table], None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("a", "U8", (100,))])
    table, data = split(path)
    change(table)
    join(path, table, data)
    with pytest.raises(CheckpointDamagedError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b" {}",
        b"{} {}",
        b"{" * 50_000,
        b'{"a":' * 50_000,
        b'{"__metadata__":{"x":"' + b"\xff" * 10 + b'"}}',
        b"{\0}",
        b"{}\n\n\0",
    ],
)
def test_headers_that_are_no_json(text: bytes, tmp_path: Path) -> None:
    with pytest.raises((CheckpointDamagedError, FormatError), match=r"x\.safetensors"):
        read_header(join(tmp_path / "x.safetensors", text, b""))


@pytest.mark.parametrize("key", ["a", "__metadata__", "step", "dtype"])
def test_a_repeated_key_anywhere_is_damage(key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("a", "U8", (100,))])
    table, data = split(path)
    text = json.dumps(table)
    at = text.index(f'"{key}"')
    join(path, (text[:at] + f'"{key}": "1", ' + text[at:]).encode(), data)
    with pytest.raises(CheckpointDamagedError, match=f"'{key}' stands twice"):
        read_header(path)


def test_a_header_that_ends_off_the_page_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("a", "U8", (5000,))])
    table, data = split(path)
    with pytest.raises(CheckpointDamagedError, match="multiple of 4096"):
        read_header(join(path, table, data, align=64))


def test_a_header_that_does_not_begin_with_a_brace_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("a", "U8", (100,))])
    table, data = split(path)
    with pytest.raises(CheckpointDamagedError, match="at byte 8, found 0x20"):
        read_header(join(path, b" " + json.dumps(table).encode(), data))


def test_newer_versions_and_other_files_are_told_from_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, [entry("a", "U8", (100,))])
    table, data = split(path)
    table["__metadata__"] = {"megaresume_shard": "2", "whatever": "of a newer release"}
    with pytest.raises(FormatError, match=r"x\.safetensors.*version 2, .*up to 1.*Upgrade"):
        read_header(join(path, table, data))
    array = np.zeros(4096 - 8 - 100, np.uint8)
    text = json.dumps({"a": {"dtype": "U8", "shape": [len(array)], "data_offsets": [0, len(array)]}}).encode()
    path.write_bytes((4088).to_bytes(8, "little") + text.ljust(4088) + array.tobytes())
    safetensors.numpy.load_file(path)
    with pytest.raises(FormatError, match=r"x\.safetensors.*another safetensors file"):
        read_header(path)


def test_the_order_of_the_table_does_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = small_entries()
    write(path, entries)
    table, data = split(path)
    join(path, dict(reversed(table.items())), data)
    assert [span.begin for span in read_header(path).tensors.values()] == sorted(
        span["data_offsets"][0] for name, span in table.items() if name != "__metadata__"
    )
    assert collect(path) == {each.name: bytes(each.data) for each in entries}


@settings(deadline=None, max_examples=60)
@given(edits=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=5))
def test_any_edit_of_the_header_is_a_header_or_a_named_error(
    edits: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "edited.safetensors"
    write(path, small_entries())
    raw = bytearray(path.read_bytes())
    for position, value in edits:
        raw[position] = value
    path.write_bytes(raw)
    try:
        collect(path)
    except MegaresumeError:
        pass
