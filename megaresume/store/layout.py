"""Names in a checkpoint root: pure functions from numbers to names and back.

Touches no disk. A parser answers `None` to every name that its writer would not have given, so that two names never
stand for the same checkpoint and what others keep in the root is left alone. Numbers are not negative; short ones are
padded with zeros, long ones simply make the name longer.

    <root>/LATEST, attempts/000001.json, steps.jsonl, events.jsonl
    <root>/step-00001200/               a checkpoint
    <root>/.staging-step-00001200-a000003/   one being written by attempt 3
    <root>/step-00001200.a0003          what stood in the way of a commit, renamed aside by attempt 3
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TypeVar

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer_state.json"
LATEST = "LATEST"
ATTEMPTS = "attempts"
STEP_LOG = "steps.jsonl"
EVENTS = "events.jsonl"
SHARD_SUFFIX = ".safetensors"
TRASH_PREFIX = ".trash-"

_Parsed = TypeVar("_Parsed")

_STEP = re.compile(r"step-([0-9]{8,18})")
_STAGING = re.compile(r"\.staging-step-([0-9]{8,18})-a([0-9]{6,18})")
_ASIDE = re.compile(r"step-([0-9]{8,18})\.a([0-9]{4,18})(?:\.([0-9]{1,9}))?")
_ATTEMPT = re.compile(r"([0-9]{6,18})\.json")


def step_directory(step: int) -> str:
    """`step-00001200`."""
    return f"step-{step:08d}"


def parse_step_directory(name: str) -> int | None:
    """The step of a checkpoint directory's name, or None for any other name."""
    match = _STEP.fullmatch(name)
    return _same(name, int(match[1]), step_directory(int(match[1]))) if match else None


def staging_directory(step: int, attempt: int) -> str:
    """`.staging-step-00001200-a000003`: where attempt 3 writes step 1200 before its commit."""
    return f".staging-step-{step:08d}-a{attempt:06d}"


def parse_staging_directory(name: str) -> tuple[int, int] | None:
    """(step, attempt) of a staging directory's name, or None for any other name."""
    match = _STAGING.fullmatch(name)
    if match is None:
        return None
    step, attempt = int(match[1]), int(match[2])
    return _same(name, (step, attempt), staging_directory(step, attempt))


def aside_directory(step: int, attempt: int, taken: Collection[str] = ()) -> str:
    """`step-00001200.a0003`, or with `.2`, `.3`, ... appended: the first such name that is not `taken`."""
    name = first = f"step-{step:08d}.a{attempt:04d}"
    copy = 1
    while name in taken:
        copy += 1
        name = f"{first}.{copy}"
    return name


def parse_aside_directory(name: str) -> tuple[int, int] | None:
    """(step, attempt that renamed it aside), or None for any other name."""
    match = _ASIDE.fullmatch(name)
    if match is None:
        return None
    step, attempt, copy = int(match[1]), int(match[2]), match[3]
    first = aside_directory(step, attempt)
    if copy is None:
        return _same(name, (step, attempt), first)
    return _same(name, (step, attempt), f"{first}.{int(copy)}") if int(copy) >= 2 else None


def attempt_file(attempt: int) -> str:
    """`000001.json`, in `attempts/`."""
    return f"{attempt:06d}.json"


def parse_attempt_file(name: str) -> int | None:
    """The number of an attempt's file, or None for any other name."""
    match = _ATTEMPT.fullmatch(name)
    return _same(name, int(match[1]), attempt_file(int(match[1]))) if match else None


def _same(name: str, parsed: _Parsed, written: str) -> _Parsed | None:
    return parsed if written == name else None
