"""Files of removed checkpoints are written over, and nobody ever mistakes one for what it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megaresume.errors import CheckpointDamagedError, FormatError
from megaresume.store import fs, layout
from megaresume.store.attempts import Attempt
from megaresume.store.commit import CommitText, save_checkpoint
from megaresume.store.control import ControlPlane
from megaresume.store.discovery import find_candidates
from megaresume.store.retention import prune, remove_leftovers
from megaresume.store.shard import Entry, ShardIdentity, read_header, verify_shard
from tests.store.worlds import FaultyOs, MemoryStore, claim

STEM = "tp00-pp00-dp00"
NAME = f"{STEM}.safetensors"


def save(root: Path, attempt: Attempt, step: int, size: int = 50_000) -> None:
    save_checkpoint(
        root,
        control=ControlPlane(MemoryStore(), 0, 1),
        step=step,
        attempt=attempt,
        shard_name=NAME,
        entries=[Entry("model/w", "U8", (size,), memoryview(bytes([step]) * size))],
        identity=ShardIdentity(attempt.root_id, attempt.attempt, step, STEM),
        index={},
        describe=lambda: CommitText(b"{}", {}, {}, {}),
        recycle=True,
    )


def retire_one(root: Path, attempt: Attempt) -> tuple[Path, int]:
    """Two saves, the first pruned: (its file, out of sight; the inode of that)."""
    save(root, attempt, 1)
    inode = (root / layout.step_directory(1) / NAME).stat().st_ino
    save(root, attempt, 2)
    prune(root, keep_last=1, attempt=attempt.attempt, recycle=True)
    (trash,) = root.glob(f"{layout.TRASH_PREFIX}*")
    assert not (trash / layout.MANIFEST).exists() and (trash / NAME).stat().st_ino == inode
    return trash / NAME, inode


def new_file(root: Path, step: int) -> Path:
    path = root / layout.step_directory(step) / NAME
    (candidate, *_) = find_candidates(root)[0]
    assert candidate.step == step
    verify_shard(path, read_header(path, record=candidate.manifest.files[NAME]))
    return path


@pytest.mark.parametrize("size", [50_000, 20_000, 3 << 20])
def test_a_removed_file_is_written_over_and_cut_to_its_new_length(size: int, tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    _, inode = retire_one(tmp_path, attempt)
    save(tmp_path, attempt, 3, size)
    path = new_file(tmp_path, 3)
    assert path.stat().st_ino == inode
    assert path.read_bytes()[-size:] == bytes([3]) * size and path.stat().st_size == 4096 + size


def test_only_one_removed_checkpoint_is_held_and_a_new_start_removes_it(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    for step in range(1, 6):
        save(tmp_path, attempt, step)
    prune(tmp_path, keep_last=1, attempt=attempt.attempt, recycle=True)
    assert len(list(tmp_path.glob(f"{layout.TRASH_PREFIX}*"))) == 1
    remove_leftovers(tmp_path, attempt=attempt.attempt)
    assert list(tmp_path.glob(f"{layout.TRASH_PREFIX}*")) == []


@pytest.mark.parametrize("why", ["a second name", "a reader", "a manifest", "a link"])
def test_what_somebody_may_still_want_is_left_alone(why: str, tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    old, inode = retire_one(tmp_path, attempt)
    content = old.read_bytes()
    reader = None
    if why == "a second name":
        os.link(old, tmp_path / "mine")
    elif why == "a reader":
        reader = os.open(old, os.O_RDONLY)
    elif why == "a manifest":
        (old.parent / layout.MANIFEST).write_text("{}")
    else:
        old.rename(tmp_path / "elsewhere")
        old.symlink_to(tmp_path / "elsewhere")
    save(tmp_path, attempt, 3)
    assert new_file(tmp_path, 3).stat().st_ino != inode
    assert old.read_bytes() == content
    if reader is not None:
        os.close(reader)


def test_the_old_header_is_gone_for_good_before_the_file_has_its_new_place(tmp_path: Path) -> None:
    """Of the calls that change the disk: zeros over the header, fsync, then the rename; a kill between any two of them
    leaves no file that reads as the old one in a directory with a manifest."""
    attempt = claim(tmp_path)
    old, _ = retire_one(tmp_path, attempt)
    with FaultyOs(lambda *_: None) as disk:
        save(tmp_path, attempt, 3)
    calls = [(name, path) for name, path in disk.trace if name in ("write", "pwrite", "writev", "fsync", "rename")]
    moved = next(i for i, (name, path) in enumerate(calls) if name == "rename" and str(old) in path)
    assert [name for name, _ in calls[:moved]] == ["pwrite", "fsync"]


def test_a_kill_after_the_header_was_erased_leaves_nothing_to_mistake(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    old, _ = retire_one(tmp_path, attempt)
    with fs.open_for_overwriting(old) as descriptor:
        fs.write_all_at(descriptor, bytes(4096), 0)
    with pytest.raises((CheckpointDamagedError, FormatError)):
        read_header(old)
    save(tmp_path, attempt, 3)
    new_file(tmp_path, 3)
