"""How a run ended, in one word with an exit code, and the file that carries it from the ranks to whoever started them.

Exit codes get lost on the way (torchrun gives 1 after a clean stop, a shell can lose the code of `wait`), so the file
is what counts. Knows no torch, no Slurm, and not what anyone does about it.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from megaresume.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ConfigurationError,
    DataMismatchError,
    FormatError,
    PoisonedError,
    RootError,
    StateMismatchError,
    SupersededError,
    TopologyMismatchError,
    UnsupportedError,
)
from megaresume.store import fs, strict_json

logger = logging.getLogger("megaresume.outcome")

FINISHED = "finished"  # the training came to its end
STOPPED = "stopped"  # asked to stop, saved; start it again
CRASHED = "crashed"  # anything nobody foresaw; starting again may help
REFUSED = "refused"  # configuration, layout, data: starting again gives the same answer
DAMAGED = "damaged"  # nothing on disk that could be gone on from

# The numbers are those of sysexits.h that come nearest: EX_TEMPFAIL, EX_SOFTWARE, EX_CONFIG, EX_DATAERR.
EXIT_CODES = {FINISHED: 0, STOPPED: 75, CRASHED: 70, REFUSED: 78, DAMAGED: 65}

_REFUSALS = (
    ConfigurationError,
    UnsupportedError,
    RootError,
    CheckpointNotFoundError,
    TopologyMismatchError,
    StateMismatchError,
    DataMismatchError,
    SupersededError,
)
_MAX_BYTES = 1 << 16
_MAX_REASON = 4000


@dataclass(frozen=True)
class Status:
    """`outcome` is one of the words above, `step` the last finished one, `time` in Unix seconds, `rank` the writer."""

    outcome: str
    reason: str
    step: int | None = None
    rank: int = 0
    time: float = 0.0


def outcome_of(error: BaseException, *, had_committed: bool = False) -> str:
    """The word for a run that ends with this error.

    `had_committed`: its root had checkpoints and the user named none of them, so that finding none means that they
    cannot be read.
    """
    if isinstance(error, CheckpointNotFoundError) and had_committed:
        return DAMAGED
    if isinstance(error, _REFUSALS):
        return REFUSED
    return DAMAGED if isinstance(error, (CheckpointDamagedError, FormatError, PoisonedError)) else CRASHED


def write_status(path: Path, outcome: str, reason: str, *, step: int | None, rank: int = 0) -> None:
    """Put the status at `path`. Raises nothing: what cannot be written is said in the log.

    The first failure stays, for those of other ranks follow from it; "finished" and "stopped" are known only when all
    is saved, and win.
    """
    good = outcome in (FINISHED, STOPPED)
    if not good and os.path.lexists(path):
        return
    status = Status(outcome, reason[:_MAX_REASON], step, rank, time.time())
    data = strict_json.dump_json(asdict(status))
    try:
        if good:
            fs.replace_file_durably(path, data)
        else:
            _write_first(path, data)
    except OSError as error:
        logger.error("%s: the outcome %r could not be written: %s", path, outcome, error)


def _write_first(path: Path, data: bytes) -> None:
    temporary = fs.temporary_name(path)
    try:
        fs.write_file_durably(temporary, data)
        fs.link(temporary, path)
    except FileExistsError:
        pass  # another rank failed first: its reason is the cause, ours the consequence
    finally:
        fs.unlink(temporary)


def read_status(path: Path) -> Status | None:
    """What `write_status` put there; None where there is nothing, or nothing that can be read (said in the log)."""
    if not path.exists():
        return None
    try:
        value = strict_json.read_json_strict(path, _MAX_BYTES)
        outcome, reason = value["outcome"], value["reason"]
        if outcome not in EXIT_CODES or not isinstance(reason, str):
            raise ValueError(f"outcome {outcome!r} is none of {', '.join(EXIT_CODES)}")
        step = value.get("step")
        return Status(outcome, reason, step if type(step) is int else None, int(value["rank"]), float(value["time"]))
    except (CheckpointDamagedError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s: not the status of a run, ignored: %s", path, error)
        return None
