"""`megaresume status`: what a run is doing and where its time went, told from facts, and from a root on disk."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from megaresume.cli.main import main
from megaresume.launch.history import account, judge
from megaresume.launch.records import End, PastTry, Try
from megaresume.outcome import CRASHED, DAMAGED, FINISHED, REFUSED, STOPPED
from megaresume.store.attempts import Attempt
from megaresume.store.steplog import StepLine

AGAIN, NOT_AGAIN = {"requeued": True, "why": "it has more to do"}, {"requeued": False, "why": "cancelled"}


@pytest.mark.parametrize(
    ("end", "requeued", "silence", "state", "why"),
    [
        (None, None, None, "not started", "no attempt"),
        (None, None, 5.0, "running", "5 s ago"),
        (None, None, 7200.0, "silent", "no sign of life for 2 h 00 min"),
        (None, AGAIN, 7200.0, "waiting to be requeued", "it has more to do"),
        (STOPPED, AGAIN, 7200.0, "waiting to be requeued", "it has more to do"),
        (STOPPED, NOT_AGAIN, 9.0, "stopped", "the words; not queued again: cancelled"),
        (STOPPED, None, 9.0, "stopped", "start it again"),
        (FINISHED, NOT_AGAIN, 9.0, "finished", "all trained"),
        (CRASHED, NOT_AGAIN, 9.0, "crashed", "the words"),
        (REFUSED, NOT_AGAIN, 9.0, "refused", "the same answer"),
        (DAMAGED, NOT_AGAIN, 9.0, "damaged", "the words"),
    ],
)
def test_the_state_is_told_from_the_newest_launch(
    end: str | None, requeued: dict[str, Any] | None, silence: float | None, state: str, why: str
) -> None:
    found = judge(None if end is None else End(end, "the words", 0.0), requeued, silence, supervised=True)
    assert found[0] == state
    assert why in found[1]


def test_a_crash_loop_has_a_state_of_its_own() -> None:
    assert judge(End(CRASHED, "crash loop: 3 tries", 0.0), NOT_AGAIN, 9.0, supervised=True)[0] == "crash loop"


def at(seconds: float) -> str:
    return datetime.fromtimestamp(1_000_000 + seconds, timezone.utc).isoformat(timespec="milliseconds")


def attempt(number: int, start_step: int, started: float, resumed_from: tuple[int, int] | None) -> Attempt:
    return Attempt(number, start_step, resumed_from, "host", 1, "7", number - 1, at(started), "root")


def steps(number: int, first: int, last: int, begin: float, each: float) -> list[StepLine]:
    return [StepLine(number, step, time=at(begin + (step - first + 1) * each)) for step in range(first, last + 1)]


def test_every_second_is_accounted_for() -> None:
    """20 s of start, 10 steps of 2 s, a save of 3 s, 4 steps that are lost, 41 s of nobody, 15 s of start, 6 steps."""
    attempts = [attempt(1, 0, 19.0, None), attempt(2, 10, 103.0, (1, 10))]
    lines = [*steps(1, 1, 10, 20.0, 2.0), *steps(1, 11, 14, 43.0, 2.0), *steps(2, 11, 16, 92.0 + 15.0, 2.0)]
    events: list[dict[str, Any]] = [
        {"attempt": 1, "event": "start", "time": at(20.0), "seconds": 1.0},
        {"attempt": 1, "event": "save", "time": at(43.0), "step": 10, "seconds": 3.0},
        {"attempt": 2, "event": "resume", "time": at(107.0), "seconds": 4.0},
    ]
    tries = [
        PastTry("7.0", Try(1, "7", 1_000_000.0, None, "a", 1, 1, "h", 0), None),
        PastTry("7.1", Try(1, "7", 1_000_092.0, (1, 10), "a", 1, 1, "h", 1), None),
    ]
    times = account(attempts, lines, events, tries, until=None)
    assert times.total == pytest.approx(119.0)
    assert times.resuming == pytest.approx(20.0 + 15.0)
    assert times.saving == pytest.approx(3.0)
    assert times.waiting == pytest.approx(92.0 - 51.0)
    assert (times.lost_steps, times.lost) == (4, pytest.approx(8.0))
    assert times.training + times.lost + times.saving + times.resuming + times.waiting == pytest.approx(times.total)
    assert times.training == pytest.approx(20.0 + 12.0)
    assert times.goodput == pytest.approx(32.0 / 119.0)
    assert account(attempts, lines, events, tries, until=1_000_200.0).waiting == pytest.approx(41.0 + 81.0)


def test_an_empty_root_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: not started (no attempt and no launch is recorded)")
