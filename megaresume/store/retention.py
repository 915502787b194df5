"""What is removed from a root: checkpoints beyond the last N of the branch, and what cut-off saves left behind.

On rank 0 only, after a commit or a claim, never before. The newest checkpoint whose files are all there is never
removed, nor the newest one of a healthy state, nor anything megaresume did not write, nor what lies off the branch:
somebody may mean to return there. A removal never fails a save: what cannot be removed is said in the log and tried
again the next time.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from megaresume.errors import CheckpointDamagedError, ConfigurationError
from megaresume.store import fs, layout
from megaresume.store.attempts import newest_attempt_number
from megaresume.store.discovery import Candidate, check_files, find_candidates
from megaresume.store.recycle import beyond_one, retire
from megaresume.store.references import referred_to

logger = logging.getLogger("megaresume.store.retention")


def prune(
    root: Path,
    *,
    keep_last: int,
    attempt: int,
    recycle: bool = False,
    unhealthy: Callable[[Path], str | None] = lambda path: None,
) -> list[Path]:
    """Remove the branch's checkpoints beyond the newest `keep_last`; return the paths they had. With `recycle` the
    files of the one removed last stay out of sight, for the next save to write over.

    `unhealthy` tells of a checkpoint's directory why a run should not go back to it, or None. Where that is so of all
    that would stay, the newest one of which it is not stays too.

    Removes nothing where an attempt newer than `attempt` exists, for then this process is an orphan. Raises
    `ConfigurationError` for a `keep_last` below 1, else only what listing the root raises.
    """
    if keep_last < 1:
        raise ConfigurationError(
            f"keep_last: expected at least 1, found {keep_last}; leave it out to keep all checkpoints."
        )
    newest_attempt = newest_attempt_number(root)
    if newest_attempt > attempt:
        logger.warning("%s: nothing removed: attempt %d is newer than this attempt %d", root, newest_attempt, attempt)
        return []
    candidates, passed = find_candidates(root)
    beyond = _beyond(candidates, keep_last)
    if beyond and all(unhealthy(each.path) for each in candidates if each not in beyond):
        healthy = next((each for each in beyond if not unhealthy(each.path)), None)
        if healthy is not None:
            logger.warning("%s: %s kept: all newer checkpoints are of an unhealthy state", root, healthy.path.name)
            beyond = [each for each in beyond if each is not healthy]
    staying = [each.manifest for each in candidates if each not in beyond]
    needed = referred_to([*staying, *(each.manifest for each in passed if each.manifest is not None)])
    held = [each for each in beyond if (each.step, each.attempt) in needed]
    if held:
        names = ", ".join(each.path.name for each in held)
        logger.info(
            "%s: %s kept beyond the last %d: later checkpoints refer to weights in them", root, names, keep_last
        )
    removed = [each.path for each in reversed(beyond) if each not in held and _remove_checkpoint(each, recycle)]
    if recycle:
        for path in beyond_one(root):
            _remove_tree(path)
    if removed:
        logger.info("%s: removed %s; keeping the last %d", root, ", ".join(path.name for path in removed), keep_last)
    return removed


def remove_leftovers(root: Path, *, attempt: int) -> list[Path]:
    """Remove what saves of older attempts and removals left behind when they were cut off; return the paths.

    An orphan that is still writing there fails, as it should. Raises only what listing the root raises.
    """
    leftovers = [root / name for name in sorted(os.listdir(root)) if _is_leftover(name, attempt)]
    return [path for path in leftovers if _remove_tree(path)]


def _beyond(candidates: Sequence[Candidate], keep_last: int) -> list[Candidate]:
    """What may go of `candidates` (newest first): nothing where not one of them has all its files."""
    for candidate in candidates:
        try:
            check_files(candidate)
        except CheckpointDamagedError as error:
            logger.warning("not counted as a checkpoint to go back to: %s", error)
        else:
            return [other for other in candidates[keep_last:] if other is not candidate]
    return []


def _remove_checkpoint(candidate: Candidate, recycle: bool) -> bool:
    path = candidate.path
    trash = path.with_name(f"{layout.TRASH_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        foreign = set(os.listdir(path)) - candidate.manifest.files.keys() - {layout.MANIFEST, layout.TRAINER_STATE}
        if foreign:
            logger.warning(
                "%s is kept: it holds %s, which megaresume did not write", path, ", ".join(sorted(foreign)[:5])
            )
            return False
        # Out of sight first, for good: a kill in the middle of the removal must not leave half a checkpoint under its
        # name.
        fs.rename(path, trash)
        fs.fsync_directory(path.parent)
        if recycle:
            retire(trash)
            return True
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
        return False
    _remove_tree(trash)
    return True


def _is_leftover(name: str, attempt: int) -> bool:
    staging = layout.parse_staging_directory(name)
    if staging is not None:
        return staging[1] < attempt
    if not name.startswith(layout.TRASH_PREFIX):
        return False
    was = name.removeprefix(layout.TRASH_PREFIX).rpartition("-")[0]
    return layout.parse_step_directory(was) is not None or layout.parse_aside_directory(was) is not None


def _remove_tree(path: Path) -> bool:
    try:
        fs.remove_tree(path)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)
        return False
    return True
