"""Saves behind the training keep every promise of a save that is waited for.

The disk is slowed down or broken at the seam where shards are written; the ranks train on meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaresume.errors import SaveError
from megaresume.store import fs, layout
from megaresume.store.discovery import find_candidates
from megaresume.store.shard import read_header
from tests.harness import Crash, Outcome, assert_continues, digest, go_on, open_manager, run, start, train, train_steps
from tests.ranks import Ranks
from tests.small_models import SmallModel
from tests.test_stop import events, saved_steps, send_myself

TWO = SmallModel(dp=2, num_layers=2, global_batch_size=4)
STEPS = 6


@contextlib.contextmanager
def writing(act: Callable[[str], None]) -> Iterator[None]:
    """`act(path)` runs before each write of a shard's data, on whatever thread."""
    usual = fs.write_vectors

    def write(descriptor: int, buffers: Any) -> None:
        act(os.readlink(f"/proc/self/fd/{descriptor}"))
        usual(descriptor, buffers)

    fs.write_vectors = write
    try:
        yield
    finally:
        fs.write_vectors = usual


def fail(path: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Lines:
        logger = logging.getLogger("megaresume")
        self._before = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("megaresume")
        logger.removeHandler(self)
        logger.setLevel(self._before)


# --- what is in the checkpoint ----------------------------------------------------------------------------------------


def train_with_a_slow_disk(config: SmallModel, root: Path, manager_args: dict[str, Any]) -> tuple[Outcome, list[int]]:
    """Also the steps that were trained while a save was being written."""
    during: list[int] = []
    loop, results = start(config), {}
    with writing(lambda _: time.sleep(0.5)), open_manager(loop, root, **manager_args) as manager:
        report = manager.resume()
        for step, result in train_steps(loop, manager, STEPS):
            results[step] = result
            if manager._saver.writing:
                during.append(step)
    return Outcome(report, results, digest(loop), manager.step, manager.should_stop), during


def payloads(root: Path) -> dict[tuple[int, str], bytes]:
    found = {}
    for candidate in find_candidates(root)[0]:
        for name in candidate.manifest.files:
            path = candidate.path / name
            found[candidate.step, name] = path.read_bytes()[read_header(path).data_start :]
        found[candidate.step, "state"] = (candidate.path / layout.TRAINER_STATE).read_bytes().split(b'"lineage"')[0]
    return found


def test_a_checkpoint_holds_the_values_of_its_step_whatever_is_trained_meanwhile(ranks: Ranks, tmp_path: Path) -> None:
    whole = run(ranks, TWO, tmp_path / "waited for", STEPS, save_every=2, async_save=False)
    behind = ranks.run(train_with_a_slow_disk, TWO, tmp_path / "behind", {"save_every": 2}, world_size=2)
    assert all(during for _, during in behind), "no step was trained during a save: nothing was shown"
    assert_continues([outcome for outcome, _ in behind], whole)
    expected, found = payloads(tmp_path / "waited for"), payloads(tmp_path / "behind")
    assert expected.keys() == found.keys() and len(found) == 9
    assert [key for key in expected if expected[key] != found[key]] == []
    assert saved_steps(tmp_path / "behind") == [2, 4, 6]


# --- one at a time, in order ------------------------------------------------------------------------------------------


def save_faster_than_the_disk(config: SmallModel, root: Path) -> tuple[list[str], list[str]]:
    loop, seen = start(config), []
    with Lines() as log, writing(lambda _: time.sleep(0.4)), open_manager(loop, root, save_every=1) as manager:
        manager.resume()
        for _ in train_steps(loop, manager, 3):
            seen.append(",".join(sorted(path.name for path in root.glob("step-*"))))
    return log.lines, seen


def test_a_second_save_during_the_first_waits_and_says_so(ranks: Ranks, tmp_path: Path) -> None:
    for lines, seen in ranks.run(save_faster_than_the_disk, TWO, tmp_path, world_size=2):
        assert "waiting for the save of step 1, which is still being written" in lines
        first, second = layout.step_directory(1), layout.step_directory(2)
        assert seen == ["", first, f"{first},{second}"], "each save was begun when the one before was committed"
    assert saved_steps(tmp_path) == [1, 2, 3]


def two_runs(config: SmallModel, roots: list[Path]) -> None:
    loop = start(config)
    with (
        writing(lambda path: time.sleep(0.4 if "first" in path else 0.0)),
        open_manager(loop, roots[0], save_every=1, async_save=True, stop_signals=()) as first,
        open_manager(loop, roots[1], save_every=1, stop_signals=()) as second,
    ):
        first.resume()
        second.resume()
        for batch in range(2):
            loop.run.train_step(batch)
            loop.sampler.advance()
            for manager in (first, second):
                manager._objects.data.clear()
                manager._scheduler_position = None
                manager.end_step(samples=config.global_batch_size)


def test_two_managers_of_one_process_do_not_meet(ranks: Ranks, tmp_path: Path) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    ranks.run(two_runs, TWO, roots, world_size=2)
    assert [saved_steps(root) for root in roots] == [[1, 2], [1, 2]]


# --- stopping and ending ----------------------------------------------------------------------------------------------


def stop_during_a_save(config: SmallModel, root: Path) -> Outcome:
    """The signal comes while step 2 is being written; the save goes on until long after the next step's end."""
    loop, results, sent = start(config), {}, threading.Event()

    def slow(path: str) -> None:
        if layout.staging_directory(2, 1) in path:
            if dist.get_rank() == 1 and not sent.is_set():
                sent.set()
                send_myself("SIGTERM")
            time.sleep(1.0)

    with writing(slow), open_manager(loop, root, save_every=2) as manager:
        report = manager.resume()
        for step, result in train_steps(loop, manager, STEPS):
            results[step] = result
            if step == 2:
                sent.wait(10) if dist.get_rank() == 1 else None
    return Outcome(report, results, digest(loop), manager.step, manager.should_stop)


def test_a_stop_during_a_save_finishes_it_and_saves_where_it_stopped(ranks: Ranks, tmp_path: Path) -> None:
    whole = run(ranks, TWO, tmp_path / "whole", STEPS)
    stopped = ranks.run(stop_during_a_save, TWO, tmp_path / "root", world_size=2)
    last = stopped[0].step
    assert 2 < last < STEPS and all(each.stopped and each.step == last for each in stopped)
    assert saved_steps(tmp_path / "root") == [2, last]
    assert_continues(run(ranks, TWO, tmp_path / "root", STEPS), whole)


def crash_right_after_a_save(config: SmallModel, root: Path, how: str) -> str:
    loop = start(config)
    try:
        with writing(lambda _: time.sleep(0.5)), open_manager(loop, root, save_every=3) as manager:
            manager.resume()
            for step, _ in train_steps(loop, manager, STEPS):
                if step == 3:
                    raise SystemExit(0) if how == "sys.exit" else Crash
    except (Crash, SystemExit) as error:
        return type(error).__name__
    return "no error"


@pytest.mark.parametrize("how", ["sys.exit", "exception"])
def test_a15_the_last_save_is_not_lost_when_the_loop_is_left(ranks: Ranks, tmp_path: Path, how: str) -> None:
    expected = "SystemExit" if how == "sys.exit" else "Crash"
    assert ranks.run(crash_right_after_a_save, TWO, tmp_path, how, world_size=2) == [expected] * 2
    assert saved_steps(tmp_path) == [3]


def test_saves_over_the_files_of_removed_checkpoints_resume_exactly(ranks: Ranks, tmp_path: Path) -> None:
    whole = run(ranks, TWO, tmp_path / "whole", STEPS)
    arguments = {"save_every": 1, "keep_last": 1, "recycle": True}
    run(ranks, TWO, tmp_path / "root", STEPS, crash_at=4, **arguments)
    assert len(list((tmp_path / "root").glob(f"{layout.TRASH_PREFIX}*/*.safetensors"))) == 2, "one for each rank"
    resumed = run(ranks, TWO, tmp_path / "root", STEPS, verify="first", **arguments)
    assert resumed[0].report.step == 4
    assert_continues(resumed, whole)
    assert [candidate.step for candidate in find_candidates(tmp_path / "root")[0]] == [STEPS]


# --- failures ---------------------------------------------------------------------------------------------------------


def train_with_failures(config: SmallModel, root: Path, failing: list[int], ending: str) -> dict[str, Any]:
    """Rank 1 finds no space for the saves of the steps in `failing`. What each rank saw."""
    loop, seen = start(config), {"error": None, "error_step": None}

    def act(path: str) -> None:
        if dist.get_rank() == 1 and any(layout.staging_directory(step, 1) in path for step in failing):
            fail(path)

    manager = open_manager(loop, root, save_every=2)
    with Lines() as log, writing(act):
        try:
            with manager:
                manager.resume()
                for step, _ in train_steps(loop, manager, STEPS):
                    if step == 2 and ending == "sys.exit":
                        raise SystemExit(0)
        except (SaveError, SystemExit) as error:
            seen |= {"error": f"{type(error).__name__}: {error}", "error_step": manager.step}
    return {**seen, "lines": log.lines, "step": manager.step, "digest": digest(loop)}


def test_a_failed_save_is_said_and_recorded_and_the_next_one_succeeds(ranks: Ranks, tmp_path: Path) -> None:
    whole = run(ranks, TWO, tmp_path / "whole", STEPS)
    seen = ranks.run(train_with_failures, TWO, tmp_path / "root", [2], "", world_size=2)
    for each, reference in zip(seen, whole, strict=True):
        assert each["error"] is None and each["step"] == STEPS
        assert any("the save of step 2" in line and "ENOSPC" in line for line in each["lines"])
        assert each["digest"] == reference.state
    (failure,) = events(tmp_path / "root", "save_failed")
    assert failure["step"] == 2 and "rank 1" in failure["error"] and "untouched" in failure["error"]
    assert saved_steps(tmp_path / "root") == [4, 6]


def test_two_failed_saves_in_a_row_end_the_run_on_all_ranks_at_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(train_with_failures, TWO, tmp_path, [2, 4], "", world_size=2)
    assert first["error"] == second["error"] and first["error"].startswith("SaveError: ")
    assert "rank 1" in first["error"] and "No space left" in first["error"]
    assert first["error_step"] == second["error_step"] in (5, 6)
    assert [each["step"] for each in events(tmp_path, "save_failed")] == [2, 4]
    assert find_candidates(tmp_path)[0] == []


def test_a15_leaving_with_status_0_after_a_failed_save_raises_its_error(ranks: Ranks, tmp_path: Path) -> None:
    seen = ranks.run(train_with_failures, TWO, tmp_path, [2], "sys.exit", world_size=2)
    assert all(each["error"].startswith("SaveError: ") for each in seen)
    assert [each["step"] for each in events(tmp_path, "save_failed")] == [2]


def test_closing_after_a_failed_save_saves_again(ranks: Ranks, tmp_path: Path) -> None:
    """The save of the last step fails behind the training; leaving the block makes it good."""
    (outcome,) = ranks.run(fail_the_last_once, SmallModel(num_layers=2, global_batch_size=2), tmp_path, world_size=1)
    assert outcome == STEPS
    assert [each["step"] for each in events(tmp_path, "save_failed")] == [STEPS]
    assert saved_steps(tmp_path) == [3, STEPS]


def fail_the_last_once(config: SmallModel, root: Path) -> int:
    loop, failed = start(config), []

    def once(path: str) -> None:
        if layout.staging_directory(STEPS, 1) in path and not failed:
            failed.append(path)
            fail(path)

    with writing(once):
        return go_on(loop, root, STEPS, save_every=3).step


def test_a_synchronous_manager_raises_at_once(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="No space left"):
        ranks.run(fail_waited_for, SmallModel(num_layers=2, global_batch_size=2), tmp_path, world_size=1)
    assert [each["step"] for each in events(tmp_path, "save_failed")] == [2]


def fail_waited_for(config: SmallModel, root: Path) -> None:
    with writing(fail):
        train(config, root, STEPS, save_every=2, async_save=False)
