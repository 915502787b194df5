"""A run that goes back to an older step on purpose follows its new branch from then on, and the old one is kept aside.

Also what replayed steps are compared with, what an orphan of an older start may do, and what retention leaves. Real
training through ResumeManager; the pure decisions are tested in `tests/store`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaresume import read_progress
from megaresume.errors import CheckpointNotFoundError, MegaresumeError, ReplayDivergedError, SupersededError
from megaresume.job import read_job
from megaresume.store import layout
from megaresume.store.discovery import find_candidates
from megaresume.store.manifest import parse_manifest
from tests.harness import (
    Crash,
    Loop,
    Outcome,
    assert_continues,
    differences,
    digest,
    open_manager,
    run,
    start,
    train_steps,
    tree,
)
from tests.ranks import Ranks
from tests.small_models import SmallModel

ALONE = SmallModel(num_layers=2, global_batch_size=2)
TWO_RANKS = SmallModel(tp=2, num_layers=2, global_batch_size=2)
# The same run with another learning rate: a branch whose steps differ from the abandoned one's.
BRANCH = replace(ALONE, lr=0.003)
STEPS, SAVE_EVERY = 6, 2
GO_BACK = {"save_every": SAVE_EVERY, "resume_from": 2, "override_opt_param_scheduler": True}


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def job(number: int, restarts: int) -> dict[str, str]:
    """What Slurm tells the processes of a job that it has started `restarts` times before."""
    return {"SLURM_JOB_ID": str(number), "SLURM_RESTART_COUNT": str(restarts)}


def train_as(
    config: SmallModel,
    root: Path,
    steps: int,
    variables: dict[str, str],
    manager_args: dict[str, Any],
    resume_args: dict[str, Any],
    crash_at: int | None,
) -> Outcome:
    """As `harness.train`, in an environment and with arguments of `resume()`."""
    with environment(variables):
        loop = start(config)
        results, report = {}, None
        manager = open_manager(loop, root, **manager_args)
        try:
            with manager:
                report = manager.resume(**resume_args)
                for step, result in train_steps(loop, manager, steps):
                    results[step] = result
                    if step == crash_at:
                        raise Crash
        except Crash:
            pass
    assert report is not None
    return Outcome(report, results, digest(loop), manager.step, manager.should_stop)


def run_as(
    pool: Ranks,
    root: Path,
    *,
    config: SmallModel = BRANCH,
    steps: int = STEPS,
    variables: dict[str, str] | None = None,
    resume_args: dict[str, Any] | None = None,
    crash_at: int | None = None,
    **manager_args: Any,
) -> Outcome:
    """One start of a run of one rank."""
    args = (config, root, steps, variables or {}, manager_args, resume_args or {}, crash_at)
    (outcome,) = pool.run(train_as, *args, world_size=1)
    return outcome


def attempt_of(checkpoint: Path) -> int:
    return parse_manifest(checkpoint / layout.MANIFEST).attempt


# --- going back on purpose --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def branch(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The uninterrupted branch: six steps, then back to step 2 and on to step 6 with another learning rate."""
    root = tmp_path_factory.mktemp("branch") / "root"
    run(ranks, ALONE, root, STEPS, save_every=SAVE_EVERY)
    return run_as(ranks, root, **GO_BACK)


@pytest.mark.parametrize("crash_at, goes_on_from", [(3, 2), (5, 4)])
def test_a_requeued_run_follows_its_new_branch(
    ranks: Ranks, branch: Outcome, tmp_path: Path, crash_at: int, goes_on_from: int
) -> None:
    """The same arguments each time: those of a job that Slurm requeues."""
    run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    abandoned = {step: tree(tmp_path / layout.step_directory(step)) for step in (4, 6)}
    first = run_as(ranks, tmp_path, variables=job(4711, 0), crash_at=crash_at, **GO_BACK)
    assert (first.report.step, first.report.attempt) == (2, 2)
    second = run_as(ranks, tmp_path, variables=job(4711, 1), **GO_BACK)
    assert second.report.path == tmp_path / layout.step_directory(goes_on_from)
    assert (second.report.step, second.report.attempt) == (goes_on_from, 3)
    assert_continues([second], [branch])
    # The newer checkpoints of the branch it left were seen, named and passed over.
    passed = dict(second.report.passed)
    assert "step-00000006" in passed
    assert all("off the branch: written by attempt 1" in reason for reason in passed.values())
    # And they are all still there, aside, byte for byte.
    for step, files in abandoned.items():
        (aside,) = [path for path in tmp_path.iterdir() if re.match(rf"step-{step:08d}\.a", path.name)]
        assert tree(aside) == files
        assert attempt_of(tmp_path / layout.step_directory(step)) in (2, 3)
    # One more start without any wish, as a person would type it, and one that is a job of its own and goes back again.
    assert run_as(ranks, tmp_path, steps=0).report.step == STEPS
    again = run_as(ranks, tmp_path, steps=0, variables=job(4712, 0), **GO_BACK)
    assert again.report.step == 2
    assert {("step-00000006", "newer than what was asked for")} <= set(again.report.passed)


def test_a_restart_finds_its_branch_though_its_first_checkpoint_was_pruned(
    ranks: Ranks, branch: Outcome, tmp_path: Path
) -> None:
    run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    pruning = {**GO_BACK, "keep_last": 1}
    run_as(ranks, tmp_path, variables=job(4711, 0), crash_at=5, **pruning)
    assert not (tmp_path / "step-00000002").exists()
    second = run_as(ranks, tmp_path, variables=job(4711, 1), **pruning)
    assert second.report.step == 4
    assert_continues([second], [branch])


def test_weights_alone_are_taken_once(ranks: Ranks, tmp_path: Path) -> None:
    """A fine-tuning from weights of this same root, requeued with the same arguments, does not start over."""
    args: dict[str, Any] = {"save_every": SAVE_EVERY, "resume_from": 2}
    mode = {"weights_only": True}
    for name in ("whole", "cut"):
        run(ranks, ALONE, tmp_path / name, 4, save_every=SAVE_EVERY)
    whole = run_as(ranks, tmp_path / "whole", resume_args=mode, **args)
    run_as(ranks, tmp_path / "cut", resume_args=mode, variables=job(4711, 0), crash_at=5, **args)
    resumed = run_as(ranks, tmp_path / "cut", resume_args=mode, variables=job(4711, 1), **args)
    assert (resumed.report.step, resumed.report.left_out, resumed.report.changes) == (4, (), ())
    assert_continues([resumed], [whole])


def test_an_abandoned_checkpoint_can_be_named(ranks: Ranks, tmp_path: Path) -> None:
    """Aside or not: whoever names a checkpoint of another branch makes that branch the run's again."""
    run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    run_as(ranks, tmp_path, steps=4, **GO_BACK)
    aside = tmp_path / "step-00000004.a0002"
    assert attempt_of(aside) == 1
    outcome = run_as(ranks, tmp_path, config=ALONE, steps=0, resume_from=aside)
    assert (outcome.report.path, outcome.report.step) == (aside, 4)
    assert run_as(ranks, tmp_path, config=ALONE, steps=0, resume_from=6).report.step == 6
    assert read_progress(tmp_path).path == tmp_path / "step-00000006"


# --- a checkpoint from elsewhere, once --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [{}, {"weights_only": True}, {"skip_data": False}], ids=["all", "weights", "no skip"])
def test_j14_own_checkpoints_win_over_the_initial_one(ranks: Ranks, tmp_path: Path, mode: dict[str, Any]) -> None:
    run(ranks, ALONE, tmp_path / "base", 2, save_every=SAVE_EVERY)
    args: dict[str, Any] = {"save_every": SAVE_EVERY, "resume_from": tmp_path / "base" / "step-00000002"}
    whole = run_as(ranks, tmp_path / "whole", resume_args=mode, **args)
    first = run_as(ranks, tmp_path / "run", resume_args=mode, crash_at=5, **args)
    assert first.report.path == args["resume_from"]
    assert first.report.step == (0 if "weights_only" in mode else 2)
    second = run_as(ranks, tmp_path / "run", resume_args=mode, **args)
    assert second.report.path == tmp_path / "run" / "step-00000004"
    assert (second.report.step, second.report.changes, second.report.left_out) == (4, (), ())
    assert_continues([second], [whole])
    # Two roots never share an id: checkpoints of the same attempt and step in each would be taken for one another.
    ids = [parse_manifest(tmp_path / name / "step-00000004" / layout.MANIFEST).root_id for name in ("run", "whole")]
    ids.append(parse_manifest(tmp_path / "base" / "step-00000002" / layout.MANIFEST).root_id)
    assert len(set(ids)) == 3


def test_j14_before_its_first_checkpoint_a_restart_takes_the_initial_one_again(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, ALONE, tmp_path / "base", 2, save_every=SAVE_EVERY)
    args: dict[str, Any] = {"save_every": SAVE_EVERY, "resume_from": tmp_path / "base" / "step-00000002"}
    run_as(ranks, tmp_path / "run", variables=job(4711, 0), crash_at=3, **args)
    second = run_as(ranks, tmp_path / "run", steps=0, variables=job(4711, 1), **args)
    assert (second.report.path, second.report.step) == (args["resume_from"], 2)


def resume_in_job(config: SmallModel, root: Path, variables: dict[str, str], manager_args: dict[str, Any]) -> str:
    """The error's name and text, or "step N"."""
    loop = start(config)
    with environment(variables):
        try:
            with open_manager(loop, root, **manager_args) as manager:
                return f"step {manager.resume().step}"
        except MegaresumeError as error:
            return f"{type(error).__name__}: {error}"


def test_j12_a_requeued_job_does_not_begin_again_elsewhere(ranks: Ranks, tmp_path: Path) -> None:
    """A root whose path holds the time of the start is a new one at each requeue."""
    run(ranks, ALONE, tmp_path / "base", 2, save_every=SAVE_EVERY)
    new = tmp_path / "run-of-10-05"

    def resume(root: Path, restarts: int, **manager_args: Any) -> list[str]:
        return ranks.run(resume_in_job, TWO_RANKS, root, job(4711, restarts), manager_args, world_size=2)

    first, second = resume(new, 1)
    assert first == second
    assert first.startswith(CheckpointNotFoundError.__name__)
    for needle in (str(new), "restart 1 of job 4711", "same root", "start_fresh=True"):
        assert needle in first
    from_base = resume(new, 1, resume_from=tmp_path / "base" / "step-00000002")
    assert all("restart 1 of job 4711" in each for each in from_base)
    assert not (new / layout.ATTEMPTS).exists()
    # The first start of a job may begin anywhere, and a restart where the first one was, though that had saved nothing.
    old = tmp_path / "run"
    assert resume(old, 0) == ["step 0", "step 0"]
    assert resume(old, 1) == ["step 0", "step 0"]
    assert resume(new, 1, start_fresh=True) == ["step 0", "step 0"]


def test_which_job_a_process_belongs_to() -> None:
    assert read_job({}) == read_job({"TORCHELASTIC_RUN_ID": "none"})
    elastic = read_job({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (elastic.job_id, elastic.restart_count, elastic.requeued) == ("abc", 2, False)
    slurm = read_job({**job(4711, 1), "TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (slurm.job_id, slurm.restart_count, slurm.requeued) == ("4711", 3, True)
    array = read_job({**job(4713, 0), "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"})
    assert (array.job_id, array.restart_count, array.requeued) == ("4711_2", 0, False)


# --- orphans and retention --------------------------------------------------------------------------------------------


def save_as_an_orphan(config: SmallModel, root: Path) -> tuple[str, list[str], int]:
    """An older start that is still alive when a newer one has claimed the root: what its save says and changes."""
    loop = start(config)
    with open_manager(loop, root, keep_last=1) as older:
        older.resume()
        for step, _ in train_steps(loop, older, 3):
            if step == 2:
                break
        with open_manager(loop, root) as newer:
            newer.resume()
            dist.barrier()
            before = tree(root)
            dist.barrier()
            try:
                older.save()
                said = ""
            except SupersededError as error:
                said = str(error)
            dist.barrier()
            logs = {layout.EVENTS, layout.STEP_LOG}
            changed = [name for name in differences(before, tree(root)) if name not in logs]
            dist.barrier()
            with pytest.raises(Crash), older:
                raise Crash  # ends as the message asks it to
            return said, changed, newer.step


def test_a13_an_orphan_cannot_commit(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, TWO_RANKS, tmp_path, 1, save_every=1)
    (said, changed, step), other = ranks.run(save_as_an_orphan, TWO_RANKS, tmp_path, world_size=2)
    assert (said, changed, step) == other
    assert step == 1
    assert "attempt 3" in said and "attempt 2" in said and "should end" in said
    assert changed == []
    assert [each.step for each in find_candidates(tmp_path)[0]] == [1]


def test_retention_keeps_what_it_did_not_write_and_what_is_off_the_branch(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, ALONE, tmp_path, STEPS, save_every=SAVE_EVERY)
    run_as(ranks, tmp_path, steps=4, **GO_BACK)
    (tmp_path / "step-00000002" / "my-notes.txt").write_text("the good one")
    (tmp_path / "best").mkdir()
    run_as(ranks, tmp_path, steps=8, save_every=1, keep_last=2)
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    # 4.a0002 and 6.a0003 are the abandoned branch's, 7 and 8 the last two of this one; 2 holds somebody's file.
    assert kept == ["step-00000002", "step-00000004.a0002", "step-00000006.a0003", "step-00000007", "step-00000008"]
    assert (tmp_path / "step-00000002" / "my-notes.txt").read_text() == "the good one"
    assert (tmp_path / "best").is_dir()


def break_newest_then_prune(config: SmallModel, root: Path) -> list[str]:
    """Each save's file vanishes before the pruning after it: the newest that is whole must stay, however old."""
    from megaresume import manager as module

    usual = module.prune

    def harm_and_prune(*args: Any, **kwargs: Any) -> Any:
        newest = find_candidates(root)[0][0]
        if newest.step > 1:
            next(newest.path.glob("*.safetensors")).unlink()
        return usual(*args, **kwargs)

    module.prune = harm_and_prune
    loop = start(config)
    try:
        with open_manager(loop, root, save_every=1, keep_last=1) as manager:
            manager.resume()
            for _ in train_steps(loop, manager, 4):
                pass
    finally:
        module.prune = usual
    return sorted(path.name for path in root.glob("step-*"))


def test_a08_retention_never_removes_the_newest_whole_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    (left,) = ranks.run(break_newest_then_prune, ALONE, tmp_path, world_size=1)
    assert "step-00000001" in left
    assert run_as(ranks, tmp_path, config=ALONE, steps=0).report.step == 1


# --- the replay audit -------------------------------------------------------------------------------------------------


def verdicts(root: Path) -> list[tuple[int, str, int, int]]:
    """(attempt, verdict, compared, equal) of every verdict in the event log."""
    events = [json.loads(line) for line in (root / layout.EVENTS).read_text("utf-8").splitlines()]
    return [
        (each["attempt"], each["verdict"], each["compared"], each["equal"])
        for each in events
        if each["event"] == "replay"
    ]


def train_perturbed(config: SmallModel, root: Path, on_rank: int, manager_args: dict[str, Any]) -> tuple[str, int]:
    """Resume, change one weight a little on one rank, train on: (the error, the step where training ended)."""
    loop = start(config)
    manager = open_manager(loop, root, **manager_args)
    try:
        with manager:
            manager.resume()
            if dist.get_rank() == on_rank:
                perturb(loop)
            for _ in train_steps(loop, manager, STEPS):
                pass
    except ReplayDivergedError as error:
        return str(error), manager.step
    return "", manager.step


def perturb(loop: Loop) -> None:
    """One weight of the last layer, in the model and not in its master: the next loss is another one."""
    with torch.no_grad():
        weight = dict(loop.run.chunks[0].named_parameters())
        next(each for name, each in weight.items() if name.endswith("final_layernorm.weight"))[0] += 8.0


def test_replay_verdicts(ranks: Ranks, tmp_path: Path) -> None:
    roots = {name: tmp_path / name for name in ("equal", "diverged", "lr", "data", "nothing")}
    for root in roots.values():
        run(ranks, ALONE, root, STEPS, save_every=2)
    back: dict[str, Any] = {"save_every": 2, "resume_from": 2}
    # Attempt 1 logged and saved all six steps; all but the last start train steps 3 to 6 again.
    run_as(ranks, roots["equal"], config=ALONE, **back)
    ranks.run(train_perturbed, ALONE, roots["diverged"], 0, back, world_size=1)
    run_as(ranks, roots["lr"], override_opt_param_scheduler=True, **back)
    run_as(ranks, roots["data"], config=ALONE, resume_args={"skip_data": False}, **back)
    run_as(ranks, roots["nothing"], config=ALONE, steps=8, save_every=2)
    assert verdicts(roots["equal"]) == [(2, "equal", 4, 4)]
    assert [each[1] for each in verdicts(roots["diverged"])] == ["diverged", "diverged"]
    assert verdicts(roots["diverged"])[-1][3] == 0
    assert verdicts(roots["lr"]) == [(2, "off", 0, 0)]
    assert verdicts(roots["data"]) == [(2, "off", 0, 0)]
    assert verdicts(roots["nothing"]) == [(2, "nothing to compare", 0, 0)]


def test_replay_raise_raises_on_all_ranks_and_saves_nothing_more(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, TWO_RANKS, tmp_path, STEPS, save_every=3)
    before = {path.name: attempt_of(path) for path in tmp_path.glob("step-*")}
    args = {"save_every": 3, "resume_from": 3, "replay": "raise"}
    first, second = ranks.run(train_perturbed, TWO_RANKS, tmp_path, 1, args, world_size=2)
    assert first == second
    text, step = first
    assert layout.STEP_LOG in text and "replay" in text
    assert step <= STEPS
    assert {path.name: attempt_of(path) for path in tmp_path.glob("step-*")} == before
    assert verdicts(tmp_path)[0][1] == "diverged"
    # Which of the two was wrong nobody knows. The next start is compared with the newest and so is stopped as well; the
    # one after that finds that the last two agree, and goes on.
    ((text, _), _) = ranks.run(train_perturbed, TWO_RANKS, tmp_path, -1, args, world_size=2)
    assert text
    assert ranks.run(train_perturbed, TWO_RANKS, tmp_path, -1, args, world_size=2) == [("", STEPS)] * 2
    assert verdicts(tmp_path)[-1] == (4, "equal", 3, 3)
