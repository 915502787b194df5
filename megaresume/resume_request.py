"""What `resume_from` asks for, and which checkpoint that is. Decisions over values; the scan of the root is the store's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from megaresume.errors import CheckpointNotFoundError, ConfigurationError
from megaresume.store import layout
from megaresume.store.attempts import Attempt, read_attempts
from megaresume.store.discovery import Candidate, Passed, find_candidates, open_checkpoint


@dataclass(frozen=True)
class Request:
    """`kind` is "auto" (newest, or a fresh start), "latest" (newest, must exist), "step" (of this root) or "directory"."""

    kind: str
    step: int | None = None
    directory: Path | None = None

    def __str__(self) -> str:
        return (
            f"step {self.step}"
            if self.kind == "step"
            else str(self.directory)
            if self.kind == "directory"
            else self.kind
        )


def parse_request(value: int | str | PathLike[str] | None) -> Request:
    """Read `resume_from`:

    ================================  ====================================================================
    None, "auto"                      newest checkpoint of this branch, a fresh start where none was committed
    "latest"                          the same, but there must be one
    an int, a string of digits        that step of this root
    a path to a directory             that checkpoint; the root's own newest wins once there is one
    ================================  ====================================================================

    Raises ConfigurationError for anything else: "", "true", "none" and other words never mean a path by accident.
    """
    if value is None:
        return Request("auto")
    if isinstance(value, bool) or not isinstance(value, (int, str, PathLike)):
        raise ConfigurationError(f"resume_from must be None, a step, a directory or 'latest', found {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigurationError(f"resume_from: a step is at least 0, found {value}")
        return Request("step", step=value)
    text = fspath(value)
    if isinstance(value, str):
        if text in ("auto", "latest"):
            return Request(text)
        if text.isascii() and text.isdigit():
            return Request("step", step=int(text))
        if "://" in text:
            raise ConfigurationError(
                f"resume_from: {text!r} is a URI; checkpoints are read from local or mounted directories"
            )
        if text.lower() in ("", "true", "false", "none", "null", "yes", "no", "0", "1", "on", "off"):
            raise ConfigurationError(
                f"resume_from: {text!r} is neither a step, nor a directory, nor 'latest'; for 'newest or fresh' give None"
            )
    return Request("directory", directory=Path(text))


@dataclass(frozen=True)
class Choice:
    """Checkpoint directories to try in this order, (name, reason) of what was passed over, and whether no other may be taken."""

    paths: list[str]
    passed: list[list[str]]
    explicit: bool
    note: str | None = None


def _choice(
    candidates: Sequence[Candidate], passed: Sequence[Passed], *, explicit: bool, note: str | None = None
) -> Choice:
    return Choice(
        [str(each.path) for each in candidates], [[each.path.name, each.reason] for each in passed], explicit, note
    )


def choose(root: Path, request: Request, *, restarted_job: str | None, start_fresh: bool) -> Choice:
    """Which checkpoints to try. Reads the root; changes nothing. Called on rank 0.

    `restarted_job` is the id of this job where a scheduler started it again with the arguments of its first start: a request to go back
    to a step, once followed, is then not followed again, or every restart would lose what the run did since.

    Raises CheckpointNotFoundError where the request names nothing, or where a run that had committed has nothing readable left.
    """
    candidates, passed = find_candidates(root)
    if (
        request.kind == "directory"
        and request.directory is not None
        and request.directory.resolve().parent == root.resolve()
    ):
        own_step = layout.parse_step_directory(request.directory.name)
        request = request if own_step is None else Request("step", step=own_step)
    if request.kind == "step":
        return _choose_step(root, request, candidates, passed, restarted_job)
    if request.kind == "directory" and request.directory is not None:
        if candidates:
            note = f"resume_from {request.directory} is passed over: {root} has checkpoints of its own, the newest is step {candidates[0].step}"
            return _choice(candidates, passed, explicit=False, note=note)
        return _choice([open_checkpoint(request.directory)], passed, explicit=True)
    if candidates or start_fresh:
        return _choice(candidates, passed, explicit=False)
    committed = [each for each in passed if layout.parse_staging_directory(each.path.name) is None]
    resumed = [attempt for attempt in read_attempts(root) if attempt.start_step > 0]
    if committed or resumed or (root / layout.LATEST).exists() or request.kind == "latest":
        reasons = (
            "".join(f"\n  {each.path.name}: {each.reason}" for each in passed) or "\n  (no step directory is left)"
        )
        raise CheckpointNotFoundError(
            f"{root}: no checkpoint can be resumed from, though {'one was asked for' if request.kind == 'latest' else 'this run had committed some'}. "
            f"Starting from step 0 here would bury them.{reasons}\nRepair or restore one of them, use another root, or start from "
            "step 0 on purpose with start_fresh=True."
        )
    return _choice([], passed, explicit=False)


def _choose_step(
    root: Path, request: Request, candidates: Sequence[Candidate], passed: Sequence[Passed], restarted_job: str | None
) -> Choice:
    attempts = read_attempts(root)
    if candidates and _went_back(attempts, request.step, restarted_job):
        note = f"resume_from step {request.step} was followed by an earlier start of this job; this restart follows the branch it began"
        return _choice(candidates, passed, explicit=False, note=note)
    for candidate in candidates:
        if candidate.step == request.step:
            return _choice([candidate], passed, explicit=True)
    directory = root / layout.step_directory(request.step or 0)
    if (directory / layout.MANIFEST).exists():
        return _choice([open_checkpoint(directory)], passed, explicit=True)
    steps = ", ".join(str(candidate.step) for candidate in candidates) or "none"
    raise CheckpointNotFoundError(
        f"{root} has no checkpoint of step {request.step}; steps that can be resumed from: {steps}"
    )


def _went_back(attempts: Sequence[Attempt], step: int | None, job: str | None) -> bool:
    return job is not None and any(attempt.job_id == job and attempt.start_step == step for attempt in attempts)
