"""Attempts: one small file per start of a run, claimed so that two starts never get the same number.

`attempts/000007.json` says who started, from which checkpoint and when. Which checkpoints are then candidates is
decided in `lineage.py`; this file only claims and reads. Opening a root to look at it claims nothing. Knows nothing of
shards or tensors.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megaresume.errors import CheckpointDamagedError, FormatError, RootError
from megaresume.store import fs, layout, strict_json
from megaresume.store.manifest import parse_manifest
from megaresume.store.strict_json import JSON

logger = logging.getLogger("megaresume.store.attempts")

MAX_ATTEMPT_BYTES = 1 << 16
MAX_LOST_RACES = 1_000
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    `attempt` counts from 1. `start_step` is the step this start continues from (0: from nothing). `resumed_from` is
    the (attempt, step) of the checkpoint of this root whose state was loaded; None for a fresh start and for a
    checkpoint of another root. `started` is ISO 8601 in UTC. `changes` names what was changed on purpose (data, lr,
    topology, weights_only).
    """

    attempt: int
    start_step: int
    resumed_from: tuple[int, int] | None
    host: str
    pid: int
    job_id: str | None
    restart_count: int | None
    started: str
    root_id: str
    changes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, JSON]:
        plain = dataclasses.asdict(self)
        plain["resumed_from"] = None if self.resumed_from is None else list(self.resumed_from)
        plain["changes"] = list(self.changes)
        return plain

    @classmethod
    def from_json(cls, value: dict[str, JSON]) -> Attempt:
        """What `to_json` gave, as another rank was told it. ValueError names a field that is missing or wrong."""
        return _parse_attempt(value, _field(value, "attempt", int))

    def __str__(self) -> str:
        job = f", job {self.job_id}" if self.job_id is not None else ""
        return f"attempt {self.attempt} (host {self.host}, pid {self.pid}{job}, started {self.started})"


def claim_attempt(
    root: Path,
    *,
    start_step: int,
    resumed_from: tuple[int, int] | None,
    changes: Sequence[str] = (),
    job_id: str | None = None,
    restart_count: int | None = None,
    root_id: str | None = None,
) -> Attempt:
    """Claim the next free attempt number of `root` and make the record durable. Called on one rank only.

    The root's id is that of its earlier attempts; where there are none it is `root_id` (the id in the checkpoint this
    run resumed from) or a new one. Raises `RootError` where the file system gives no hard links (the claim is one
    `link`), plain `OSError` where writing fails, and as `read_attempts` does.
    """
    directory = root / layout.ATTEMPTS
    fs.make_directory(directory)
    temporary = fs.temporary_name(directory / "claim")
    try:
        for _ in range(MAX_LOST_RACES):
            # One look, for number and root id together: a first start that appears between two looks would give a
            # second one its number and a root id of its own.
            earlier = read_attempts(root)
            newest = earlier[-1].attempt if earlier else _newest_committed_attempt(root)
            attempt = Attempt(
                attempt=1 + max(newest, resumed_from[0] if resumed_from else 0),
                start_step=start_step,
                resumed_from=resumed_from,
                host=socket.gethostname(),
                pid=os.getpid(),
                job_id=job_id,
                restart_count=restart_count,
                started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                root_id=earlier[0].root_id if earlier else root_id or secrets.token_hex(16),
                changes=tuple(changes),
            )
            fs.write_file_durably(temporary, strict_json.dump_json(attempt.to_json()))
            if _claimed(temporary, directory / layout.attempt_file(attempt.attempt)):
                _unlink_quietly(temporary)
                fs.fsync_directory(directory)
                fs.fsync_directory(root)
                return attempt
            logger.info(
                "%s: attempt %d was claimed by another start at this moment; trying the next number",
                root,
                attempt.attempt,
            )
    except BaseException:
        _unlink_quietly(temporary)
        raise
    raise RootError(f"{directory}: lost {MAX_LOST_RACES} races for an attempt number; is something else writing there?")


def _claimed(temporary: Path, target: Path) -> bool:
    try:
        fs.link(temporary, target)
    except FileExistsError:
        # NFS may report a link that succeeded as "exists", where the first answer was lost and the call was sent again.
        return _same_file(temporary, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise RootError(
            f"{target}: an attempt is claimed by a hard link, which this file system does not give ({error.strerror}). "
            "Use a root on a file system that has them (ext4, XFS, NFS, Lustre, GPFS)."
        ) from error
    return True


def _same_file(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except FileNotFoundError:
        return False


def _unlink_quietly(path: Path) -> None:
    try:
        fs.unlink(path)
    except OSError as error:
        logger.warning("%s: could not be removed (%s); it is an unused temporary file", path, error)


def newest_attempt_number(root: Path) -> int:
    """The highest attempt number claimed in `root`, 0 where there is none. By name alone: one directory listing."""
    return max(_attempt_numbers(root), default=0)


def _newest_committed_attempt(root: Path) -> int:
    """The highest attempt that a checkpoint names: where the records were lost, no number may be given twice."""
    numbers = [0]
    for name in os.listdir(root):
        if layout.parse_step_directory(name) is not None or layout.parse_aside_directory(name) is not None:
            try:
                numbers.append(parse_manifest(root / name / layout.MANIFEST).attempt)
            except (CheckpointDamagedError, FormatError) as error:
                logger.info("%s: not asked for its attempt: %s", root / name, error)
    return max(numbers)


def read_attempts(root: Path) -> list[Attempt]:
    """All attempts of `root`, oldest first; an empty list where there are none. Names that are not ours are ignored.

    Raises `CheckpointDamagedError` for a record that cannot be read: without it nobody knows which branch the run is
    on.
    """
    directory = root / layout.ATTEMPTS
    return [_read_attempt(directory / layout.attempt_file(number), number) for number in sorted(_attempt_numbers(root))]


def _attempt_numbers(root: Path) -> list[int]:
    directory = root / layout.ATTEMPTS
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RootError(
            f"{directory}: expected a directory of attempt records, found that it cannot be listed ({error.strerror})."
        ) from error
    numbers = (layout.parse_attempt_file(name) for name in names)
    return [number for number in numbers if number]


def _read_attempt(path: Path, number: int) -> Attempt:
    try:
        return _parse_attempt(strict_json.read_json_strict(path, MAX_ATTEMPT_BYTES), number)
    except (CheckpointDamagedError, ValueError) as error:
        found = str(error).removeprefix(f"{path}: ").rstrip(".")
        raise CheckpointDamagedError(
            f"{path}: expected the record of attempt {number}, found: {found}. It says on which branch "
            "the run is. Restore it from a backup; or remove it, and the run goes on as if it had never started."
        ) from error


def _parse_attempt(value: JSON, number: int) -> Attempt:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} where an object was expected")
    if _field(value, "attempt", int) != number:
        raise ValueError(f"field attempt is {value['attempt']}, not the number in the file's name")
    changes = _field(value, "changes", list)
    if not all(isinstance(change, str) for change in changes):
        raise ValueError("field changes is not a list of strings")
    return Attempt(
        attempt=number,
        start_step=_field(value, "start_step", int),
        resumed_from=_parse_resumed_from(value),
        host=_field(value, "host", str),
        pid=_field(value, "pid", int),
        job_id=_field(value, "job_id", str, optional=True),
        restart_count=_field(value, "restart_count", int, optional=True),
        started=_field(value, "started", str),
        root_id=_field(value, "root_id", str),
        changes=tuple(changes),
    )


def _parse_resumed_from(value: dict[str, JSON]) -> tuple[int, int] | None:
    pair = _field(value, "resumed_from", list, optional=True)
    if pair is None:
        return None
    if len(pair) != 2 or not all(type(number) is int and number >= 0 for number in pair):
        raise ValueError(f"field resumed_from is {pair}, not null or [attempt, step]")
    return pair[0], pair[1]


def _field(value: dict[str, JSON], name: str, kind: type, *, optional: bool = False) -> Any:
    if name not in value:
        raise ValueError(f"field {name} is missing")
    found = value[name]
    if optional and found is None:
        return None
    if type(found) is not kind or (type(found) is int and found < 0):
        raise ValueError(
            f"field {name} is {str(found)[:80]!r}, not {'a whole number' if kind is int else 'a ' + kind.__name__}"
        )
    return found
