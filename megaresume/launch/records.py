"""What launches leave in a root: how often the run was started and how each start ended, for the next and for people.

    <root>/launches/4711.0/                one launch: a supervisor on each host, from its start to its end
        try-0001.json                      one start of torchrun, written before it: a host that dies of it is counted
        try-0001.status.json               how it ended, by the run itself
        try-0001.failed.json               a host that lost its part, so that the others need not wait for a timeout
        try-0001.end.json, end.json        how it ended, and how the launch ended, by the leading supervisor
        stop                               asks the launch to save and stop; its text says why
        requeue.json                       whether the job was queued again, and why not

The leading supervisor (node rank 0) writes, the others read. Decides nothing; knows neither torch nor Slurm.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megaresume.errors import CheckpointDamagedError, ConfigurationError
from megaresume.outcome import EXIT_CODES
from megaresume.store import strict_json

logger = logging.getLogger("megaresume.launch.records")

LAUNCHES = "launches"
STOP = "stop"
_END = "end.json"
_REQUEUE = "requeue.json"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TRY = re.compile(r"try-([0-9]{4,9})\.json")
_MAX_BYTES = 1 << 16

Commit = tuple[int, int]  # (attempt, step) of a checkpoint: another pair is another checkpoint, so there was progress


@dataclass(frozen=True)
class Try:
    """One start of torchrun. `job` is the same for all launches of one job; `commit` the newest checkpoint then.

    `started` is Unix seconds by the leading host's clock; the rendezvous is where this try's ranks meet.
    """

    number: int
    job: str
    started: float
    commit: Commit | None
    master_addr: str
    master_port: int
    nnodes: int
    host: str
    earlier: int
    """How many tries of this job were recorded in this root before."""


@dataclass(frozen=True)
class End:
    """How a try or a launch ended; `time` is Unix seconds."""

    outcome: str
    reason: str
    time: float


@dataclass(frozen=True)
class PastTry:
    """A try of the past: `end` is None where it ended without a word, or goes on."""

    run_id: str
    record: Try
    end: End | None


@dataclass(frozen=True)
class Launch:
    """The directory of one launch."""

    root: Path
    run_id: str

    @property
    def directory(self) -> Path:
        return self.root / LAUNCHES / self.run_id

    @property
    def stop_file(self) -> Path:
        return self.directory / STOP

    def status_file(self, number: int) -> Path:
        return self.directory / f"try-{number:04d}.status.json"

    # --- the leader writes -------------------------------------------------------------------------------------------

    def write_try(self, record: Try) -> None:
        strict_json.write_json_durably(self.directory / f"try-{record.number:04d}.json", asdict(record))

    def write_try_end(self, number: int, end: End) -> None:
        strict_json.write_json_durably(self.directory / f"try-{number:04d}.end.json", asdict(end))

    def write_end(self, end: End) -> None:
        strict_json.write_json_durably(self.directory / _END, asdict(end))

    def write_failed(self, number: int, host: str, reason: str) -> None:
        """By any supervisor whose part of a try is lost; of several the last one stays."""
        strict_json.write_json_durably(
            self.directory / f"try-{number:04d}.failed.json", {"host": host, "reason": reason}
        )

    def write_requeue(self, *, requeued: bool, why: str, time: float) -> None:
        strict_json.write_json_durably(self.directory / _REQUEUE, {"requeued": requeued, "why": why, "time": time})

    # --- anyone reads ------------------------------------------------------------------------------------------------

    def tries(self) -> list[Try]:
        """All tries of this launch, in order. What cannot be read is said in the log and left out."""
        names = _list(self.directory)
        numbers = sorted(int(match[1]) for match in map(_TRY.fullmatch, names) if match)
        return [record for number in numbers if (record := self.read_try(number)) is not None]

    def read_try(self, number: int) -> Try | None:
        value = _read(self.directory / f"try-{number:04d}.json")
        return None if value is None else _parse_try(value, self.directory / f"try-{number:04d}.json")

    def read_try_end(self, number: int) -> End | None:
        return _read_end(self.directory / f"try-{number:04d}.end.json")

    def read_end(self) -> End | None:
        return _read_end(self.directory / _END)

    def read_failed(self, number: int) -> str | None:
        """Which host has lost its part of a try, and why; None where all goes well."""
        value = _read(self.directory / f"try-{number:04d}.failed.json")
        return None if value is None else f"host {value.get('host')}: {value.get('reason')}"

    def read_requeue(self) -> dict[str, Any] | None:
        return _read(self.directory / _REQUEUE)


def open_launch(root: Path, run_id: str) -> Launch:
    """The launch of this id. ConfigurationError where the id cannot be a file's name."""
    if not _RUN_ID.fullmatch(run_id):
        raise ConfigurationError(f"--run-id {run_id!r}: expected letters, digits, '.', '_' and '-', at most 100")
    return Launch(root, run_id)


def launch_names(root: Path) -> set[str]:
    """The ids of all launches of `root`: one directory listing."""
    return {name for name in _list(root / LAUNCHES) if _RUN_ID.fullmatch(name)}


def past_tries(root: Path) -> list[PastTry]:
    """All recorded tries of all launches of `root`, oldest first."""
    launches = [Launch(root, name) for name in sorted(launch_names(root))]
    tries = [
        PastTry(launch.run_id, record, launch.read_try_end(record.number))
        for launch in launches
        for record in launch.tries()
    ]
    return sorted(tries, key=lambda each: (each.record.started, each.record.number))


def _list(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = strict_json.read_json_strict(path, _MAX_BYTES)
        if not isinstance(value, dict):
            raise CheckpointDamagedError(f"{path}: a {type(value).__name__} where an object was expected")
    except CheckpointDamagedError as error:
        logger.warning("a launch's record is ignored: %s", error)
        return None
    return value


def _read_end(path: Path) -> End | None:
    value = _read(path)
    if value is None:
        return None
    outcome, reason, time = value.get("outcome"), value.get("reason"), value.get("time")
    if outcome not in EXIT_CODES or not isinstance(reason, str) or not isinstance(time, (int, float)):
        logger.warning("%s: not an end of a try, ignored", path)
        return None
    return End(outcome, reason, float(time))


def _parse_try(value: dict[str, Any], path: Path) -> Try | None:
    try:
        commit = value["commit"]
        return Try(
            number=int(value["number"]),
            job=str(value["job"]),
            started=float(value["started"]),
            commit=None if commit is None else (int(commit[0]), int(commit[1])),
            master_addr=str(value["master_addr"]),
            master_port=int(value["master_port"]),
            nnodes=int(value["nnodes"]),
            host=str(value["host"]),
            earlier=int(value["earlier"]),
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s: not the record of a try, ignored: %r", path, error)
        return None
