"""Files of removed checkpoints, overwritten by the next save instead of new ones being made: on a local disk, writing
into pages that are in memory already is several times faster.

The danger is an old checkpoint that looks whole over new bytes. So a file is taken only from a directory whose manifest
is durably gone, only where it has no second name and nobody has it open (a reader, an upload), and its header is zeroed
and fsynced before anything else is written. Not for network file systems: there nobody can tell who reads. Knows
nothing of what is in the files.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from megaresume.store import fs, layout

logger = logging.getLogger("megaresume.store.recycle")

_HEAD_BYTES = 4096


def retire(trash: Path) -> None:
    """Make a removed checkpoint's files, in `trash`, fit to be taken; called on rank 0 when the directory's new name is
    durable. Raises `OSError`."""
    fs.unlink(trash / layout.MANIFEST)
    fs.fsync_directory(trash)


def retired(root: Path) -> list[Path]:
    """The directories from which files may be taken."""
    trash = [root / name for name in sorted(os.listdir(root)) if name.startswith(layout.TRASH_PREFIX)]
    return [path for path in trash if not os.path.lexists(path / layout.MANIFEST)]


def take(root: Path, name: str, target: Path) -> bool:
    """Move a retired file `name` to `target`, its header erased; False where there is none to take, which is said.

    Each rank takes files of its own name, so that no two reach for one.
    """
    directories = retired(root)
    for directory in directories:
        try:
            if _erase_head(directory / name):
                fs.rename(directory / name, target)
                return True
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s is not written over: %s", directory / name, error)
    if directories:
        logger.info("%s: a new file, for no removed one of this name can be written over", target)
    return False


def _erase_head(path: Path) -> bool:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        logger.info("%s is not written over: it is no plain file, or has another name besides", path)
        return False
    with fs.open_for_overwriting(path) as descriptor:
        if not fs.is_open_here_only(descriptor):
            logger.info("%s is not written over: somebody has it open, or the file system cannot tell", path)
            return False
        fs.write_all_at(descriptor, bytes(min(_HEAD_BYTES, status.st_size)), 0)
        fs.fsync_file(descriptor)
    return True


def beyond_one(root: Path) -> Sequence[Path]:
    """Retired directories but the newest, which is the one that the next save takes from."""
    return sorted(retired(root), key=lambda path: os.stat(path).st_mtime_ns)[:-1]
