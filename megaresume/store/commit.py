"""Saving: a checkpoint exists or it does not.

Prepare: every rank writes and fsyncs its shard in a staging directory and reports. Commit, on rank 0 and only if all
succeeded: `trainer_state.json`, then `manifest.json`, then the directory are made durable; one rename puts it in
place, and an fsync of the root makes that durable. Outcome: rank 0 announces it, and only then is the save done on any
rank. A failure anywhere is the same error on all ranks, removes the staging directory and leaves the root as it was.

Two things are checked at the last moment. A newer attempt means that this process is an orphan of an older start and
must not commit. Whatever stands under the checkpoint's name is renamed aside, never overwritten; readers judge it by
its manifest, so that a kill between the two renames loses nothing. `LATEST` comes last and is a hint for people: a
save never fails because of it.

Uses the control plane and no collective of the training's own. Knows entries as bytes and texts as JSON, not what they
mean.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from megaresume.errors import CheckpointDamagedError, FormatError, MegaresumeError, SaveError, SupersededError
from megaresume.store import fs, layout, strict_json
from megaresume.store.attempts import Attempt, newest_attempt_number, read_attempts
from megaresume.store.control import ControlPlane
from megaresume.store.manifest import FileRecord, Manifest, Reference, parse_manifest, to_json
from megaresume.store.recycle import take
from megaresume.store.shard import Entry, ShardIdentity, ShardRecord, write_shard

logger = logging.getLogger("megaresume.store.commit")

_Result = TypeVar("_Result")

# What a network file system may answer once and not the second time; ENOENT and EEXIST where a directory made by
# another host is not seen yet. A full disk is not among them.
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ENOENT, errno.EEXIST)
RETRY_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
_UNTOUCHED = "What was committed before is untouched."


@dataclass(frozen=True)
class CommitText:
    """What rank 0 writes beside the shards: `trainer_state.json` as bytes, and the JSON that the manifest carries."""

    trainer_state: bytes
    topology: dict[str, Any]
    model: dict[str, Any]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class SaveReport:
    """A save that is done.

    `bytes_written` is the size of the whole checkpoint, all ranks' files together; `seconds` is this rank's time.
    `committed` is False where this attempt had committed this step before and nothing was written. `record` is this
    rank's own file, None where nothing was written.
    """

    path: Path
    bytes_written: int
    seconds: float
    committed: bool
    record: ShardRecord | None = None


def save_checkpoint(
    root: Path,
    *,
    control: ControlPlane,
    step: int,
    attempt: Attempt,
    shard_name: str,
    entries: Sequence[Entry],
    identity: ShardIdentity,
    index: Mapping[str, Any],
    describe: Callable[[], CommitText],
    references: Sequence[Reference] = (),
    recycle: bool = False,
) -> SaveReport:
    """Write this rank's shard and commit the checkpoint of `step`. Collective over the control plane.

    `shard_name` is this rank's file, unique over the world; `describe` is called on rank 0 only, before anything is
    written; `references` are files of earlier checkpoints that this rank's index refers to. With `recycle` a file of a
    removed checkpoint is written over where there is one (see `recycle.py`). Where this same attempt has committed this
    step already, nothing is written and the report says so. Raises, on all ranks with the same text, `SupersededError`
    where a newer attempt exists, else `SaveError`; the root is then as it was.
    """
    assert (identity.root_id, identity.attempt, identity.step) == (attempt.root_id, attempt.attempt, step), identity
    started = time.monotonic()
    what = f"save step {step}"
    staging = root / layout.staging_directory(step, attempt.attempt)
    target = root / layout.step_directory(step)
    texts: list[CommitText] = []
    records: list[ShardRecord] = []

    def prepare() -> dict[str, Any]:
        if control.rank == 0:
            texts.append(describe())
        record = _write_own_shard(staging, shard_name, entries, identity=identity, index=index, recycle=recycle)
        records.append(record)
        referred = [asdict(reference) for reference in sorted(set(references))]
        return {"name": shard_name, **asdict(record), "references": referred}

    def commit(reports: Sequence[dict[str, Any]]) -> int:
        try:
            files = _unique_files(reports)
            referred = {Reference(**each) for report in reports for each in report["references"]}
            manifest = _write_texts(staging, texts[0], files, identity, tuple(sorted(referred)))
            _check_newest(root, attempt)
            _move_into_place(root, staging, target, step=step, attempt=attempt.attempt)
        except BaseException as error:
            _remove_staging(staging)
            if isinstance(error, OSError):
                raise SaveError(f"{target}: could not be put in place: {error}. {_UNTOUCHED}") from error
            raise
        _point_latest(root, target)
        return manifest.total_bytes

    try:
        done = control.decide(what, lambda: _already_committed(root, target, attempt))
        if done is not None:
            logger.info("%s: attempt %d has committed this step already; nothing is written", target, attempt.attempt)
            return SaveReport(target, done, time.monotonic() - started, committed=False)
        reports = control.together(what, prepare, undo=lambda: _remove_staging(staging))
        total_bytes = control.decide(what, lambda: commit(reports or []))
    except SaveError:
        raise
    except MegaresumeError as error:
        raise SaveError(str(error)) from error
    return SaveReport(target, total_bytes, time.monotonic() - started, committed=True, record=records[0])


# --- prepare ---------------------------------------------------------------------------------------------------------


def _already_committed(root: Path, target: Path, attempt: Attempt) -> int | None:
    """The bytes of the checkpoint that this attempt has at `target`; None where it is to be written."""
    _check_newest(root, attempt)  # here too, so that an orphan does not fill the disk first
    if not (target / layout.MANIFEST).exists():
        return None
    try:
        manifest = parse_manifest(target / layout.MANIFEST)
    except (CheckpointDamagedError, FormatError) as error:
        logger.warning("%s will be renamed aside: %s", target, error)
        return None
    ours = (manifest.root_id, manifest.attempt) == (attempt.root_id, attempt.attempt)
    return manifest.total_bytes if ours else None


def _check_newest(root: Path, attempt: Attempt) -> None:
    newest = newest_attempt_number(root)
    if newest <= attempt.attempt:
        return
    try:
        who = str(read_attempts(root)[-1])
    except (CheckpointDamagedError, IndexError):
        who = f"attempt {newest}"
    raise SupersededError(
        f"{who} has started since; this is {attempt}, which must not write to the root any more and should end."
    )


def _write_own_shard(
    staging: Path,
    name: str,
    entries: Sequence[Entry],
    *,
    identity: ShardIdentity,
    index: Mapping[str, Any],
    recycle: bool,
) -> ShardRecord:
    def write() -> ShardRecord:
        fs.make_directory(staging)  # every rank itself: what another host made may not be visible here yet
        overwrite = recycle and take(staging.parent, name, staging / name)
        return write_shard(staging / name, entries, identity=identity, index=index, overwrite=overwrite)

    return _retrying(write, path=staging / name, needed=sum(entry.data.nbytes for entry in entries))


def _retrying(write: Callable[[], _Result], *, path: Path, needed: int) -> _Result:
    """Run `write`, which starts from scratch each time, again after errors that may pass. Raises `SaveError`."""
    for pause in (*RETRY_PAUSES_S, None):
        try:
            return write()
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "no errno")
            text = f"{path}: {error.strerror or error} ({code}) while {needed} bytes were to be written there"
            if error.errno not in _TRANSIENT or pause is None:
                raise SaveError(f"{text}. {_UNTOUCHED}") from error
            logger.warning("%s; trying again in %.1f s", text, pause)
            time.sleep(pause)
    raise AssertionError("the last pause is None")


# --- commit, on rank 0 -----------------------------------------------------------------------------------------------


def _unique_files(reports: Sequence[Mapping[str, Any]]) -> dict[str, ShardRecord]:
    files: dict[str, ShardRecord] = {}
    for rank, report in enumerate(reports):
        if report["name"] in files:
            first = [other["name"] for other in reports].index(report["name"])
            raise SaveError(
                f"ranks {first} and {rank} both wrote {report['name']}: they have the same coordinate. Every rank "
                "needs a file of its own; check the parallel sizes given to megaresume."
            )
        files[report["name"]] = ShardRecord(size=report["size"], header_digest=report["header_digest"])
    return files


def _write_texts(
    staging: Path,
    text: CommitText,
    files: Mapping[str, ShardRecord],
    identity: ShardIdentity,
    references: tuple[Reference, ...],
) -> Manifest:
    manifest = Manifest(
        root_id=identity.root_id,
        attempt=identity.attempt,
        step=identity.step,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        topology=text.topology,
        model=text.model,
        files=files,
        trainer_state=FileRecord(len(text.trainer_state), xxhash.xxh3_128_hexdigest(text.trainer_state)),
        total_bytes=len(text.trainer_state) + sum(record.size for record in files.values()),
        versions=text.versions,
        references=references,
    )
    data = strict_json.dump_json(to_json(manifest))

    def write() -> None:
        _check_all_visible(staging, files)
        fs.write_file_durably(staging / layout.TRAINER_STATE, text.trainer_state)
        fs.write_file_durably(staging / layout.MANIFEST, data)
        fs.fsync_directory(staging)

    _retrying(write, path=staging, needed=len(data) + len(text.trainer_state))
    return manifest


def _check_all_visible(staging: Path, files: Mapping[str, ShardRecord]) -> None:
    """No manifest may name what is not there: this is the last to notice hosts that write to disks of their own."""
    absent = sorted(files.keys() - set(os.listdir(staging)))
    if absent:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise FileNotFoundError(errno.ENOENT, f"{absent[0]}{others}: written by its rank but not visible to rank 0")


def _move_into_place(root: Path, staging: Path, target: Path, *, step: int, attempt: int) -> None:
    aside: Path | None = None
    placed = False
    try:
        if os.path.lexists(target):
            aside = root / layout.aside_directory(step, attempt, os.listdir(root))
            fs.rename(target, aside)
            logger.warning("%s stood in the way of this save; it is now %s", target, aside.name)
        fs.rename(staging, target)
        placed = True
        fs.fsync_directory(root)
    except BaseException:
        if placed:
            _undo_rename(target, staging)
        if aside is not None:
            _undo_rename(aside, target)
        raise


def _undo_rename(now: Path, before: Path) -> None:
    try:
        if os.path.lexists(now) and not os.path.lexists(before):
            fs.rename(now, before)
    except OSError as error:
        logger.error("%s could not be renamed back to %s: %s", now, before, error)


def _remove_staging(staging: Path) -> None:
    try:
        if staging.exists():
            fs.remove_tree(staging)
    except OSError as error:
        logger.error(
            "%s: an unfinished save that could not be removed: %s; a later start will remove it", staging, error
        )


def _point_latest(root: Path, target: Path) -> None:
    try:
        fs.replace_file_durably(root / layout.LATEST, f"{target.name}\n".encode())
    except OSError as error:
        logger.warning(
            "%s not moved to %s (%s); it is a hint for people and nothing reads it",
            root / layout.LATEST,
            target.name,
            error,
        )
