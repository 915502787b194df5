"""The specification is enough: a reader made from it alone, without megaresume, reads what megaresume writes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from megaresume.store import fs, layout, strict_json
from megaresume.store.attempts import read_attempts
from megaresume.store.manifest import FileRecord, Manifest, parse_manifest, to_json
from megaresume.store.shard import DTYPE_BYTES, Entry, ShardIdentity, ShardRecord, write_shard
from tests.store import second_reader
from tests.store.second_reader import read_manifest, read_parameter, read_shard
from tests.store.shards import INDEX, small_entries

SPECIFICATION = (Path(__file__).parents[2] / "docs" / "on-disk-format.md").read_text("utf-8")
TP, DP = 2, 2


def blocks(language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```$", SPECIFICATION, re.DOTALL | re.MULTILINE)


# --- the reader ------------------------------------------------------------------------------------------------------


def test_the_reader_is_small_and_stands_alone() -> None:
    source = Path(second_reader.__file__).read_text("utf-8")
    imported = {
        name.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported == {"json", "numpy", "xxhash"}
    code = [line for line in source.splitlines() if line.strip()]
    assert len(code) <= 60


def part_of(array: np.ndarray[Any, Any], rank: int, kind: str) -> tuple[np.ndarray[Any, Any], list[dict[str, Any]]]:
    """The local part of a global matrix that tensor parallel rank `rank` of `TP` holds, and its chunks."""
    rows, columns = array.shape[0] // TP, array.shape[1] // TP
    if kind == "column":
        local = array[rank * rows : (rank + 1) * rows]
        return local, [chunk(0, local.shape, [local.shape[1], 1], [rank * rows, 0])]
    if kind == "row":
        local = array[:, rank * columns : (rank + 1) * columns]
        return local, [chunk(0, local.shape, [columns, 1], [0, rank * columns])]
    if kind == "gated":  # the two halves of the global matrix, each split over the ranks, one under the other
        half, width = rows // 2, array.shape[1]
        begins = [rank * half, array.shape[0] // 2 + rank * half]
        local = np.concatenate([array[begin : begin + half] for begin in begins])
        return local, [chunk(i * half * width, (half, width), [width, 1], [begins[i], 0]) for i in range(2)]
    # Replicated, the columns of the global matrix's two halves taking turns: boxes that are not contiguous.
    local = np.empty_like(array)
    local[:, 0::2], local[:, 1::2] = np.split(array, 2, axis=1)
    width = array.shape[1]
    return local, [chunk(i, (array.shape[0], width // 2), [width, 2], [0, i * width // 2]) for i in range(2)]


def chunk(offset: int, shape: Sequence[int], strides: list[int], global_offset: list[int]) -> dict[str, Any]:
    return {"offset": offset, "shape": list(shape), "strides": strides, "global_offset": global_offset}


def bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (array.view("<u4") >> 16).astype("<u2")


def a_run() -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    random = np.random.default_rng(7)
    shapes = {"fc1.weight": ("gated", (16, 6)), "fc2.weight": ("row", (5, 12)), "qkv.weight": ("interleaved", (4, 8))}
    shapes["embedding.weight"] = ("column", (8, 3))
    return {
        name: (kind, random.standard_normal(shape).astype(np.float32).view("<u4") & 0xFFFF0000)
        for name, (kind, shape) in shapes.items()
    }


def write_checkpoint(root: Path, run: dict[str, tuple[str, np.ndarray[Any, Any]]]) -> Path:
    """A checkpoint of `TP` x `DP` ranks: BF16 weights and F32 moments, split over data parallel ranks by flat range."""
    checkpoint = root / layout.step_directory(1200)
    checkpoint.mkdir()
    files: dict[str, ShardRecord] = {}
    for tp in range(TP):
        for dp in range(DP):
            entries, tensors, parameters = [], {}, {}
            for name, (kind, bits) in run.items():
                array = bits.view(np.float32)
                local, chunks = part_of(array, tp, kind)
                flat = np.ascontiguousarray(local).ravel()
                begin, end = (0, flat.size * 2 // 3) if dp == 0 else (flat.size * 2 // 3, flat.size)
                parameters[name] = {
                    "dtype": "bfloat16",
                    "global_shape": list(array.shape),
                    "local_shape": list(local.shape),
                    "chunks": chunks,
                    "replica": "dense",
                    "trainable": True,
                }
                for file_name, slot, dtype, data in (
                    (f"model/{name}", "weight", "BF16", bf16(flat[begin:end])),
                    (f"optim/0/exp_avg/{name}", "exp_avg", "F32", flat[begin:end] * np.float32(2)),
                ):
                    entries.append(Entry(file_name, dtype, (end - begin,), memoryview(np.ascontiguousarray(data))))
                    tensors[file_name] = {"parameter": name, "slot": slot, "range": [begin, end], "kind": "stored"}
            coordinate = f"tp{tp:02d}-pp00-dp{dp:02d}"
            index = {"version": 1, "parameters": parameters, "tensors": tensors}
            files[f"{coordinate}.safetensors"] = write_shard(
                checkpoint / f"{coordinate}.safetensors",
                entries,
                identity=ShardIdentity("3f2a9c", 3, 1200, coordinate),
                index=index,
            )
    state = b'{"schema_version": 1}\n'
    fs.write_file_durably(checkpoint / layout.TRAINER_STATE, state)
    manifest = Manifest(
        root_id="3f2a9c",
        attempt=3,
        step=1200,
        created="2026-01-02T03:04:05Z",
        topology={"tp": TP, "pp": 1, "dp": DP},
        model={"layernorm_epsilon": 1e-05, "name": "Übermodell", "ratio": 0.1, "large": 1e22},
        files=files,
        trainer_state=FileRecord(len(state), xxhash.xxh3_128_hexdigest(state)),
        total_bytes=len(state) + sum(record.size for record in files.values()),
        versions={},
    )
    strict_json.write_json_durably(checkpoint / layout.MANIFEST, to_json(manifest))
    return checkpoint


def test_global_tensors_are_put_together_from_all_ranks(tmp_path: Path) -> None:
    run = a_run()
    checkpoint = write_checkpoint(tmp_path, run)
    for name, (_, bits) in run.items():
        assert np.array_equal(read_parameter(checkpoint, name, "weight").view("<u4"), bits), name
        assert np.array_equal(read_parameter(checkpoint, name, "exp_avg"), bits.view(np.float32) * 2), name


def test_a_missing_part_is_noticed(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, a_run())
    value = json.loads((checkpoint / "manifest.json").read_text("utf-8"))
    del value["files"]["tp01-pp00-dp01.safetensors"], value["digest"]
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    value["digest"] = xxhash.xxh3_128_hexdigest(text.encode("utf-8"))
    (checkpoint / "manifest.json").write_text(json.dumps(value), "utf-8")
    with pytest.raises(AssertionError, match="not all of it"):
        read_parameter(checkpoint, "fc1.weight", "weight")


def test_every_tensor_of_a_shard(tmp_path: Path) -> None:
    path = tmp_path / "tp00-pp00-dp00.safetensors"
    large = Entry("large", "U8", (2_500_000,), memoryview(np.random.default_rng(0).bytes(2_500_000)))
    record = write_shard(
        path, [*small_entries(), large], identity=ShardIdentity("3f2a9c", 3, 1200, path.stem), index=INDEX
    )
    metadata, tensors = read_shard(path, {"size": record.size, "header_digest": record.header_digest})
    assert json.loads(metadata["index"]) == INDEX
    for entry in [*small_entries(), large]:
        found = tensors[entry.name]
        assert found.shape == entry.shape
        assert (bf16(found) if entry.dtype == "BF16" else found).tobytes() == bytes(entry.data), entry.name


@pytest.mark.parametrize("where", ["manifest.json", "trainer_state.json", "tp00-pp00-dp01.safetensors"])
def test_a20_the_second_reader_finds_damage_too(where: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, a_run())
    path = checkpoint / where
    raw = bytearray(path.read_bytes())
    for position in (len(raw) // 9, len(raw) - 7, 13):
        raw[position] ^= 4
        path.write_bytes(raw)
        with pytest.raises((AssertionError, ValueError, KeyError)):
            read_parameter(checkpoint, "fc1.weight", "weight")
        raw[position] ^= 4
    path.write_bytes(raw)
    assert read_manifest(checkpoint)["step"] == 1200


# --- the examples of the specification -------------------------------------------------------------------------------


def example_shard(path: Path) -> ShardRecord:
    weight, step = memoryview(bytes.fromhex("803f004040408040a040c040")), memoryview(np.float32(7))
    return write_shard(
        path,
        [Entry("model/w", "BF16", (2, 3), weight), Entry("optim/0/step/w", "F32", (), step)],
        identity=ShardIdentity("3f2a9c", 3, 1200, "tp00-pp00-dp00"),
        index={"version": 1},
    )


def test_the_example_file_is_what_the_writer_writes(tmp_path: Path) -> None:
    record = example_shard(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    text = raw[8:4096].rstrip(b" ").decode()
    expected = [raw[:8].hex(), text, "and spaces up to byte 4096", raw[4096:4108].hex(), raw[4108:].hex()]
    assert "\n".join(expected) + "\n" in list(blocks("text"))
    assert record.size == len(raw) == 4112


def test_the_example_manifest_is_one(tmp_path: Path) -> None:
    record = example_shard(tmp_path / "x.safetensors")
    (text,) = [block for block in blocks("json") if "format_version" in block]
    (tmp_path / "manifest.json").write_text(text, "utf-8")
    manifest = parse_manifest(tmp_path / "manifest.json")
    assert manifest.files == {"tp00-pp00-dp00.safetensors": record}
    assert list(to_json(manifest)) == list(json.loads(text)), "the same keys in the same order"


def test_the_example_attempt_is_one(tmp_path: Path) -> None:
    (text,) = [block for block in blocks("json") if "resumed_from" in block]
    (tmp_path / layout.ATTEMPTS).mkdir()
    (tmp_path / layout.ATTEMPTS / layout.attempt_file(4)).write_text(text, "utf-8")
    (attempt,) = read_attempts(tmp_path)
    assert attempt.to_json() == json.loads(text)


def test_the_example_index_says_what_the_text_says() -> None:
    (text,) = [block for block in blocks("json") if "parameters" in block]
    index = json.loads(text)
    ((name, parameter),) = index["parameters"].items()
    local = np.prod(parameter["local_shape"])
    assert sum(np.prod(chunk["shape"]) for chunk in parameter["chunks"]) == local
    for entry in index["tensors"].values():
        assert entry["parameter"] in (name, None)
        assert entry["range"] is None or 0 <= entry["range"][0] < entry["range"][1] <= local


def test_dtypes_and_limits_are_those_of_the_code() -> None:
    table = re.findall(r"^\| (\d) \| (`[^|]*`) \|$", SPECIFICATION, re.MULTILINE)
    assert {name: int(size) for size, names in table for name in re.findall(r"`(\w+)`", names)} == dict(DTYPE_BYTES)
    for name in ("step-00001200", ".staging-step-00001200-a000003", "step-00001200.a0003", "step-00001200.a0003.2"):
        assert f"`{name}`" in SPECIFICATION
    assert layout.staging_directory(1200, 3) == ".staging-step-00001200-a000003"
    assert layout.aside_directory(1200, 3, ["step-00001200.a0003"]) == "step-00001200.a0003.2"
    assert f"at most {strict_json.MAX_JSON_DEPTH} objects and lists" in SPECIFICATION
