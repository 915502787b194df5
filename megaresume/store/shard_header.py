"""The text before a shard's data: from tensors, identity and index to bytes, and from untrusted bytes back.

Pure: opens no file and sees no tensor's bytes. The form is specified in `docs/on-disk-format.md`; it is that of a
safetensors header, whose `__metadata__` holds what is ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megaresume.errors import CheckpointDamagedError, ConfigurationError, FormatError
from megaresume.store import strict_json

SHARD_VERSION = 1
CHUNK_BYTES = 1 << 20  # of the data section, each under a digest of its own
ALIGNMENT = 4096  # of the data section in the file: a page, and what direct I/O asks for
LENGTH_BYTES = 8  # before the text: how long it is, little-endian
MAX_TEXT_BYTES = 100_000_000  # the limit of the safetensors library
DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
METADATA = "__metadata__"

_MAX_COUNT = (1 << 63) - 1
_MAX_DIMENSIONS = 64
_SPAN_FIELDS = {"dtype", "shape", "data_offsets"}
_DIGEST_CHARS = 16
# The digests come first in the text, so that their place in the file is known before they are.
_BEFORE_DIGESTS = b'{"__metadata__":{"chunk_digests":"'
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_HEX = re.compile(r"[0-9a-f]*")


@dataclass(frozen=True)
class ShardIdentity:
    """Whose bytes these are. `coordinate` is the file's stem, such as `tp00-pp00-dp00`."""

    root_id: str
    attempt: int
    step: int
    coordinate: str


@dataclass(frozen=True)
class TensorSpan:
    """Where a tensor lies: bytes [begin, end) of the data section, in C order, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class ShardHeader:
    """A shard's checked header.

    Checked means: tensors lie in file order without hole or overlap in the data section, which ends with the file; each
    is as long as dtype and shape say; each chunk has a digest (xxh3_64, hex). `data_start` and `size` (of the file) are
    bytes; `digest` (xxh3_128, hex) is of all before the data section.
    """

    identity: ShardIdentity
    index: dict[str, Any]
    tensors: dict[str, TensorSpan]
    data_start: int
    chunk_digests: tuple[str, ...]
    size: int
    digest: str


def chunk_count(data_bytes: int) -> int:
    """How many chunks, the last one perhaps short, a data section has."""
    return -(-data_bytes // CHUNK_BYTES)


# --- to bytes --------------------------------------------------------------------------------------------------------


def encode_head(spans: Sequence[TensorSpan], *, identity: ShardIdentity, index: Mapping[str, Any]) -> bytearray:
    """Length, text and padding: all before the data section, with zeros where `set_digests` will put the digests.

    Raises `ConfigurationError` where it gets longer than safetensors allows, or `index` is no strict JSON.
    """
    data_bytes = spans[-1].end if spans else 0
    metadata = {
        "chunk_digests": "0" * (_DIGEST_CHARS * chunk_count(data_bytes)),
        "megaresume_shard": str(SHARD_VERSION),
        "root_id": identity.root_id,
        "attempt": str(identity.attempt),
        "step": str(identity.step),
        "coordinate": identity.coordinate,
        "index": strict_json.compact_json(dict(index)),
    }
    table: dict[str, Any] = {METADATA: metadata}
    for span in spans:
        table[span.name] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": [span.begin, span.end]}
    text = strict_json.compact_json(table).encode("utf-8")
    assert text.startswith(_BEFORE_DIGESTS)
    padded = -(-(LENGTH_BYTES + len(text)) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES
    if padded > MAX_TEXT_BYTES:
        raise ConfigurationError(
            f"shard {identity.coordinate}: its header needs {padded} bytes, safetensors allows {MAX_TEXT_BYTES}: "
            f"{len(spans)} entries, {len(metadata['index'])} characters of index, {chunk_count(data_bytes)} chunks."
        )
    return bytearray(padded.to_bytes(LENGTH_BYTES, "little") + text.ljust(padded))


def set_digests(head: bytearray, digests: Sequence[str]) -> None:
    """Put the chunks' digests into what `encode_head` made, in place."""
    text = "".join(digests).encode("ascii")
    begin = LENGTH_BYTES + len(_BEFORE_DIGESTS)
    assert head[begin : begin + len(text) + 1] == b"0" * len(text) + b'"'
    head[begin : begin + len(text)] = text


# --- from bytes ------------------------------------------------------------------------------------------------------


def parse_head(head: bytes, *, size: int, path: Path) -> ShardHeader:
    """Check `head`, all that stands before the data section of a file of `size` bytes; `path` is for messages.

    Raises `CheckpointDamagedError` naming file, expected and found; `FormatError` for a safetensors file that is no
    shard of ours, or one of a newer version.
    """
    table = strict_json.parse_json(head[LENGTH_BYTES:], source=f"{path} (header)")
    if not isinstance(table, dict):
        raise CheckpointDamagedError(f"{path}: expected a header that is a JSON object, found {type(table).__name__}.")
    metadata = _parse_metadata(table.pop(METADATA, {}), path)
    index = strict_json.parse_json(_text(metadata, "index", path).encode("utf-8"), source=f"{path} (index)")
    if not isinstance(index, dict):
        raise CheckpointDamagedError(f"{path}: expected an index that is a JSON object, found {type(index).__name__}.")
    data_bytes = size - len(head)
    return ShardHeader(
        identity=ShardIdentity(
            root_id=_text(metadata, "root_id", path),
            attempt=_number(metadata, "attempt", path),
            step=_number(metadata, "step", path),
            coordinate=_text(metadata, "coordinate", path),
        ),
        index=index,
        tensors=_parse_spans(table, data_bytes, path),
        data_start=len(head),
        chunk_digests=_parse_digests(_text(metadata, "chunk_digests", path), data_bytes, path),
        size=size,
        digest=head_digest(head),
    )


def head_digest(head: bytes | bytearray) -> str:
    """The header's digest, as the manifest holds it."""
    return xxhash.xxh3_128_hexdigest(head)


def _parse_metadata(metadata: Any, path: Path) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointDamagedError(f"{path}: expected {METADATA!r} to be an object of strings, found another thing.")
    version = metadata.get("megaresume_shard")
    if version is None:
        raise FormatError(
            f"{path}: expected a shard written by megaresume, found another safetensors file "
            f"('megaresume_shard' is missing from {METADATA!r})."
        )
    if not _NUMBER.fullmatch(version) or version == "0":
        raise CheckpointDamagedError(f"{path}: expected a shard format version, found {version[:40]!r}.")
    if int(version) > SHARD_VERSION:
        raise FormatError(
            f"{path}: written in shard format version {version}, this release reads up to {SHARD_VERSION}. "
            "Upgrade megaresume to read it."
        )
    return metadata


def _text(metadata: Mapping[str, str], key: str, path: Path) -> str:
    if key not in metadata:
        raise CheckpointDamagedError(f"{path}: expected {key!r} in {METADATA!r}, found none.")
    return metadata[key]


def _number(metadata: Mapping[str, str], key: str, path: Path) -> int:
    text = _text(metadata, key, path)
    if not _NUMBER.fullmatch(text):
        raise CheckpointDamagedError(f"{path}: expected {key!r} to be a decimal number, found {text[:40]!r}.")
    return int(text)


def _parse_digests(text: str, data_bytes: int, path: Path) -> tuple[str, ...]:
    expected = _DIGEST_CHARS * chunk_count(data_bytes)
    if len(text) != expected or not _HEX.fullmatch(text):
        raise CheckpointDamagedError(
            f"{path}: expected chunk digests of {expected} hex digits for {data_bytes} bytes of data, "
            f"found {len(text)} characters."
        )
    return tuple(text[at : at + _DIGEST_CHARS] for at in range(0, len(text), _DIGEST_CHARS))


def _parse_spans(table: Mapping[str, Any], data_bytes: int, path: Path) -> dict[str, TensorSpan]:
    spans = [_parse_span(name, value, path) for name, value in table.items()]
    spans.sort(key=lambda span: (span.begin, span.end))
    end = 0
    for span in spans:
        if span.begin != end:
            raise CheckpointDamagedError(
                f"{path}: tensor {span.name!r}: expected at byte {end} of the data section, found at {span.begin}, "
                f"{'after a hole' if span.begin > end else 'over another tensor'}."
            )
        end = span.end
    if end != data_bytes:
        raise CheckpointDamagedError(f"{path}: expected {end} bytes of data by its tensors, found {data_bytes}.")
    return {span.name: span for span in spans}


def _parse_span(name: str, value: Any, path: Path) -> TensorSpan:
    def wrong(expected: str, found: object) -> CheckpointDamagedError:
        return CheckpointDamagedError(f"{path}: tensor {name!r}: expected {expected}, found {str(found)[:80]}.")

    if not isinstance(value, dict) or value.keys() != _SPAN_FIELDS:
        raise wrong("dtype, shape and data_offsets", value)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise wrong(f"a dtype of {', '.join(DTYPE_BYTES)}", repr(dtype))
    if not _are_counts(shape) or len(shape) > _MAX_DIMENSIONS:
        raise wrong("a shape of whole numbers", shape)
    if not _are_counts(offsets) or len(offsets) != 2:
        raise wrong("two data_offsets", offsets)
    begin, end = offsets
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise wrong(f"{expected} bytes for {dtype} {shape}", end - begin)
    return TensorSpan(name, dtype, tuple(shape), begin, end)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_COUNT for item in value)
