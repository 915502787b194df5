"""The manifest: whatever happens to its bytes, a reader gets what was written or a named error."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megaresume.errors import CheckpointDamagedError, ConfigurationError, FormatError
from megaresume.store import strict_json
from megaresume.store.manifest import FORMAT_VERSION, FileRecord, Manifest, parse_manifest, read_trainer_state, to_json
from megaresume.store.shard import ShardRecord

SHARD = "tp00-pp00-dp00.safetensors"


def a_manifest(files: int = 2) -> Manifest:
    records = {
        f"tp00-pp00-dp{rank:02d}.safetensors": ShardRecord(size=4096 + rank, header_digest=f"{rank:032x}")
        for rank in range(files)
    }
    return Manifest(
        root_id="3f2a",
        attempt=3,
        step=1200,
        created="2026-01-02T03:04:05+00:00",
        topology={"tp": 1, "pp": 1, "dp": files, "order": "tp-cp-ep-dp-pp"},
        model={"hidden_size": 64, "layernorm_epsilon": 1e-05, "name": "größer"},
        files=records,
        trainer_state=FileRecord(size=700, digest="0123456789abcdef" * 2),
        total_bytes=700 + sum(record.size for record in records.values()),
        versions={"megaresume": "0.1", "torch": "2.13.0"},
    )


def written(path: Path, manifest: Manifest) -> Path:
    strict_json.write_json_durably(path / "manifest.json", to_json(manifest))
    return path / "manifest.json"


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The manifest with one change and, as a hostile or a buggy writer would have it, with the digest that fits it."""
    value = to_json(a_manifest())
    change(value)
    text = strict_json.compact_json({key: item for key, item in value.items() if key != "digest"}, sort_keys=True)
    value["digest"] = xxhash.xxh3_128_hexdigest(text.encode())
    strict_json.write_json_durably(path / "manifest.json", value)
    return path / "manifest.json"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    manifest = a_manifest()
    assert parse_manifest(written(tmp_path, manifest)) == manifest


def test_layout_of_the_text_and_order_of_keys_do_not_matter(tmp_path: Path) -> None:
    path = written(tmp_path, a_manifest())
    value = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(dict(reversed(value.items())), indent=7), "utf-8")
    assert parse_manifest(path) == a_manifest()


def test_unknown_keys_are_covered_and_ignored(tmp_path: Path) -> None:
    path = rewritten(tmp_path, lambda value: value.update(note="from a later release of the same format"))
    assert parse_manifest(path) == a_manifest()


def test_every_truncation_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path, a_manifest())
    data = path.read_bytes()
    for size in range(len(data) - 1):  # the last byte is a newline
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointDamagedError, match=r"manifest\.json"):
            parse_manifest(path)


def test_a20_no_flipped_bit_gets_through(tmp_path: Path) -> None:
    path = written(tmp_path, a_manifest())
    data = path.read_bytes()
    caught = 0
    for position in range(len(data)):
        for bit in range(position % 2, 8, 2):  # half of all, every bit of every pair of bytes
            path.write_bytes(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
            try:
                found = parse_manifest(path)
            except (CheckpointDamagedError, FormatError):
                caught += 1
            else:
                assert found == a_manifest(), f"bit {bit} of byte {position}"
    assert caught > 3 * len(data), "nearly all flips are noticed; only spaces and letter case of escapes say the same"


def test_zeroed_blocks_are_damage(tmp_path: Path) -> None:
    path = written(tmp_path, a_manifest(files=200))
    data = path.read_bytes()
    for start in range(0, len(data), 4096):
        block = data[start : start + 4096]
        path.write_bytes(data[:start] + bytes(len(block)) + data[start + 4096 :])
        with pytest.raises(CheckpointDamagedError):
            parse_manifest(path)


def test_swapped_values_are_damage(tmp_path: Path) -> None:
    path = written(tmp_path, a_manifest())
    text = path.read_text("utf-8")
    path.write_text(text.replace('"attempt": 3', '"attempt": 4'), "utf-8")
    with pytest.raises(CheckpointDamagedError, match="altered since it was written: expected digest"):
        parse_manifest(path)


def test_a_newer_version_is_named_with_ours(tmp_path: Path) -> None:
    path = written(tmp_path, a_manifest())
    value = json.loads(path.read_text("utf-8"))
    value["format_version"] = FORMAT_VERSION + 1
    value["files"] = "of a form that only the newer version knows"
    path.write_text(json.dumps(value), "utf-8")
    with pytest.raises(
        FormatError, match=rf"version {FORMAT_VERSION + 1}, .*up to {FORMAT_VERSION}.*Upgrade"
    ) as caught:
        parse_manifest(path)
    assert str(path) in str(caught.value)


WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "", "x", [], {}, {"size": 1}, 1 << 63)
FIELDS = tuple(key for key in to_json(a_manifest()) if key != "digest")


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_needed_and_typed(field: str, tmp_path: Path) -> None:
    with pytest.raises((CheckpointDamagedError, FormatError), match=field):
        parse_manifest(rewritten(tmp_path, lambda value: value.pop(field)))
    sound = to_json(a_manifest())[field]
    for wrong in WRONG:
        if type(wrong) is type(sound) and field in ("root_id", "topology", "model", "versions", "references"):
            continue
        with pytest.raises((CheckpointDamagedError, FormatError)) as caught:
            parse_manifest(rewritten(tmp_path, lambda value, wrong=wrong: value.update({field: wrong})))
        assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        (("files", SHARD), None),
        (("files", SHARD), [4096, "0" * 32]),
        (("files", SHARD, "size"), -1),
        (("files", SHARD, "size"), True),
        (("files", SHARD, "size"), "4096"),
        (("files", SHARD, "header_digest"), "0" * 31),
        (("files", SHARD, "header_digest"), "0" * 31 + "G"),
        (("files", SHARD, "header_digest"), "A" * 32),
        (("files", SHARD, "header_digest"), "0" * 32 + "\n"),
        (("trainer_state", "size"), None),
        (("trainer_state", "digest"), 7),
        (("versions", "torch"), 2),
        (("total_bytes",), 1),
        (("created",), "yesterday"),
        (("created",), "2026-01-02T03:04:05"),
        (("created",), "2026-01-02T03:04:05+02:00"),
    ],
)
def test_inner_fields_are_typed(where: tuple[str, ...], wrong: Any, tmp_path: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        for key in where[:-1]:
            value = value[key]
        value[where[-1]] = wrong

    with pytest.raises(CheckpointDamagedError, match=where[-1].replace(".", r"\.")):
        parse_manifest(rewritten(tmp_path, change))


@pytest.mark.parametrize(
    "name",
    [
        "../step-00000100/tp00-pp00-dp00.safetensors",
        "/etc/passwd.safetensors",
        "a/b.safetensors",
        "..safetensors",
        ".hidden.safetensors",
        "nul\0.safetensors",
        "line\n.safetensors",
        "tp00.safetensors\n",
        "tp00.pt",
        "manifest.json",
        "",
        "a" * 300 + ".safetensors",
    ],
)
def test_a_file_outside_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamagedError, match="files"):
        parse_manifest(rewritten(tmp_path, lambda value: value["files"].update({name: value["files"].pop(SHARD)})))


@pytest.mark.parametrize("text", ["", "null", "[]", '"x"', "3", "{}", '{"format_version": 1}', "[" * 100_000])
def test_what_is_no_manifest(text: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(CheckpointDamagedError, match=r"manifest\.json"):
        parse_manifest(path)


def test_a_repeated_key_is_damage(tmp_path: Path) -> None:
    path = written(tmp_path, a_manifest())
    text = path.read_text("utf-8")
    path.write_text(text.replace('"attempt": 3,', '"attempt": 3, "attempt": 3,'), "utf-8")
    with pytest.raises(CheckpointDamagedError, match="'attempt' stands twice"):
        parse_manifest(path)


def test_depth_is_damage_to_the_reader_and_an_argument_error_to_the_writer(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    with pytest.raises(ConfigurationError, match=r"topology"):
        to_json(dataclasses.replace(a_manifest(), topology={"deep": deep}))
    value = copy.deepcopy(to_json(a_manifest()))
    value["topology"]["deep"] = deep
    (tmp_path / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointDamagedError, match="levels deep"):
        parse_manifest(tmp_path / "manifest.json")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.touch()
    os.truncate(path, 1 << 36)
    with pytest.raises(CheckpointDamagedError, match="at most"):
        parse_manifest(path)


def test_16384_ranks_are_quick(tmp_path: Path) -> None:
    manifest = a_manifest(files=16_384)
    before = time.process_time()
    path = written(tmp_path, manifest)
    assert parse_manifest(path) == manifest
    assert time.process_time() - before < 5.0, (
        "a second of processor time at most, on a machine with nothing else to do"
    )
    assert path.stat().st_size < 200 * 16_384


def test_its_size_does_not_depend_on_bytes(tmp_path: Path) -> None:
    manifest = a_manifest()
    large = {name: dataclasses.replace(record, size=10**12) for name, record in manifest.files.items()}
    larger = dataclasses.replace(manifest, files=large, total_bytes=700 + 2 * 10**12)
    assert abs(len(strict_json.dump_json(to_json(larger))) - len(strict_json.dump_json(to_json(manifest)))) < 100


def test_the_trainer_state_is_what_was_committed_or_damage(tmp_path: Path) -> None:
    text = b'{"global_step": 1200}\n'
    record = FileRecord(size=len(text), digest=xxhash.xxh3_128_hexdigest(text))
    manifest = dataclasses.replace(a_manifest(), trainer_state=record)
    path = tmp_path / "trainer_state.json"
    path.write_bytes(text)
    assert read_trainer_state(tmp_path, manifest) == text
    for altered in (b"", text[:-1], text + b" ", text.replace(b"1200", b"1300"), bytes(len(text))):
        path.write_bytes(altered)
        with pytest.raises(CheckpointDamagedError, match=r"trainer_state\.json: expected"):
            read_trainer_state(tmp_path, manifest)
    path.unlink()
    with pytest.raises(CheckpointDamagedError, match=r"trainer_state\.json: the file is missing"):
        read_trainer_state(tmp_path, manifest)
