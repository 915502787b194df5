"""A run that is asked to stop saves one checkpoint, the same on all ranks, and tells the loop; so does one that ends.

Real signals to real ranks. When a scheduler sends them and what a launcher does next is tested with the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaresume import DataParallelBatchSampler, ResumeManager, read_progress
from megaresume.store import fs, layout
from megaresume.store.discovery import check_files, find_candidates
from tests.harness import Outcome, assert_continues, digest, open_manager, run, start, train_steps
from tests.ranks import Ranks
from tests.small_models import SmallModel

FOUR = SmallModel(tp=2, dp=2, num_layers=2, global_batch_size=4)
TWO = SmallModel(tp=2, num_layers=2, global_batch_size=2)
STEPS = 6


def send_myself(name: str) -> None:
    os.kill(os.getpid(), signal.Signals[name])


def events(root: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (root / layout.EVENTS).read_text("utf-8").splitlines()]
    return [each for each in lines if each["event"] == name]


def saved_steps(root: Path) -> list[int]:
    """The steps that were saved, in order, each of them whole."""
    for candidate in find_candidates(root)[0]:
        check_files(candidate)
    return [each["step"] for each in events(root, "save")]


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return run(ranks, FOUR, tmp_path_factory.mktemp("whole") / "root", STEPS)


# --- a signal in the training loop ------------------------------------------------------------------------------------


def train_and_signal(config: SmallModel, root: Path, signalled: dict[int, tuple[int, str, float]]) -> Outcome:
    """Each rank of `signalled` sends itself a signal in the step after the one given, so many seconds into it."""
    loop = start(config)
    results = {}
    with open_manager(loop, root) as manager:
        report = manager.resume()
        for step, result in train_steps(loop, manager, STEPS):
            results[step] = result
            if signalled.get(dist.get_rank(), (0, "", 0.0))[0] == step:
                _, name, delay = signalled[dist.get_rank()]
                time.sleep(delay)
                send_myself(name)
    return Outcome(report, results, digest(loop), manager.step, manager.should_stop)


SIGNALLED: dict[str, dict[int, tuple[int, str, float]]] = {
    "one rank, SIGTERM": {2: (2, "SIGTERM", 0.0)},
    "one rank, SIGUSR1": {1: (2, "SIGUSR1", 0.0)},
    "all ranks around a step's end": {
        0: (2, "SIGUSR1", 0.0),
        1: (2, "SIGUSR1", 0.05),
        2: (3, "SIGUSR1", 0.0),
        3: (3, "SIGTERM", 0.1),
    },
}


@pytest.mark.parametrize("signalled", SIGNALLED.values(), ids=SIGNALLED)
def test_j03_all_ranks_save_the_same_step_and_stop(
    ranks: Ranks, whole: list[Outcome], tmp_path: Path, signalled: dict[int, tuple[int, str, float]]
) -> None:
    stopped = ranks.run(train_and_signal, FOUR, tmp_path, signalled, world_size=4)
    # Told in step 3, at whose end the ranks say it to each other; read, saved and stopped at the end of step 4.
    assert [(each.step, each.stopped) for each in stopped] == [(4, True)] * 4
    assert saved_steps(tmp_path) == [4]
    assert read_progress(tmp_path).global_step == 4
    resumed = run(ranks, FOUR, tmp_path, STEPS)
    assert [each.stopped for each in resumed] == [False] * 4
    assert_continues(resumed, whole)


def stop_and_see_the_handlers(config: SmallModel, root: Path) -> list[bool]:
    """Whether the handlers from before are there again, after a stop and after an error in the constructor."""
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    loop = start(config)
    with open_manager(loop, root, stop_signals=("SIGUSR2",)) as manager:
        manager.resume()
        untouched = signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]
        for step, _ in train_steps(loop, manager, STEPS):
            if step == 1:
                send_myself("SIGUSR2")
    stopped = manager.should_stop and manager.step == 3
    with pytest.raises(Exception, match="SIGNOTHING"):
        open_manager(loop, root, stop_signals=("SIGNOTHING",))
    return [untouched, stopped, {name: signal.getsignal(name) for name in before} == before]


def test_signals_are_the_callers_again_afterwards(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(stop_and_see_the_handlers, TWO, tmp_path, world_size=2) == [[True] * 3] * 2


# --- a signal where no step ends --------------------------------------------------------------------------------------


def validate_long(config: SmallModel, root: Path) -> tuple[int, int, bool, int]:
    """After step 2, validate up to 200 batches; in the fourth, rank 1 gets the signal. Returns where all ended."""
    loop = start(config)
    valid = DataParallelBatchSampler(
        1000, micro_batch_size=config.micro_batch_size, global_batch_size=config.global_batch_size, shuffle=False
    )
    with ResumeManager(
        root,
        model=loop.run.chunks,
        optimizer=loop.run.optimizer,
        scheduler=loop.run.scheduler,
        data={"train": loop.sampler, "valid": valid},
    ) as manager:
        manager.resume()
        for step, _ in train_steps(loop, manager, STEPS):
            batch = 0
            while step == 2 and batch < 200 and not manager.should_stop:
                batch += 1
                manager.advance("valid")
                if batch == 4 and dist.get_rank() == 1:
                    send_myself("SIGTERM")
                manager.poll()
            if manager.should_stop:
                break
        return batch, manager.step, manager.should_stop, valid.consumed_samples


def test_j04_a_long_validation_is_left_at_once(ranks: Ranks, tmp_path: Path) -> None:
    consumed = 4 * FOUR.global_batch_size
    assert ranks.run(validate_long, FOUR, tmp_path, world_size=4) == [(4, 2, True, consumed)] * 4
    assert saved_steps(tmp_path) == [2]
    assert read_progress(tmp_path).state.consumed_valid_samples == consumed


def signal_in_a_save(config: SmallModel, root: Path) -> Outcome:
    """Rank 1 gets the signal while it writes its file of step 2."""
    usual = fs.write_vectors

    def interrupted(descriptor: int, buffers: list[memoryview]) -> None:
        usual(descriptor, buffers[: len(buffers) // 2])
        if dist.get_rank() == 1 and "step-00000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            send_myself("SIGTERM")
        usual(descriptor, buffers[len(buffers) // 2 :])

    loop = start(config)
    results = {}
    fs.write_vectors = interrupted  # type: ignore[assignment]
    try:
        with open_manager(loop, root, save_every=2) as manager:
            report = manager.resume()
            results.update(train_steps(loop, manager, STEPS))
    finally:
        fs.write_vectors = usual
    return Outcome(report, results, digest(loop), manager.step, manager.should_stop)


def test_a_signal_in_a_save_harms_neither_the_save_nor_the_stop(ranks: Ranks, tmp_path: Path) -> None:
    whole = run(ranks, TWO, tmp_path / "whole", STEPS)
    stopped = ranks.run(signal_in_a_save, TWO, tmp_path / "root", world_size=2)
    assert [(each.step, each.stopped) for each in stopped] == [(4, True)] * 2
    assert saved_steps(tmp_path / "root") == [2, 4]
    assert_continues(run(ranks, TWO, tmp_path / "root", STEPS, save_every=2), whole)


# --- the end of a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps, saved", [(5, [3, 5]), (6, [3, 6])], ids=["off the schedule", "on it"])
def test_a21_s13_the_last_step_is_saved_once(ranks: Ranks, tmp_path: Path, steps: int, saved: list[int]) -> None:
    run(ranks, TWO, tmp_path, steps, save_every=3)
    assert saved_steps(tmp_path) == saved
    # A finished run that is started again trains nothing and saves nothing; with a further target it goes on.
    for outcome in run(ranks, TWO, tmp_path, steps, save_every=3):
        assert (outcome.report.step, outcome.step, outcome.steps) == (steps, steps, {})
    assert saved_steps(tmp_path) == saved
    assert run(ranks, TWO, tmp_path, steps + 1, save_every=3)[0].step == steps + 1


def leave_in(config: SmallModel, root: Path, way: str) -> tuple[int, list[str]]:
    """Leave the `with` block by an error after step 3, or `close` twice after it."""
    loop = start(config)
    before = signal.getsignal(signal.SIGTERM)
    manager = open_manager(loop, root, save_every=2)
    said: list[str] = []
    uses: list[Callable[[], Any]] = [manager.end_step, manager.save, manager.poll, manager.resume]
    try:
        with manager:
            manager.resume()
            for step, _ in train_steps(loop, manager, STEPS):
                if step == 3 and way == "error":
                    raise ZeroDivisionError
                if step == 3:
                    break
            manager.close()
    except ZeroDivisionError:
        said.append("error came through")
    for use in uses:
        try:
            use()
        except ValueError as error:
            said.append(str(error))
    if signal.getsignal(signal.SIGTERM) != before:
        said.append("the signal handler is still there")
    return manager.step, said


@pytest.mark.parametrize("way, saved", [("error", [2]), ("close", [2, 3])])
def test_an_error_saves_nothing_and_close_once(ranks: Ranks, tmp_path: Path, way: str, saved: list[int]) -> None:
    closed = ["this ResumeManager is closed"] * 4
    expected = ["error came through", *closed] if way == "error" else closed
    assert ranks.run(leave_in, TWO, tmp_path, way, world_size=2) == [(3, expected)] * 2
    assert saved_steps(tmp_path) == saved


def end_early(config: SmallModel, root: Path) -> list[str]:
    """What the loop may not do yet."""
    loop = start(config)
    said = []
    with open_manager(loop, root) as manager:
        for use in (manager.end_step, manager.save, manager.poll):
            try:
                use()
            except ValueError as error:
                said.append(str(error))
    return said


def test_nothing_is_counted_or_saved_before_the_resume(ranks: Ranks, tmp_path: Path) -> None:
    (said,) = ranks.run(end_early, SmallModel(num_layers=2, global_batch_size=2), tmp_path, world_size=1)
    assert len(said) == 3 and all("call resume() first" in each for each in said)
    assert [path.name for path in tmp_path.iterdir() if path.name != layout.ATTEMPTS] == []
