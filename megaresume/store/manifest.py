"""The manifest: the one file whose presence makes a directory a checkpoint, and the record of every other file in it.

Written last. Grows with the number of files, never with tensors or bytes, and reads in well under a second for 16,384
ranks. Knows names, sizes and digests; `topology` and `model` are stored and returned unread. The form is specified in
`docs/on-disk-format.md`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megaresume.errors import CheckpointDamagedError, FormatError
from megaresume.store import fs, strict_json
from megaresume.store.layout import SHARD_SUFFIX, TRAINER_STATE
from megaresume.store.shard import ShardRecord

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,240}" + re.escape(SHARD_SUFFIX))
_DIGEST = re.compile(r"[0-9a-f]{32}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|\+00:00)", re.ASCII)


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of `trainer_state.json`: its size in bytes and the digest (xxh3_128, hex) of all of it."""

    size: int
    digest: str


@dataclass(frozen=True, order=True)
class Reference:
    """A shard file of another checkpoint of the same root, in which some tensors of this one lie."""

    step: int
    attempt: int
    name: str
    size: int
    header_digest: str


@dataclass(frozen=True)
class Manifest:
    """A committed checkpoint.

    `created` is ISO 8601 in UTC; `files` maps shard file names to their records; `total_bytes` is the sum of the sizes
    in `files` and of `trainer_state`; `versions` names the software that wrote it. `references`, in order, are files of
    earlier checkpoints without which this one is not whole.
    """

    root_id: str
    attempt: int
    step: int
    created: str
    topology: dict[str, Any]
    model: dict[str, Any]
    files: Mapping[str, ShardRecord]
    trainer_state: FileRecord
    total_bytes: int
    versions: Mapping[str, str]
    references: tuple[Reference, ...] = ()
    format_version: int = FORMAT_VERSION


def to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as the JSON object to write, its own digest included."""
    value: dict[str, Any] = {
        "format_version": manifest.format_version,
        "root_id": manifest.root_id,
        "attempt": manifest.attempt,
        "step": manifest.step,
        "created": manifest.created,
        "topology": manifest.topology,
        "model": manifest.model,
        "versions": dict(manifest.versions),
        "total_bytes": manifest.total_bytes,
        "trainer_state": {"size": manifest.trainer_state.size, "digest": manifest.trainer_state.digest},
        "files": {
            name: {"size": record.size, "header_digest": record.header_digest}
            for name, record in sorted(manifest.files.items())
        },
        "references": [dataclasses.asdict(each) for each in manifest.references],
    }
    return value | {"digest": _digest(value)}


def parse_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises `CheckpointDamagedError` naming the field, expected and found; `FormatError` where a newer release wrote it.
    """
    value = strict_json.read_json_strict(path, MAX_MANIFEST_BYTES)
    if not isinstance(value, dict):
        raise CheckpointDamagedError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    version = _count(value, "format_version", path)
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: written in format version {version}, this release reads up to {FORMAT_VERSION}. "
            "Upgrade megaresume to read it."
        )
    _check_digest(value, path)
    versions = _object(value, "versions", path)
    manifest = Manifest(
        root_id=_string(value, "root_id", path),
        attempt=_count(value, "attempt", path),
        step=_count(value, "step", path),
        created=_string(value, "created", path),
        topology=_object(value, "topology", path),
        model=_object(value, "model", path),
        files=_parse_files(_object(value, "files", path), path),
        trainer_state=_parse_trainer_state(_object(value, "trainer_state", path), path),
        total_bytes=_count(value, "total_bytes", path),
        versions={name: _string(versions, name, path, where=f"versions.{name}") for name in versions},
        references=_parse_references(value.get("references"), path),
        format_version=version,
    )
    total = manifest.trainer_state.size + sum(record.size for record in manifest.files.values())
    if not _TIME.fullmatch(manifest.created):
        raise _unexpected(path, "created", "a time in UTC, ISO 8601", manifest.created)
    if manifest.total_bytes != total:
        raise _unexpected(path, "total_bytes", f"{total}, the sum over the files", manifest.total_bytes)
    return manifest


def read_trainer_state(directory: Path, manifest: Manifest) -> bytes:
    """The bytes of a checkpoint's `trainer_state.json`; `CheckpointDamagedError` unless they are as committed."""
    path, record = directory / TRAINER_STATE, manifest.trainer_state
    data = fs.read_bytes(path, max_bytes=max(record.size, 1))
    digest = xxhash.xxh3_128_hexdigest(data)
    if (len(data), digest) != (record.size, record.digest):
        raise CheckpointDamagedError(
            f"{path}: expected {record.size} bytes with digest {record.digest}, found {len(data)} bytes with digest "
            f"{digest}. Resume from another checkpoint."
        )
    return data


def _digest(value: Mapping[str, Any]) -> str:
    """Of the object without its `digest`, keys sorted and without spaces: the same however the file is laid out."""
    text = strict_json.compact_json({key: item for key, item in value.items() if key != "digest"}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8"))


def _check_digest(value: Mapping[str, Any], path: Path) -> None:
    expected, found = _digest_text(value, "digest", path), _digest(value)
    if expected != found:
        raise CheckpointDamagedError(
            f"{path}: altered since it was written: expected digest {expected} (its own), found {found}. "
            "Resume from another checkpoint."
        )


def _parse_files(files: Mapping[str, Any], path: Path) -> dict[str, ShardRecord]:
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise _unexpected(path, "files", "names of files in this directory", name)
    records = {}
    for name in files:
        record = _object(files, name, path, where=f"files.{name}")
        records[name] = ShardRecord(
            size=_count(record, "size", path, where=f"files.{name}.size"),
            header_digest=_digest_text(record, "header_digest", path, where=f"files.{name}.header_digest"),
        )
    return records


def _parse_references(listed: Any, path: Path) -> tuple[Reference, ...]:
    if not isinstance(listed, list):
        raise _unexpected(path, "references", "a list", listed)
    references = []
    for number, each in enumerate(listed):
        where = f"references[{number}]"
        if not isinstance(each, dict):
            raise _unexpected(path, where, "an object", each)
        name = _string(each, "name", path, where=f"{where}.name")
        if not _FILE_NAME.fullmatch(name):
            raise _unexpected(path, f"{where}.name", "the name of a shard file", name)
        references.append(
            Reference(
                step=_count(each, "step", path, where=f"{where}.step"),
                attempt=_count(each, "attempt", path, where=f"{where}.attempt"),
                name=name,
                size=_count(each, "size", path, where=f"{where}.size"),
                header_digest=_digest_text(each, "header_digest", path, where=f"{where}.header_digest"),
            )
        )
    return tuple(references)


def _parse_trainer_state(record: Mapping[str, Any], path: Path) -> FileRecord:
    return FileRecord(
        size=_count(record, "size", path, where="trainer_state.size"),
        digest=_digest_text(record, "digest", path, where="trainer_state.digest"),
    )


def _object(value: Mapping[str, Any], key: str, path: Path, *, where: str | None = None) -> dict[str, Any]:
    item = value.get(key)
    if not isinstance(item, dict):
        raise _unexpected(path, where or key, "an object", item)
    return item


def _count(value: Mapping[str, Any], key: str, path: Path, *, where: str | None = None) -> int:
    item = value.get(key)
    if type(item) is not int or not 0 <= item < 1 << 63:
        raise _unexpected(path, where or key, "a whole number, not negative", item)
    return item


def _string(value: Mapping[str, Any], key: str, path: Path, *, where: str | None = None) -> str:
    item = value.get(key)
    if not isinstance(item, str):
        raise _unexpected(path, where or key, "a string", item)
    return item


def _digest_text(value: Mapping[str, Any], key: str, path: Path, *, where: str | None = None) -> str:
    text = _string(value, key, path, where=where)
    if not _DIGEST.fullmatch(text):
        raise _unexpected(path, where or key, "32 hex digits", text)
    return text


def _unexpected(path: Path, where: str, expected: str, found: object) -> CheckpointDamagedError:
    shown = "nothing" if found is None else repr(found)[:80]
    return CheckpointDamagedError(f"{path}: expected {where!r} to be {expected}, found {shown}.")
