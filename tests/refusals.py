"""Trying to resume what is damaged or amiss: how the tests do harm to a checkpoint, and what they ask of a refusal.

The run that is harmed has two ranks and six steps; `whole_run` trains it. Knows nothing of what a test expects.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from megaresume.errors import MegaresumeError
from megaresume.store import layout, strict_json
from megaresume.store.manifest import FileRecord, parse_manifest, to_json
from megaresume.store.shard import Entry, read_header, write_shard
from tests.harness import Loop, Outcome, differences, digest, open_manager, run, start, train_steps
from tests.ranks import Ranks
from tests.small_models import SmallModel

CONFIG = SmallModel(tp=2, num_layers=2, global_batch_size=2)
STEPS = 6
FIRST, SECOND = "tp00-pp00-dp00.safetensors", "tp01-pp00-dp00.safetensors"
# Long for a rank that has nothing to wait for, short against the minutes that a hang takes to be noticed.
SOON_S = 30.0
FIRST_READ = {"verify": "first"}


@dataclass(frozen=True)
class Refusal:
    """What a rank got instead of a resume: the error's name ("" where there was none), its text, and what it cost."""

    error: str
    text: str
    changed: list[str]
    """The names under which the live state's digest differs from before."""
    seconds: float


def refused(loop: Loop, root: Path, manager_args: dict[str, Any], resume_args: dict[str, Any]) -> Refusal:
    """Try to resume on this rank."""
    before, started = digest(loop), time.monotonic()
    error, text = "", ""
    try:
        with open_manager(loop, root, **manager_args) as manager:
            manager.resume(**resume_args)
    except MegaresumeError as caught:
        error, text = type(caught).__name__, str(caught)
    return Refusal(error, text, differences(before, digest(loop)), time.monotonic() - started)


def all_refused(config: SmallModel, tries: Sequence[tuple[Path, dict[str, Any], dict[str, Any]]]) -> list[Refusal]:
    """Every try on the same live objects, which a refusal leaves as they were: many cases in one start of the ranks."""
    loop = start(config)
    return [refused(loop, root, manager_args, resume_args) for root, manager_args, resume_args in tries]


def assert_refused(refusals: Sequence[Refusal], error: type[Exception], *needles: str) -> str:
    """All ranks got the same words of the same error, soon, with nothing changed; returns the words."""
    assert [each.error for each in refusals] == [error.__name__] * len(refusals), refusals[0].text
    text = refusals[0].text
    assert [each.text for each in refusals] == [text] * len(refusals)
    for each in refusals:
        assert each.changed == [], f"a refusal changed live state: {text}"
        assert each.seconds < SOON_S
    for needle in needles:
        assert re.search(needle, text), f"{needle!r} is not in: {text}"
    assert "{" not in re.sub(r"\{'.*?'\}", "", text), f"an unformatted placeholder is in: {text}"
    return text


def whole_run(pool: Ranks, root: Path) -> tuple[Path, list[Outcome]]:
    """Train the uninterrupted run of six steps with checkpoints 2, 4 and 6; tests copy it and write nothing there."""
    return root, run(pool, CONFIG, root, STEPS, save_every=2)


def resume_and_train(
    config: SmallModel, root: Path, steps: int, manager_args: dict[str, Any], resume_args: dict[str, Any]
) -> Outcome:
    """As `harness.train`, with arguments of `resume()` too."""
    loop = start(config)
    results = {}
    with open_manager(loop, root, **manager_args) as manager:
        report = manager.resume(**resume_args)
        results.update(train_steps(loop, manager, steps))
    return Outcome(report, results, digest(loop), manager.step, manager.should_stop)


def save_at_zero(config: SmallModel, root: Path) -> None:
    loop = start(config)
    with open_manager(loop, root) as manager:
        manager.resume()
        manager.save()


class Waiting(logging.Handler):
    """Keeps what the control plane says of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# --- doing harm -------------------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    """One bit of the byte at `position`, from the end where it is negative."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def zero_4_kib(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-8192:-4096] = bytes(4096)
    path.write_bytes(data)


def swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def reseal(checkpoint: Path, **changes: Any) -> None:
    """Give the manifest what is in the directory now, as if it had been committed so."""
    manifest = replace(parse_manifest(checkpoint / layout.MANIFEST), **changes)
    data = (checkpoint / layout.TRAINER_STATE).read_bytes()
    state = FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))
    total = state.size + sum(record.size for record in manifest.files.values())
    value = to_json(replace(manifest, trainer_state=state, total_bytes=total))
    (checkpoint / layout.MANIFEST).write_bytes(strict_json.dump_json(value))


def forget_stream(checkpoint: Path, stream: str) -> None:
    """The second rank's shard as a writer would have left it that lost one random stream."""
    path = checkpoint / SECOND
    header, data = read_header(path), path.read_bytes()
    index = dict(header.index)
    index["rng"] = [name for name in index["rng"] if name != stream]
    index["tensors"] = {name: entry for name, entry in index["tensors"].items() if name != f"rng/{stream}"}
    payload = memoryview(data)[header.data_start :]
    entries = [
        Entry(name, span.dtype, span.shape, payload[span.begin : span.end])
        for name, span in header.tensors.items()
        if name in index["tensors"]
    ]
    record = write_shard(path, entries, identity=header.identity, index=index)
    reseal(checkpoint, files={**parse_manifest(checkpoint / layout.MANIFEST).files, SECOND: record})


def commit_state(checkpoint: Path, text: str) -> None:
    """Another `trainer_state.json`, under a manifest that vouches for it."""
    (checkpoint / layout.TRAINER_STATE).write_text(text, encoding="utf-8")
    reseal(checkpoint)


def change_state(checkpoint: Path, **fields: Any) -> None:
    state = json.loads((checkpoint / layout.TRAINER_STATE).read_text("utf-8"))
    state.update(fields)
    commit_state(checkpoint, json.dumps({name: value for name, value in state.items() if value != "left out"}))
