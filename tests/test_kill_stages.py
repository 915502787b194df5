"""A run killed at any moment of a save leaves a root that resumes exactly from the last committed step of its branch.

The process kills itself with SIGKILL inside the system call or the function where the stage begins; a fresh process
then resumes with the same arguments and must go on as the run that was never stopped.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaresume import read_progress
from megaresume.store import commit, fs, layout
from megaresume.store.discovery import find_candidates
from tests.harness import Outcome, assert_continues, open_manager, run, start, train, train_steps, tree
from tests.ranks import RankDied, Ranks
from tests.small_models import SmallModel

ALONE = SmallModel(num_layers=2, global_batch_size=2)
TWO_RANKS = SmallModel(tp=2, num_layers=2, global_batch_size=2)
STEPS, SAVE_EVERY = 6, 2
# The save that dies is the second of three.
LAST, DYING = 2, 4
TARGET = layout.step_directory(DYING)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(module: Any, name: str, matches: Callable[..., bool]) -> None:
    """From now on this process dies where it would call the function with arguments that match."""
    usual = getattr(module, name)

    def maybe(*args: Any, **kwargs: Any) -> Any:
        if matches(*args):
            die()
        return usual(*args, **kwargs)

    setattr(module, name, maybe)


def after(module: Any, name: str, matches: Callable[..., bool]) -> None:
    """From now on this process dies where it has called the function with arguments that match."""
    usual = getattr(module, name)

    def maybe(*args: Any, **kwargs: Any) -> Any:
        result = usual(*args, **kwargs)
        if matches(*args):
            die()
        return result

    setattr(module, name, maybe)


def of_dying_step(path: Path, *_: Any) -> bool:
    return f"step-{DYING:08d}" in str(path)


def in_the_middle_of_a_file() -> None:
    usual = fs.write_vectors

    def half(descriptor: int, buffers: list[memoryview]) -> None:
        if of_dying_step(Path(os.readlink(f"/proc/self/fd/{descriptor}"))):
            usual(descriptor, buffers[: len(buffers) // 2])
            die()
        usual(descriptor, buffers)

    fs.write_vectors = half  # type: ignore[assignment]


# name: (what arranges the death, the step that the next start must resume from)
STAGES: dict[str, tuple[Callable[[], None], int]] = {
    "before writing": (lambda: before(commit, "write_shard", of_dying_step), LAST),
    "half a file": (in_the_middle_of_a_file, LAST),
    "before the trainer state": (
        lambda: before(
            fs, "write_file_durably", lambda path, *_: of_dying_step(path) and path.name == layout.TRAINER_STATE
        ),
        LAST,
    ),
    "before the manifest": (
        lambda: before(fs, "write_file_durably", lambda path, *_: of_dying_step(path) and path.name == layout.MANIFEST),
        LAST,
    ),
    "before the rename": (lambda: before(fs, "rename", lambda _, target: target.name == TARGET), LAST),
    "after the rename, before the fsync of the root": (
        lambda: after(fs, "rename", lambda _, target: target.name == TARGET),
        DYING,
    ),
    "before LATEST": (lambda: before(commit, "_point_latest", lambda _, target: target.name == TARGET), DYING),
    "LATEST written beside, not renamed": (
        lambda: before(
            fs,
            "rename",
            lambda source, target: target.name == layout.LATEST and TARGET in source.read_text(),
        ),
        DYING,
    ),
}


def train_until_killed(config: SmallModel, root: Path, stage: str) -> None:
    STAGES[stage][0]()
    train(config, root, STEPS, save_every=SAVE_EVERY)


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return run(ranks, ALONE, tmp_path_factory.mktemp("whole") / "root", STEPS)


@pytest.mark.parametrize("stage", STAGES)
def test_a01_killed_in_a_save(ranks: Ranks, whole: list[Outcome], tmp_path: Path, stage: str) -> None:
    with pytest.raises(RankDied) as caught:
        ranks.run(train_until_killed, ALONE, tmp_path, stage, world_size=1)
    assert caught.value.exit_codes[0] == -signal.SIGKILL
    committed = STAGES[stage][1]
    assert read_progress(tmp_path).global_step == committed
    (resumed,) = run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    assert resumed.report.step == committed
    if (committed, stage) != (LAST, "before writing"):
        assert_names_the_torn_save(resumed, torn=committed == LAST)
    assert_continues([resumed], whole)
    assert_tidy(tmp_path)


def assert_names_the_torn_save(resumed: Outcome, *, torn: bool) -> None:
    passed = dict(resumed.report.passed)
    expected = {layout.staging_directory(DYING, 1)} if torn else set()
    assert passed.keys() == expected
    assert all("not published" in reason for reason in passed.values())


def assert_tidy(root: Path) -> None:
    """Every step of the branch is whole, and nothing that a killed save left is in the way."""
    candidates, passed = find_candidates(root)
    assert [candidate.step for candidate in candidates] == [6, 4, 2]
    assert passed == []
    assert not [name for name in os.listdir(root) if name.startswith(".staging")]
    assert (root / layout.LATEST).read_text() == "step-00000006\n"


# --- two ranks: one in the middle of its file, the other done ---------------------------------------------------------


def kill_both_when_one_is_half_way(config: SmallModel, root: Path) -> None:
    loop = start(config)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    usual = fs.write_vectors

    def half(descriptor: int, buffers: list[memoryview]) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if of_dying_step(path) and dist.get_rank() == 1:
            usual(descriptor, buffers[: len(buffers) // 2])
            other = path.with_name("tp00-pp00-dp00.safetensors")
            while not other.exists() or other.stat().st_size == 0:
                time.sleep(0.01)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        usual(descriptor, buffers)

    fs.write_vectors = half  # type: ignore[assignment]
    with open_manager(loop, root, save_every=SAVE_EVERY) as manager:
        manager.resume()
        for _ in train_steps(loop, manager, STEPS):
            pass


def test_a01_two_ranks_killed_with_one_file_half_written(ranks: Ranks, tmp_path: Path) -> None:
    whole = run(ranks, TWO_RANKS, tmp_path / "whole", STEPS)
    with pytest.raises(RankDied):
        ranks.run(kill_both_when_one_is_half_way, TWO_RANKS, tmp_path / "root", world_size=2)
    torn = tmp_path / "root" / layout.staging_directory(DYING, 1)
    assert len(list(torn.iterdir())) == 2
    resumed = run(ranks, TWO_RANKS, tmp_path / "root", STEPS, save_every=SAVE_EVERY)
    for outcome in resumed:
        assert outcome.report.step == LAST
        assert_names_the_torn_save(outcome, torn=True)
    assert_continues(resumed, whole)
    assert_tidy(tmp_path / "root")


# --- killed outside a save --------------------------------------------------------------------------------------------


def die_after_the_claim(config: SmallModel, root: Path) -> None:
    loop = start(config)
    open_manager(loop, root, save_every=SAVE_EVERY).resume()
    die()


def test_killed_between_the_claim_and_the_first_step(ranks: Ranks, whole: list[Outcome], tmp_path: Path) -> None:
    """Once in an empty root and once in one with a checkpoint: claims alone change nothing of what is resumed."""
    for claimed in (1, 2):
        with pytest.raises(RankDied):
            ranks.run(die_after_the_claim, ALONE, tmp_path, world_size=1)
        assert len(os.listdir(tmp_path / layout.ATTEMPTS)) == claimed
    (cut,) = run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY, crash_at=3)
    assert (cut.report.path, cut.report.step, cut.report.attempt) == (None, 0, 3)
    with pytest.raises(RankDied):
        ranks.run(die_after_the_claim, ALONE, tmp_path, world_size=1)
    (resumed,) = run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    assert (resumed.report.step, resumed.report.attempt) == (LAST, 5)
    assert_continues([resumed], whole)


def claim_and_die_half_way(config: SmallModel, root: Path) -> None:
    before(fs, "link", lambda *_: True)
    start_and_resume(config, root)


def start_and_resume(config: SmallModel, root: Path) -> None:
    open_manager(start(config), root, save_every=SAVE_EVERY).resume()


def test_killed_in_the_claim(ranks: Ranks, whole: list[Outcome], tmp_path: Path) -> None:
    run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY, crash_at=3)
    with pytest.raises(RankDied):
        ranks.run(claim_and_die_half_way, ALONE, tmp_path, world_size=1)
    (resumed,) = run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    assert (resumed.report.step, resumed.report.attempt) == (LAST, 2)
    assert_continues([resumed], whole)


# --- a directory of an abandoned branch in the way --------------------------------------------------------------------


def go_back_until_killed(config: SmallModel, root: Path, rename: int, when: str) -> None:
    """Go back to step 2 and die at the save of step 4: of its two renames the `rename`-th, before or after it."""
    count = 0

    def is_it(source: Path, target: Path) -> bool:
        nonlocal count
        count += of_dying_step(target) and target.parent == root
        return count == rename

    (before if when == "before" else after)(fs, "rename", is_it)
    train(config, root, STEPS, save_every=SAVE_EVERY, resume_from=LAST)


def newest_on_branch(root: Path) -> tuple[int, int]:
    newest = find_candidates(root)[0][0]
    return newest.step, newest.attempt


@pytest.mark.parametrize(
    "rename, when, expected",
    [(1, "before", (LAST, 1)), (1, "after", (LAST, 1)), (2, "after", (DYING, 2))],
    ids=["before it is moved aside", "moved aside, the new one not yet in place", "both renamed"],
)
def test_killed_with_an_off_branch_directory_in_the_way(
    ranks: Ranks, whole: list[Outcome], tmp_path: Path, rename: int, when: str, expected: tuple[int, int]
) -> None:
    run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    abandoned = tree(tmp_path / TARGET)
    with pytest.raises(RankDied):
        ranks.run(go_back_until_killed, ALONE, tmp_path, rename, when, world_size=1)
    assert newest_on_branch(tmp_path) == expected
    (resumed,) = run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    assert resumed.report.step == expected[0]
    assert_continues([resumed], whole)
    assert newest_on_branch(tmp_path) == (STEPS, 3)
    # The abandoned checkpoint was moved aside, by whichever start came so far, and not overwritten.
    aside = [path for path in tmp_path.iterdir() if re.fullmatch(rf"{TARGET}\.a\d{{4}}", path.name)]
    assert [tree(path) for path in aside] == [abandoned]


# --- what is visible when a save returns, and what pruning leaves -----------------------------------------------------


def publish_late(config: SmallModel, root: Path) -> tuple[str, int]:
    """Rank 0's commit takes two seconds; what does rank 1 see right after `save()`?"""
    usual = commit._write_texts

    def late(*args: Any) -> Any:
        time.sleep(2.0)
        return usual(*args)

    loop = start(config)
    with open_manager(loop, root) as manager:
        manager.resume()
        for _ in train_steps(loop, manager, 1):
            commit._write_texts = late
            try:
                path = manager.save()
            finally:
                commit._write_texts = usual
            return (root / layout.LATEST).read_text(), read_progress(path).global_step
    raise AssertionError("no step was trained")


def test_a11_a_save_is_done_nowhere_before_it_is_published(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(publish_late, TWO_RANKS, tmp_path, world_size=2) == [("step-00000001\n", 1)] * 2


def train_keeping_one(config: SmallModel, root: Path, stage: str) -> None:
    STAGES[stage][0]()
    train(config, root, STEPS, save_every=SAVE_EVERY, keep_last=1)


@pytest.mark.parametrize("stage", ["half a file", "before the rename", "before LATEST"])
def test_a08_keeping_one_never_keeps_none(ranks: Ranks, whole: list[Outcome], tmp_path: Path, stage: str) -> None:
    with pytest.raises(RankDied):
        ranks.run(train_keeping_one, ALONE, tmp_path, stage, world_size=1)
    assert read_progress(tmp_path).global_step == STAGES[stage][1]
    (resumed,) = run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY, keep_last=1)
    assert_continues([resumed], whole)
    assert [path.name for path in tmp_path.glob("step-*")] == [layout.step_directory(STEPS)]
