"""The thread behind the training: one save at a time, every outcome heard once, and none lost at the program's end."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from megaresume.errors import SaveError
from megaresume.store import commit
from megaresume.store.commit import SaveReport
from megaresume.store.control import ControlPlane
from megaresume.store.discovery import find_candidates
from megaresume.store.writer import Writer
from tests.store.worlds import MemoryStore, claim, run_ranks, save

REPORT = SaveReport(Path("step-00000001"), 1, 0.1, committed=True)


def test_an_outcome_is_there_when_the_save_is_done_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    writer, gate = Writer(), threading.Event()

    def slow() -> SaveReport:
        gate.wait(20)
        return REPORT

    assert writer.take(wait=True) is None
    writer.start(1, slow)
    assert writer.take(wait=False) is None and not writer.failed()
    threading.Timer(0.2, gate.set).start()
    outcome = writer.take(wait=True)
    assert outcome is not None and (outcome.step, outcome.number, outcome.report) == (1, 1, REPORT)
    assert "waiting for the save of step 1" in caplog.text
    assert writer.take(wait=True) is None
    writer.start(2, lambda: REPORT)
    assert writer.take(wait=True).number == 2  # type: ignore[union-attr]
    writer.close()


@pytest.mark.parametrize("error", [SaveError("the disk is full"), ZeroDivisionError("nobody foresaw it")])
def test_a_failure_stays_until_it_is_taken_and_is_in_the_log(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> SaveReport:
        raise error

    writer = Writer()
    writer.start(7, fail)
    writer._thread.join()  # type: ignore[union-attr]
    assert writer.failed()
    assert writer.take(wait=False) is None, "not before all ranks take it"
    outcome = writer.take(wait=True)
    assert outcome is not None and isinstance(outcome.error, SaveError) and str(error) in str(outcome.error)
    assert not writer.failed()
    assert "the save of step 7" in caplog.text and str(error) in caplog.text
    writer.close()


ENDINGS = {"normal": "", "sys.exit": "import sys; sys.exit(0)", "exception": "raise RuntimeError('training failed')"}
PROGRAM = """
import time
from pathlib import Path
from megaresume.errors import SaveError
from megaresume.store.writer import Writer

def save():
    time.sleep(0.5)
    {body}

writer = Writer()
writer.start(1, save)
{ending}
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a15_a_program_that_ends_right_after_its_last_save_waits_for_it(ending: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = PROGRAM.format(body=f"Path({str(done)!r}).touch()", ending=ENDINGS[ending])
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.exists()
    assert (ran.returncode == 0) == (ending != "exception")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a15_a_program_whose_last_save_failed_does_not_end_with_status_0(ending: str) -> None:
    program = PROGRAM.format(body="raise SaveError('no space left')", ending=ENDINGS[ending])
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode != 0
    assert "no space left" in ran.stderr


def test_saves_of_all_ranks_go_on_behind_and_are_committed_in_their_order(tmp_path: Path) -> None:
    """Three ranks, each with a plane for its writer; rank 2's disk is slow, and the training's plane is in use."""
    attempt = claim(tmp_path)
    stores = {"training": MemoryStore(), "plane1": MemoryStore()}
    committed: list[int] = []
    usual = commit._point_latest

    def note(root: Path, target: Path) -> None:
        committed.append(int(target.name[-8:]))
        usual(root, target)

    def rank(plane: ControlPlane) -> list[int]:
        control = ControlPlane(
            stores["training"], plane.rank, 3, timeout_s=20, label="x", connect=lambda name: stores[name]
        )
        behind = control.another()
        writer = Writer()
        numbers = []
        for step in (1, 2, 3):

            def one(step: int = step) -> SaveReport:
                if behind.rank == 2:
                    threading.Event().wait(0.2)
                return save(tmp_path, behind, attempt, step)

            taken = writer.take(wait=True)
            numbers += [taken.step] if taken else []
            writer.start(step, one)
            assert control.decide("train", lambda step=step: step) == step  # the other plane is free
        taken = writer.take(wait=True)
        writer.close()
        return [*numbers, taken.step] if taken else numbers

    commit._point_latest = note
    try:
        results: list[Any] = run_ranks(3, rank, store=MemoryStore())
    finally:
        commit._point_latest = usual
    assert results == [[1, 2, 3]] * 3
    assert committed == [1, 2, 3]
    assert [candidate.step for candidate in find_candidates(tmp_path)[0]] == [3, 2, 1]
