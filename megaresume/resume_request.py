"""What `resume_from` asks for, and which checkpoint that is. Decides; the scan of the root is the store's."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from megaresume.errors import CheckpointNotFoundError, ConfigurationError
from megaresume.job import Job
from megaresume.progress import why_unhealthy
from megaresume.store import layout
from megaresume.store.attempts import Attempt, read_attempts
from megaresume.store.discovery import Candidate, Passed, find_candidates, open_checkpoint

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ON_PURPOSE = "To start again here on purpose: start_fresh=True."


@dataclass(frozen=True)
class Request:
    """`kind` is "auto" (newest or a fresh start), "latest" (newest, must exist), "last_healthy" (the newest of them
    whose loss was finite), "step" (of this root), "directory"."""

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


def is_uri(path: str | PathLike[str]) -> bool:
    """Whether `path` names something by a scheme (s3://, file://, ...); pathlib makes one slash of the two."""
    return _URI.match(fspath(path)) is not None


def parse_request(value: int | str | PathLike[str] | None) -> Request:
    """Read `resume_from`:

    ================================  ====================================================================
    None, "auto"                      newest checkpoint of this branch, a fresh start where none was committed
    "latest"                          the same, but there must be one
    "last_healthy"                    the newest one at which loss and gradient norm were finite
    an int, a string of digits        that step of this root
    a path to a directory             that checkpoint; the root's own newest wins once there is one
    ================================  ====================================================================

    Raises ConfigurationError for anything else: "", "true", "none" and other words never mean a path by accident.
    """
    if value is None:
        return Request("auto")
    if isinstance(value, bool) or not isinstance(value, (int, str, PathLike)):
        raise ConfigurationError(
            f"resume_from must be None, a step, a directory, 'latest' or 'last_healthy', found {value!r}"
        )
    if isinstance(value, int):
        if value < 0:
            raise ConfigurationError(f"resume_from: a step is at least 0, found {value}")
        return Request("step", step=value)
    text = fspath(value)
    if is_uri(text):
        raise ConfigurationError(
            f"resume_from: {text!r} is a URI; checkpoints are read from local or mounted directories"
        )
    if isinstance(value, str):
        if text in ("auto", "latest", "last_healthy"):
            return Request(text)
        if text.isascii() and text.isdigit():
            return Request("step", step=int(text))
        if text.lower() in ("", "true", "false", "none", "null", "yes", "no", "0", "1", "on", "off"):
            raise ConfigurationError(
                f"resume_from: {text!r} is neither a step, nor a directory, nor 'latest'; "
                "for 'newest or fresh' give None"
            )
    return Request("directory", directory=Path(text))


@dataclass(frozen=True)
class Choice:
    """Checkpoint directories to try in this order, and (name, reason, step) of what was passed over, newest first.

    explicit: no other may be taken. followed: where an earlier start has followed the request already and the run goes
    on from there, this says so; a mode that came with the request (weights only, ...) has then been served too.
    """

    paths: list[str]
    passed: list[tuple[str, str, int]]
    explicit: bool
    followed: str | None = None

    def passed_since(self, step: int) -> tuple[tuple[str, str], ...]:
        """(name, reason) of what was passed over of `step` or newer."""
        return tuple((name, reason) for name, reason, of_step in self.passed if of_step >= step)


def _choice(
    candidates: Sequence[Candidate], passed: Sequence[Passed], *, explicit: bool, followed: str | None = None
) -> Choice:
    named = [(each.path.name, each.reason, each.step) for each in passed]
    return Choice([str(each.path) for each in candidates], named, explicit, followed)


def choose(root: Path, request: Request, *, job: Job, start_fresh: bool) -> Choice:
    """Which checkpoints to try. Reads the root; changes nothing. Called on rank 0.

    A `job` that was started again has the arguments of its first start: a request to go back to a step, once followed,
    is then not followed again, or every restart would lose what the run did since.

    Raises CheckpointNotFoundError where the request names nothing; where a run that had committed has nothing readable
    left; and where the scheduler restarted this job but no earlier start of it was here, for it would begin at step 0
    in the wrong directory. The last two are allowed by `start_fresh`.
    """
    candidates, passed = find_candidates(root)
    if request.kind == "step" or _is_own(request.directory, root):
        return _choose_own(root, request, candidates, passed, job)
    if request.kind == "last_healthy":
        reasons = {each.path: why_unhealthy(each.path) for each in candidates}
        unhealthy = [Passed(each.path, each.step, reason) for each in candidates if (reason := reasons[each.path])]
        candidates = [each for each in candidates if reasons[each.path] is None]
        passed = sorted([*passed, *unhealthy], key=lambda one: one.step, reverse=True)
    if candidates:
        followed = None
        if request.directory is not None:
            followed = (
                f"resume_from {request.directory} is passed over: {root} has checkpoints of its own, "
                f"the newest is step {candidates[0].step}"
            )
        return _choice(candidates, passed, explicit=False, followed=followed)
    if not start_fresh:
        _check_fresh_start(root, request, passed, job)
    if request.directory is not None:
        return _choice([open_checkpoint(request.directory)], passed, explicit=True)
    return _choice([], passed, explicit=False)


def _is_own(directory: Path | None, root: Path) -> bool:
    return directory is not None and directory.resolve().parent == root.resolve()


def _choose_own(
    root: Path, request: Request, candidates: Sequence[Candidate], passed: Sequence[Passed], job: Job
) -> Choice:
    """A checkpoint of this root that was asked for by its step or its path, whatever branch it is on."""
    if candidates and job.restart_count and _went_back(read_attempts(root), _step_of(request), job.job_id):
        followed = (
            f"resume_from {request} was followed by an earlier start of this job; "
            "this restart goes on with the branch it began"
        )
        return _choice(candidates, passed, explicit=False, followed=followed)
    target = _find_own(root, request, candidates)
    reason = "newer than what was asked for"
    newer = [Passed(each.path, each.step, reason) for each in candidates if each.step > target.step]
    return _choice([target], [*newer, *passed], explicit=True)


def _step_of(request: Request) -> int | None:
    if request.directory is None:
        return request.step
    aside = layout.parse_aside_directory(request.directory.name)
    return layout.parse_step_directory(request.directory.name) if aside is None else aside[0]


def _find_own(root: Path, request: Request, candidates: Sequence[Candidate]) -> Candidate:
    if request.directory is not None:
        return open_checkpoint(request.directory)
    for candidate in candidates:
        if candidate.step == request.step:
            return candidate
    directory = root / layout.step_directory(request.step or 0)
    if os.path.lexists(directory):
        return open_checkpoint(directory)
    steps = ", ".join(str(candidate.step) for candidate in candidates) or "none"
    raise CheckpointNotFoundError(
        f"{root} has no checkpoint of step {request.step}; steps that can be resumed from: {steps}"
    )


def _went_back(attempts: Sequence[Attempt], step: int | None, job: str | None) -> bool:
    # Not by their start step: a start that took weights alone from that checkpoint began at 0.
    return job is not None and any(
        attempt.job_id == job and attempt.resumed_from is not None and attempt.resumed_from[1] == step
        for attempt in attempts
    )


def _check_fresh_start(root: Path, request: Request, passed: Sequence[Passed], job: Job) -> None:
    """Raise CheckpointNotFoundError where beginning again would bury a history, or begin one in the wrong directory."""
    listed = "".join(f"\n  {each.path.name}: {each.reason}" for each in passed) or "\n  (no step directory is there)"
    if request.kind == "last_healthy":
        raise CheckpointNotFoundError(
            f"{root}: no checkpoint is of a healthy state.{listed}\nTo go on from one of them all the same, name its "
            "step; to go on from the newest, leave resume_from out."
        )
    if request.kind == "latest":
        raise CheckpointNotFoundError(
            f"{root}: no checkpoint can be resumed from, though one was asked for.{listed}\nCheck the path; where "
            "there is none, a run without resume_from starts from step 0."
        )
    anew = "step 0" if request.directory is None else request.directory
    committed = [each for each in passed if layout.parse_staging_directory(each.path.name) is None]
    if committed or os.path.lexists(root / layout.LATEST):
        raise CheckpointNotFoundError(
            f"{root}: no checkpoint can be resumed from, though this run had committed some. Starting again from "
            f"{anew} would bury them.{listed}\nRepair or restore one of them, or use another root. {_ON_PURPOSE}"
        )
    attempts = read_attempts(root)
    if request.kind == "auto" and (resumed := [attempt for attempt in attempts if attempt.start_step > 0]):
        raise CheckpointNotFoundError(
            f"{root}: no checkpoint is left, though {resumed[-1]} went on from step {resumed[-1].start_step}. "
            f"{_ON_PURPOSE}"
        )
    if job.requeued and all(attempt.job_id != job.job_id for attempt in attempts):
        raise CheckpointNotFoundError(
            f"{root}: this is restart {job.restart_count} of job {job.job_id}, but no earlier start of that job has "
            "been here. Every start must name the same root: look for the one before (a time in the path?). If the job "
            f"was always stopped before it came to resume(), there is nothing to look for. {_ON_PURPOSE}"
        )
