"""Which checkpoints a root holds: those this run may go on from, newest first, and why the others were passed over.

Order is by the step and attempt that the manifests record; never by time stamps, by names as strings, or by `LATEST`.
Reads manifests only: whether a checkpoint's other files are whole is asked of the few that matter, with `check_files`.
Changes nothing on disk, and ignores every name that is not megaresume's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaresume.errors import CheckpointDamagedError, CheckpointNotFoundError, FormatError, RootError
from megaresume.store import layout
from megaresume.store.attempts import Attempt, read_attempts
from megaresume.store.lineage import on_branch
from megaresume.store.manifest import Manifest, parse_manifest
from megaresume.store.references import locate

_MAX_NAMED = 5


@dataclass(frozen=True)
class Candidate:
    """A committed checkpoint: a directory with a readable manifest."""

    path: Path
    step: int
    attempt: int
    manifest: Manifest


@dataclass(frozen=True)
class Passed:
    """A directory of megaresume's that is not a candidate, and why. `step` is by its name."""

    path: Path
    step: int
    reason: str
    manifest: Manifest | None = None
    """Where it is a whole checkpoint, only not of this branch."""


def find_candidates(root: Path) -> tuple[list[Candidate], list[Passed]]:
    """(candidates on the branch of the newest attempt, what was passed over), each newest first by step, then attempt.

    A directory that was renamed aside is judged like any other, by its manifest: where a commit was cut off between
    its two renames, the checkpoint is under that name. A root that does not exist yet holds nothing. Raises
    `RootError` where the root cannot be listed, and `CheckpointDamagedError` where an attempt's record cannot be read.
    """
    attempts = read_attempts(root)
    candidates: list[Candidate] = []
    passed: list[Passed] = []
    for name in _names(root):
        staging = layout.parse_staging_directory(name)
        if staging is not None:
            reason = f"not published: its save, by attempt {staging[1]}, is under way or was cut off"
            passed.append(Passed(root / name, staging[0], reason))
            continue
        step = _named_step(name)
        if step is None:
            continue
        candidate = None
        try:
            candidate = _open(root / name, step)
            _check_on_branch(candidate, attempts)
        except (CheckpointDamagedError, CheckpointNotFoundError, FormatError, _OffBranch) as error:
            reason = str(error).removeprefix(f"{root / name}: ")
            passed.append(Passed(root / name, step, reason, None if candidate is None else candidate.manifest))
        else:
            candidates.append(candidate)
    candidates.sort(key=lambda candidate: (candidate.step, candidate.attempt), reverse=True)
    passed.sort(key=lambda one: (one.step, one.path.name), reverse=True)
    return candidates, passed


def open_checkpoint(path: Path) -> Candidate:
    """The checkpoint in the directory `path`, whatever its name and branch.

    Raises `CheckpointNotFoundError` where there is none, saying what is there instead and the way out;
    `CheckpointDamagedError` and `FormatError` where its manifest cannot be read.
    """
    if not os.path.isdir(path):
        found = "a file" if os.path.exists(path) else "nothing"
        beside = [name for name in _names(path.parent) if layout.parse_step_directory(name) is not None]
        raise CheckpointNotFoundError(
            f"{path}: expected a checkpoint directory, found {found}. {_offer(path.parent, beside)}"
        )
    staging = layout.parse_staging_directory(path.name)
    if staging is not None:
        raise CheckpointNotFoundError(
            f"{path}: not published: the save of step {staging[0]} by attempt {staging[1]} runs or was cut off. "
            "Resume from a committed checkpoint (step-...)."
        )
    return _open(path, _named_step(path.name))


def check_files(candidate: Candidate) -> None:
    """Raise `CheckpointDamagedError` unless every file of the manifest is there with its size, those of earlier
    checkpoints that it refers to included: a `stat` of each."""
    sizes = {name: record.size for name, record in candidate.manifest.files.items()}
    sizes[layout.TRAINER_STATE] = candidate.manifest.trainer_state.size
    paths = {name: (candidate.path / name, size) for name, size in sizes.items()}
    for reference in candidate.manifest.references:
        there = locate(candidate.path.parent, reference, root_id=candidate.manifest.root_id)
        paths[f"{there.parent.name}/{reference.name}"] = (there, reference.size)
    wrong = []
    for name, (path, size) in paths.items():
        try:
            found = os.stat(path).st_size
        except OSError as error:
            wrong.append(f"{name}: expected {size} bytes, found none ({error.strerror})")
        else:
            if found != size:
                wrong.append(f"{name}: expected {size} bytes, found {found}")
    if wrong:
        more = f"; and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        raise CheckpointDamagedError(
            f"{candidate.path}: {'; '.join(wrong[:_MAX_NAMED])}{more}. Resume from another checkpoint."
        )


class _OffBranch(Exception):
    """Not a failure: a whole checkpoint, of a history that this run has left."""


def _check_on_branch(candidate: Candidate, attempts: Sequence[Attempt]) -> None:
    if attempts and candidate.manifest.root_id != attempts[0].root_id:
        raise _OffBranch(
            f"copied here from another root: expected root id {attempts[0].root_id}, "
            f"found {candidate.manifest.root_id}; to go on from it, name it"
        )
    if not on_branch(candidate.attempt, candidate.step, attempts):
        raise _OffBranch(
            f"off the branch: written by attempt {candidate.attempt}, and not in the history of {attempts[-1]}; "
            "to return to it, name it"
        )


def _open(path: Path, named_step: int | None) -> Candidate:
    if _is_absent(path / layout.MANIFEST):
        raise CheckpointNotFoundError(f"{path}: {_what_it_is(path)}")
    manifest = parse_manifest(path / layout.MANIFEST)
    if named_step is not None and manifest.step != named_step:
        raise CheckpointDamagedError(
            f"{path}: its name says step {named_step}, its manifest step {manifest.step}: renamed by hand? "
            "Give it back its name, or resume from another checkpoint."
        )
    return Candidate(path, manifest.step, manifest.attempt, manifest)


def _named_step(name: str) -> int | None:
    aside = layout.parse_aside_directory(name)
    return layout.parse_step_directory(name) if aside is None else aside[0]


def _what_it_is(path: Path) -> str:
    if not os.path.isdir(path):
        return (
            f"expected a checkpoint directory, found a {'file' if os.path.exists(path) else 'link that leads nowhere'}"
        )
    names = _names(path)
    steps = [name for name in names if layout.parse_step_directory(name) is not None]
    if steps or layout.ATTEMPTS in names:
        return f"a root of checkpoints, not a checkpoint. {_offer(path, steps)}"
    if "latest_checkpointed_iteration.txt" in names or ".metadata" in names:
        return "a checkpoint written by Megatron, not by megaresume. Load it with Megatron, then save it here."
    shards = sum(name.endswith(layout.SHARD_SUFFIX) for name in names)
    if shards:
        return (
            f"not a resumable checkpoint: {shards} {layout.SHARD_SUFFIX} files and no {layout.MANIFEST}. Resume from a "
            "committed checkpoint."
        )
    found = f"{len(names)} other files" if names else "nothing"
    return f"not a checkpoint: expected {layout.MANIFEST} in it, found {found}"


def _offer(root: Path, steps: list[str]) -> str:
    if not steps:
        return "Check the path."
    newest = sorted(steps, key=lambda name: layout.parse_step_directory(name) or 0)[-_MAX_NAMED:]
    return f"The newest in {root}: {', '.join(newest)}."


def _is_absent(path: Path) -> bool:
    """Not the same as not `exists()`: what may not be looked at is there, and reading it says why it cannot be read."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RootError(
            f"{directory}: expected a directory of checkpoints, found that it cannot be listed: {error.strerror}."
        ) from error
