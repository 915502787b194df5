"""Is the root one directory, writable, and the same on all hosts? Asked once, before anything else touches it.

Rank 0 writes a file with a random name and every rank looks for it: two hosts that each have a `/checkpoints` of their
own, or ranks that worked out different paths, are found here and not when half of the shards are missing. Knows no
checkpoints.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from pathlib import Path

from megaresume.errors import ConfigurationError, RootError
from megaresume.store import fs
from megaresume.store.control import ControlPlane

logger = logging.getLogger("megaresume.store.rootcheck")

RETRY_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # a network file system may show a new file late


def check_root(root: Path, *, control: ControlPlane) -> None:
    """Make sure that `root` is one writable directory for all ranks; it is made where it is absent. Collective.

    Raises, on all ranks, `ConfigurationError` for a URL, and `RootError` for a root that is a file, not writable, or
    not shared.
    """
    what = "check the root"
    nonce = f".megaresume-{secrets.token_hex(8)}.nonce"
    told = control.decide(what, lambda: _write_nonce(root, nonce))
    try:
        control.together(what, lambda: _find_nonce(root, told["nonce"], f"{told['root']} on host {told['host']}"))
    finally:
        if control.rank == 0:
            _remove_nonce(root / nonce)


def _write_nonce(root: Path, nonce: str) -> dict[str, str]:
    if "://" in str(root) or str(root).startswith(("s3:/", "gs:/", "hf:/", "http:/", "https:/", "file:/")):
        raise ConfigurationError(f"{root}: a root is a directory of a file system that all hosts mount, not a URL.")
    if os.path.lexists(root) and not root.is_dir():
        raise RootError(
            f"{root}: expected a directory, or nothing yet, found a file. Name another root, or move it out of the way."
        )
    try:
        if not root.is_dir():
            fs.make_directory(root)
            fs.fsync_directory(root.parent)
        fs.write_file_durably(root / nonce, nonce.encode("ascii"))
    except OSError as error:
        raise RootError(
            f"{root}: cannot be written on host {socket.gethostname()}: {error.strerror} ({error.filename or root}). "
            "Give the job's user write permission, free some space, or name another root."
        ) from error
    return {"nonce": nonce, "host": socket.gethostname(), "root": str(root)}


def _find_nonce(root: Path, nonce: str, written: str) -> None:
    path, here = root / nonce, socket.gethostname()
    for pause in (*RETRY_PAUSES_S, None):
        try:
            if path.read_bytes() == nonce.encode("ascii"):
                break
            found = "found another content"
        except OSError as error:
            found = error.strerror or str(error)
        if pause is None:
            raise RootError(
                f"{root}: this root is not shared by all hosts: {nonce}, written by rank 0 in {written}, cannot be "
                f"read on host {here}: {found}. Give every rank the same path, on a file system that all hosts mount."
            )
        time.sleep(pause)
    if not os.access(root, os.W_OK | os.X_OK):
        raise RootError(
            f"{root}: cannot be written on host {here}. Give the job's user write permission, or name another root."
        )


def _remove_nonce(path: Path) -> None:
    try:
        fs.unlink(path)
    except OSError as error:
        logger.warning("%s could not be removed (%s); it may be deleted by hand", path, error)
