"""Tensors that a checkpoint does not hold because an earlier one of its root does: how they are named and found.

A checkpoint's manifest lists the files it refers to. They are known by step and attempt, not by directory: one that
stood in another's way has been renamed aside. Knows files, and not which tensors are meant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megaresume.errors import CheckpointDamagedError, FormatError
from megaresume.store import layout
from megaresume.store.manifest import Manifest, Reference, parse_manifest


@dataclass(frozen=True)
class Source:
    """Where the bytes of a tensor lie: under `tensor` in the file of `reference`; `digest` (xxh3_128, hex) of them."""

    reference: Reference
    tensor: str
    digest: str


def locate(root: Path, reference: Reference, *, root_id: str) -> Path:
    """The file that is referred to, of the size it must have; its header is checked when it is read.

    Raises `CheckpointDamagedError` where the checkpoint it was in is not there any more.
    """
    for directory in _directories(root, reference.step):
        try:
            manifest = parse_manifest(directory / layout.MANIFEST)
        except (CheckpointDamagedError, FormatError):
            continue
        if _is_it(manifest, reference, root_id):
            return directory / reference.name
    raise CheckpointDamagedError(
        f"{root}: expected {reference.name} of step {reference.step}, written by attempt {reference.attempt}, to which "
        "a later checkpoint refers for weights that do not change; found no such checkpoint. Put it back, or resume "
        "from another checkpoint."
    )


def _is_it(manifest: Manifest, reference: Reference, root_id: str) -> bool:
    record = manifest.files.get(reference.name)
    return (
        (manifest.root_id, manifest.attempt, manifest.step) == (root_id, reference.attempt, reference.step)
        and record is not None
        and (record.size, record.header_digest) == (reference.size, reference.header_digest)
    )


def _directories(root: Path, step: int) -> list[Path]:
    name = layout.step_directory(step)
    asides = [each for each in os.listdir(root) if (layout.parse_aside_directory(each) or (None,))[0] == step]
    return [root / each for each in [name, *sorted(asides)] if os.path.isdir(root / each)]


def referred_to(manifests: Iterable[Manifest]) -> set[tuple[int, int]]:
    """The (step, attempt) of every checkpoint that one of these refers to."""
    return {(each.step, each.attempt) for manifest in manifests for each in manifest.references}
