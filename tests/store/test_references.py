"""A checkpoint that refers to an earlier one keeps it alive, finds it under any name, and is damaged without it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megaresume.errors import CheckpointDamagedError
from megaresume.store import layout
from megaresume.store.attempts import Attempt
from megaresume.store.commit import CommitText, save_checkpoint
from megaresume.store.control import ControlPlane
from megaresume.store.discovery import check_files, find_candidates, open_checkpoint
from megaresume.store.manifest import Reference, _digest, parse_manifest
from megaresume.store.references import locate
from megaresume.store.retention import prune
from megaresume.store.shard import Entry, ShardIdentity
from tests.store.worlds import MemoryStore, claim

WRONG = [None, "x", {}, [None], [{}], [[]]]
REFERENCE = {"step": 1, "attempt": 1, "name": "tp00-pp00-dp00.safetensors", "size": 9, "header_digest": "0" * 32}
WRONG += [[{**REFERENCE, key: value}] for key in REFERENCE for value in (None, -1, True, "../x", "", [], "A" * 32)]

STEM = "tp00-pp00-dp00"


def save(root: Path, attempt: Attempt, step: int, *references: Reference) -> Reference:
    """A checkpoint, as others may refer to it."""
    report = save_checkpoint(
        root,
        control=ControlPlane(MemoryStore(), 0, 1),
        step=step,
        attempt=attempt,
        shard_name=f"{STEM}.safetensors",
        entries=[Entry("model/w", "U8", (9,), memoryview(bytes([attempt.attempt, step] * 4 + [0])))],
        identity=ShardIdentity(attempt.root_id, attempt.attempt, step, STEM),
        index={},
        describe=lambda: CommitText(b"{}", {}, {}, {}),
        references=references,
    )
    assert report.record is not None
    return Reference(step, attempt.attempt, f"{STEM}.safetensors", report.record.size, report.record.header_digest)


def steps(root: Path) -> list[int]:
    return [candidate.step for candidate in find_candidates(root)[0]]


def test_the_manifest_lists_what_is_referred_to_once(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    first = save(tmp_path, attempt, 1)
    save(tmp_path, attempt, 2, first, first)
    newest = find_candidates(tmp_path)[0][0]
    assert newest.manifest.references == (first,)
    check_files(newest)
    assert locate(tmp_path, first, root_id=attempt.root_id) == tmp_path / layout.step_directory(1) / first.name


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_a_manifest_refers_to_is_held_against_its_form(wrong: Any, tmp_path: Path) -> None:
    save(tmp_path, claim(tmp_path), 1)
    path = tmp_path / layout.step_directory(1) / layout.MANIFEST
    value = json.loads(path.read_text("utf-8"))
    for references in ([REFERENCE], wrong):
        value["references"] = references
        value["digest"] = _digest(value)
        path.write_text(json.dumps(value), "utf-8")
        if references is not wrong:
            assert len(parse_manifest(path).references) == 1
    with pytest.raises(CheckpointDamagedError, match="references"):
        parse_manifest(path)


def test_pruning_leaves_what_a_kept_checkpoint_refers_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    attempt = claim(tmp_path)
    first = save(tmp_path, attempt, 1)
    for step in (2, 3, 4):
        save(tmp_path, attempt, step, first)
    prune(tmp_path, keep_last=1, attempt=attempt.attempt)
    assert steps(tmp_path) == [4, 1]
    assert "step-00000001 kept beyond the last 1" in caplog.text
    save(tmp_path, attempt, 5)  # refers to nothing: the weights were written anew
    prune(tmp_path, keep_last=1, attempt=attempt.attempt)
    assert steps(tmp_path) == [5]


def test_pruning_leaves_what_an_abandoned_branch_refers_to(tmp_path: Path) -> None:
    """Somebody may mean to return to step 3 of attempt 1, which is not pruned either."""
    old = claim(tmp_path)
    first = save(tmp_path, old, 1)
    save(tmp_path, old, 2)
    save(tmp_path, old, 3, first)
    new = claim(tmp_path, resumed_from=(1, 2))
    save(tmp_path, new, 4)
    save(tmp_path, new, 5)
    prune(tmp_path, keep_last=1, attempt=new.attempt)
    assert steps(tmp_path) == [5, 1]


def test_what_was_renamed_aside_is_found_and_its_successor_is_not_taken_for_it(tmp_path: Path) -> None:
    old = claim(tmp_path)
    save(tmp_path, old, 1)
    second = save(tmp_path, old, 2)
    save(tmp_path, old, 3, second)
    new = claim(tmp_path, resumed_from=(1, 1))
    save(tmp_path, new, 2)  # another step 2, in the place of the first
    aside = tmp_path / layout.aside_directory(2, 2)
    assert locate(tmp_path, second, root_id=old.root_id) == aside / second.name
    check_files(open_checkpoint(tmp_path / layout.step_directory(3)))


def test_a_checkpoint_whose_reference_is_gone_is_damaged_and_says_so(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    first = save(tmp_path, attempt, 1)
    save(tmp_path, attempt, 2, first)
    shutil.rmtree(tmp_path / layout.step_directory(1))
    with pytest.raises(CheckpointDamagedError, match=r"of step 1, written by attempt 1.*Put it back"):
        check_files(find_candidates(tmp_path)[0][0])
