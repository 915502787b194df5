"""Automatic resume over damage: the newest checkpoint that is whole on all ranks, the reasons said, and then exact.

Also where it ends: live state that is partly overwritten is never trained, and a history is never buried.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaresume import errors as named
from megaresume import read_progress
from megaresume.errors import PoisonedError
from megaresume.store import layout
from megaresume.store.shard import CHUNK_BYTES
from tests.harness import (
    Outcome,
    assert_continues,
    differences,
    open_manager,
    run,
    start,
    tree,
)
from tests.ranks import Ranks
from tests.refusals import (
    CONFIG,
    FIRST,
    FIRST_READ,
    SECOND,
    STEPS,
    all_refused,
    assert_refused,
    commit_state,
    flip,
    whole_run,
)
from tests.small_models import SmallModel


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    return whole_run(ranks, tmp_path_factory.mktemp("whole") / "root")


def harm_two(root: Path) -> None:
    """A14: the newest is damaged for one rank, the next for the other: the newest that is whole for both is step 2."""
    flip(root / "step-00000006" / FIRST, 200)
    (root / "step-00000004" / SECOND).unlink()


FALL_BACKS: dict[str, tuple[Callable[[Path], Any], int, dict[str, Any]]] = {
    "a20 header, phase 1": (lambda root: flip(root / "step-00000006" / SECOND, 200), 4, {}),
    "a20 data, phase 2": (lambda root: flip(root / "step-00000006" / SECOND, -5000), 4, {}),
    "a20 data, read first": (lambda root: flip(root / "step-00000006" / SECOND, -5000), 4, FIRST_READ),
    "a14": (harm_two, 2, {}),
    "s01 no manifest": (lambda root: (root / "step-00000006" / layout.MANIFEST).unlink(), 4, {}),
    "s03": (lambda root: commit_state(root / "step-00000006", "[]"), 4, {}),
    "a05 not published": (
        lambda root: (root / "step-00000006").rename(root / layout.staging_directory(6, 1)),
        4,
        {},
    ),
}


@pytest.mark.parametrize("harm, resumed_at, manager_args", FALL_BACKS.values(), ids=FALL_BACKS)
def test_damage_falls_back_to_the_next_older_and_is_exact(
    ranks: Ranks,
    whole: tuple[Path, list[Outcome]],
    tmp_path: Path,
    harm: Callable[[Path], Any],
    resumed_at: int,
    manager_args: dict[str, Any],
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    harm(root)
    resumed = run(ranks, CONFIG, root, STEPS, save_every=2, **manager_args)
    for outcome in resumed:
        assert outcome.report.step == resumed_at
        passed = dict(outcome.report.passed)
        assert any("step-00000006" in name for name in passed)
        assert all(passed.values()), "a checkpoint was passed over without a reason"
    assert_continues(resumed, whole[1])
    # What could not be read is still there, aside, for whoever wants to look at it.
    if not any(name.startswith(".staging") for name in passed):
        assert (root / "step-00000006.a0002").is_dir()
    assert read_progress(root).global_step == STEPS


def test_a_rank_half_overwritten_is_exact_after_the_fall_back(ranks: Ranks, tmp_path: Path) -> None:
    """A shard of two chunks with the damage in the second: the first one's tensors are in place when it is found."""
    config = replace(CONFIG, tp=1, hidden_size=64)
    whole = run(ranks, config, tmp_path, STEPS, save_every=2)
    shard = tmp_path / "step-00000006" / FIRST
    assert shard.stat().st_size > CHUNK_BYTES + 5000
    flip(shard, -5000)
    ((explicit,),) = ranks.run(all_refused, config, [(tmp_path, {"resume_from": 6}, {})], world_size=1)
    assert explicit.error == "PoisonedError"
    overwritten = [name for name in explicit.changed if name.startswith(("parameter/", "optim/"))]
    assert overwritten, "nothing was overwritten: this does not show what it is for"
    resumed = run(ranks, config, tmp_path, STEPS)
    assert resumed[0].report.step == 4
    assert_continues(resumed, whole)


def use_in_spite_of_poison(config: SmallModel, root: Path) -> list[str]:
    """Damage that only phase 2 sees, and no older checkpoint: every way on is closed."""
    loop = start(config)
    said = []
    manager = open_manager(loop, root)
    for action in (manager.resume, manager.end_step, manager.save, manager.poll, manager.resume):
        try:
            action()
            said.append("")
        except PoisonedError as error:
            said.append(str(error))
    manager.close()
    return said


def test_damage_in_phase_2_with_nothing_older_poisons(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    for step in (2, 4, 6):
        flip(root / layout.step_directory(step) / SECOND, -5000)
    before = tree(root)
    first, second = ranks.run(use_in_spite_of_poison, CONFIG, root, world_size=2)
    assert first == second
    assert all(first), "a poisoned manager let something pass"
    for step in (2, 4, 6):
        assert f"step-0000000{step}" in first[0]
    assert SECOND in first[0] and "Start the process again" in first[0]
    assert differences(before, tree(root)) == []


def test_an_explicit_request_never_falls_back(ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    flip(root / "step-00000006" / SECOND, -5000)
    for each in ranks.run(all_refused, CONFIG, [(root, {"resume_from": 6}, {})], world_size=2):
        assert each[0].error == "PoisonedError"
        assert SECOND in each[0].text


def test_a16_all_unreadable_is_no_fresh_start(ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    shutil.copytree(whole[0], root)
    os.truncate(root / "step-00000002" / FIRST, 100)
    flip(root / "step-00000004" / SECOND, 200)
    (root / "step-00000006" / layout.TRAINER_STATE).unlink()
    shutil.copytree(root, other)
    for step in (2, 4, 6):
        (other / layout.step_directory(step) / layout.MANIFEST).write_text("{}")
    gone = tmp_path / "gone"
    shutil.copytree(whole[0], gone, ignore=shutil.ignore_patterns("step-0*"))
    before = [tree(each) for each in (root, other, gone)]
    tries = [(root, {}, {}), (other, {}, {}), (gone, {}, {}), (other, {"resume_from": whole[0] / "step-00000002"}, {})]
    per_rank = ranks.run(all_refused, CONFIG, tries, world_size=2)
    for i, needles in enumerate(
        [
            ("step-00000002: .*truncated", "step-00000004: .*altered", "step-00000006: .*missing"),
            ("step-00000002: ", "step-00000004: ", "step-00000006: ", "would bury them", "start_fresh=True"),
            ("no step directory is there", "start_fresh=True"),
            # J14's other half: the base that a run began with does not stand in for what it has lost since.
            ("Starting again from .* would bury them", "step-00000006: "),
        ]
    ):
        assert_refused([each[i] for each in per_rank], named.CheckpointNotFoundError, *needles)
    assert [tree(each) for each in (root, other, gone)] == before
    for each, kept in ((root, 3), (other, 3), (gone, 0)):
        for outcome in run(ranks, CONFIG, each, 1, start_fresh=True):
            assert (outcome.report.path, outcome.report.step, outcome.step) == (None, 0, 1)
        assert len(list(each.glob("step-*"))) == kept + 1, "a fresh start on purpose removed what was there"
