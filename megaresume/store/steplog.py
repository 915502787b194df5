"""The step log and the event log: one JSON line each, appended by one rank, never rewritten.

The step log outlives the crash that the checkpoint did not see, and so is what a replay is compared with. Floats stand
in decimal for people and in hex for comparing. A torn last line is what a crash leaves and no error; whatever else
cannot be read is skipped and counted in the log. Knows no checkpoints and no branches: which lines matter is decided
in `lineage.py`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from megaresume.errors import CheckpointDamagedError
from megaresume.store import fs, strict_json
from megaresume.store.strict_json import JSON

logger = logging.getLogger("megaresume.store.steplog")

MAX_LINE_BYTES = 1 << 16
_FLOATS = ("loss", "grad_norm", "lr")
# Our own lines begin so; a log of a million steps is read for the few after one step, and JSON is slow to parse.
_BEGINNING = re.compile(rb'\{"attempt":[0-9]{1,18},"step":([0-9]{1,18}),')


@dataclass(frozen=True)
class StepLine:
    """One finished training step. `loss` is averaged over data parallel ranks; None where a value was not given."""

    attempt: int
    step: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    consumed_train_samples: int | None = None
    time: str | None = None


class StepLog:
    """Appends to `steps.jsonl`, on the one rank that has the loss. Opened at the first line; `close` it or drop it."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self._lines = _Lines(path)

    def append(
        self,
        *,
        step: int,
        loss: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
        consumed_train_samples: int | None = None,
    ) -> StepLine:
        """Append one step by one `write`, and return it as logged.

        A line that cannot be written is lost and said so, but never stops the training: the replay audit then has
        nothing to compare that step with.
        """
        loss, grad_norm, lr = (None if value is None else float(value) for value in (loss, grad_norm, lr))
        line = StepLine(self._attempt, step, loss, grad_norm, lr, consumed_train_samples, _now())
        fields: dict[str, JSON] = {"attempt": line.attempt, "step": line.step}
        for name in _FLOATS:
            value = getattr(line, name)
            if value is not None:
                # Strict JSON has no NaN: there the hex form alone says what it was.
                fields[name] = value if math.isfinite(value) else None
                fields[f"{name}_hex"] = value.hex()
        if consumed_train_samples is not None:
            fields["consumed_train_samples"] = consumed_train_samples
        self._lines.append({**fields, "time": line.time})
        return line

    def sync(self) -> None:
        """Make all lines so far durable; before every commit. Raises `OSError`."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


class EventLog:
    """Appends to `events.jsonl`: marks for people (started, saved, removed, verdicts). Nothing decides by them."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self._lines = _Lines(path)

    def append(self, event: str, **fields: JSON) -> None:
        """Append one event by one `write`. Loses the line, and says so, where it cannot be written."""
        self._lines.append({"attempt": self._attempt, "event": event, "time": _now(), **fields})

    def sync(self) -> None:
        """Make all events so far durable. Raises `OSError`."""
        self._lines.sync()

    def close(self) -> None:
        self._lines.close()


class _Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._torn = False  # the file does not end with a newline: the next line would grow onto a broken one

    def append(self, fields: JSON) -> None:
        data = strict_json.compact_json(fields).encode("utf-8") + b"\n"
        try:
            if self._descriptor is None:
                self._torn = _ends_torn(self._path)
                self._descriptor = fs.open_for_append(self._path)
            torn, self._torn = self._torn, True
            fs.write_all(self._descriptor, b"\n" + data if torn else data)
            self._torn = False
        except OSError as error:
            logger.error("%s: one line is lost: %s", self._path, error)

    def sync(self) -> None:
        if self._descriptor is not None:
            fs.fsync_file(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            fs.close(self._descriptor)
            self._descriptor = None


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def read_steps(path: Path, *, after_step: int = -1) -> list[StepLine]:
    """The lines for steps after `after_step`, in the order written; an empty list where there is no file.

    Unreadable lines are skipped, and counted in the log where they are more than a torn last one. Raises `OSError`
    where the file is there and cannot be read.
    """
    return [line for data in _read_lines(path, after_step) if (line := _step_line(data)) is not None]


def read_events(path: Path) -> list[dict[str, JSON]]:
    """All events, in the order written, as JSON objects. Skips and raises as `read_steps` does."""
    return list(_read_lines(path, None))


def _read_lines(path: Path, after_step: int | None) -> Iterator[dict[str, JSON]]:
    bad: list[int] = []
    for number, (data, whole) in enumerate(_split(path), start=1):
        beginning = _BEGINNING.match(data)
        if after_step is not None and beginning and int(beginning[1]) <= after_step:
            continue
        if not data.strip():
            continue
        try:
            value = strict_json.parse_json(data, source=f"{path} line {number}")
        except CheckpointDamagedError:
            value = None
        if not isinstance(value, dict):
            bad += [number] if whole else []  # only a torn last line is not whole
        elif after_step is None or (type(value.get("step")) is int and value["step"] > after_step):
            yield value
    if bad:
        logger.warning("%s: %d unreadable lines skipped, the first is line %d", path, len(bad), bad[0])


def _split(path: Path) -> Iterator[tuple[bytes, bool]]:
    """(line without its end, whether it has one); of a line over `MAX_LINE_BYTES` only so much, which is no JSON."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        while data := file.readline(MAX_LINE_BYTES):
            whole, rest = data.endswith(b"\n"), data
            while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
                whole = rest.endswith(b"\n")
            yield data.rstrip(b"\n"), whole


def _step_line(value: dict[str, JSON]) -> StepLine | None:
    attempt, step = value.get("attempt"), value.get("step")
    if type(attempt) is not int or type(step) is not int:
        return None
    consumed, time = value.get("consumed_train_samples"), value.get("time")
    loss, grad_norm, lr = (_float(value.get(f"{name}_hex")) for name in _FLOATS)
    return StepLine(
        attempt=attempt,
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        consumed_train_samples=consumed if type(consumed) is int else None,
        time=time if isinstance(time, str) else None,
    )


def _float(text: JSON) -> float | None:
    try:
        return float.fromhex(text) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None
