"""A second reader, from docs/on-disk-format.md alone: no torch, no safetensors, nothing of megaresume."""

import json

import numpy as np
import xxhash  # for the digests; without it the same bytes can be read, unchecked

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1"}
NUMPY |= {"U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "C64": "<c8"}


def read_manifest(checkpoint):
    manifest = json.loads((checkpoint / "manifest.json").read_text("utf-8"))
    assert manifest["format_version"] == 1
    digest = manifest.pop("digest")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert xxhash.xxh3_128_hexdigest(text.encode("utf-8")) == digest
    state = (checkpoint / "trainer_state.json").read_bytes()
    assert manifest["trainer_state"] == {"size": len(state), "digest": xxhash.xxh3_128_hexdigest(state)}
    return manifest


def read_shard(path, record):
    """(metadata, {tensor name: array}) of one rank's file; BF16 is widened to 32 bits, 8-bit floats stay bytes."""
    raw = path.read_bytes()
    data_start = 8 + int.from_bytes(raw[:8], "little")
    assert record == {"size": len(raw), "header_digest": xxhash.xxh3_128_hexdigest(raw[:data_start])}
    table, data = json.loads(raw[8:data_start]), raw[data_start:]
    metadata = table.pop("__metadata__")
    assert metadata["megaresume_shard"] == "1"
    digests = (xxhash.xxh3_64_hexdigest(data[at : at + 2**20]) for at in range(0, len(data), 2**20))
    assert metadata["chunk_digests"] == "".join(digests)
    tensors = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[begin:end], NUMPY.get(entry["dtype"], "u1")).reshape(entry["shape"])
        tensors[name] = (array.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else array
    return metadata, tensors


def read_parameter(checkpoint, parameter, slot):
    """One slot ("weight", "exp_avg", ...) of one parameter as a global array, from all shards that hold a part."""
    manifest, whole = read_manifest(checkpoint), None
    for file, record in manifest["files"].items():
        metadata, tensors = read_shard(checkpoint / file, record)
        assert all(metadata[key] == str(manifest[key]) for key in ("root_id", "attempt", "step"))
        index = json.loads(metadata["index"])
        for name, entry in index["tensors"].items():
            if (entry["parameter"], entry["slot"], entry["kind"]) == (parameter, slot, "stored"):
                about, part = index["parameters"][parameter], tensors[name].ravel()
                if whole is None:
                    whole = np.zeros(about["global_shape"], part.dtype)
                    missing, positions = np.ones(whole.size, bool), np.arange(whole.size).reshape(whole.shape)
                where = np.zeros(np.prod(about["local_shape"], dtype=int), int)  # local element -> global element
                for chunk in about["chunks"]:
                    strides = [where.itemsize * stride for stride in chunk["strides"]]
                    local = np.lib.stride_tricks.as_strided(where[chunk["offset"] :], chunk["shape"], strides)
                    low = chunk["global_offset"]
                    local[...] = positions[tuple(slice(a, a + n) for a, n in zip(low, chunk["shape"], strict=True))]
                owned = where[slice(*entry["range"])] if entry["range"] else where
                whole.flat[owned], missing[owned] = part, False
    assert whole is not None and not missing.any(), "not all of it is in the checkpoint"
    return whole
