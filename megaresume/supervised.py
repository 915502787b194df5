"""What the process that started this one asked of it, by environment variables, and the signs of life it gets back.

`megaresume run` sets them for the ranks; without them nothing is looked at and nothing is written. Knows no torch, and
not who the supervisor is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megaresume import outcome

logger = logging.getLogger("megaresume.supervised")

# A file on this host, and one that all hosts see: when one is there, the run is to save and stop. Its text says why.
STOP_FILE = "MEGARESUME_STOP_FILE"
SHARED_STOP_FILE = "MEGARESUME_SHARED_STOP_FILE"
STATUS_FILE = "MEGARESUME_STATUS_FILE"  # where the run says how it ended
HEARTBEAT_FILE = "MEGARESUME_HEARTBEAT_FILE"  # on this host, rewritten while the run makes progress
# Which start of the same job this is: from 0 within one supervisor, and how many were recorded in this root before.
RESTARTS_IN_PLACE = "MEGARESUME_RESTARTS_IN_PLACE"
EARLIER_TRIES = "MEGARESUME_EARLIER_TRIES"
RUN_ID = "MEGARESUME_RUN_ID"

_BEAT_EVERY_S = 1.0


@dataclass(frozen=True)
class Supervised:
    """What this rank is to do for its supervisor; None is "nothing"."""

    stop_files: tuple[Path, ...] = ()
    status_file: Path | None = None
    heartbeat_file: Path | None = None
    rank: int = 0

    def report(self, word: str, reason: str, *, step: int | None) -> None:
        """Say how the run ended: "finished" and "stopped" by rank 0 for all, a failure by whoever meets it first."""
        if self.status_file is None or (word in (outcome.FINISHED, outcome.STOPPED) and self.rank != 0):
            return
        outcome.write_status(self.status_file, word, reason, step=step, rank=self.rank)


def read_supervised(environment: Mapping[str, str] = os.environ) -> Supervised:
    """What the environment asks of this process.

    One rank per host looks at that host's file, one of all at the shared one: the ranks agree by the status word, and a
    thousand of them asking a file server for the same file helps nobody.
    """
    rank, local_rank = _number(environment, "RANK"), _number(environment, "LOCAL_RANK")
    own, shared = _path(environment, STOP_FILE), _path(environment, SHARED_STOP_FILE)
    files = [path for path, looks in ((own, local_rank == 0), (shared, rank == 0)) if path is not None and looks]
    return Supervised(
        stop_files=tuple(files),
        status_file=_path(environment, STATUS_FILE),
        heartbeat_file=_path(environment, HEARTBEAT_FILE) if local_rank == 0 else None,
        rank=rank,
    )


class Heartbeat:
    """Rewrites the heartbeat file at most once a second.

    Every step of a rank waits for all others, so that one beating rank per host says that all of the world goes on.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next = 0.0

    def beat(self, what: str) -> None:
        """Say what was just done ("step 120"). Never raises: a beat that is lost is followed by others."""
        now = time.monotonic()
        if self._path is None or now < self._next:
            return
        self._next = now + _BEAT_EVERY_S
        try:
            self._path.write_text(f"{what} at {time.time():.0f}\n", "utf-8")
        except OSError as error:
            logger.warning("%s: no heartbeat: %s", self._path, error)


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    value = environment.get(name)
    return Path(value) if value else None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    return int(text) if text.isascii() and text.isdigit() else 0
