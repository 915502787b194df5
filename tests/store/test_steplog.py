"""The step log outlives crashes: torn lines, foreign lines and full disks never cost another line."""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaresume.store.steplog import EventLog, StepLine, StepLog, read_events, read_steps
from tests.store.worlds import FaultyOs, no_space, sound_disk


def write(path: Path, attempt: int, *steps: int) -> None:
    log = StepLog(path, attempt)
    for step in steps:
        log.append(step=step, loss=step / 3, grad_norm=0.1 * step, lr=1e-4, consumed_train_samples=8 * step)
    log.sync()
    log.close()


def steps_of(lines: list[StepLine]) -> list[tuple[int, int]]:
    return [(line.attempt, line.step) for line in lines]


def test_lines_come_back_bit_for_bit_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 1, 1, 2, 3)
    write(path, 2, 2, 3)
    lines = read_steps(path)
    assert steps_of(lines) == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
    assert (lines[0].loss, lines[0].grad_norm, lines[0].lr, lines[0].consumed_train_samples) == (1 / 3, 0.1, 1e-4, 8)
    assert steps_of(read_steps(path, after_step=2)) == [(1, 3), (2, 3)]
    assert read_steps(tmp_path / "absent.jsonl") == []


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_comes_back_as_the_same_bits(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("log") / "steps.jsonl"
    log = StepLog(path, 1)
    log.append(step=1, loss=value)
    log.close()
    (line,) = read_steps(path)
    assert line.loss is not None and line.grad_norm is None
    if math.isnan(value):
        assert math.isnan(line.loss)
    else:
        assert struct.pack("<d", line.loss) == struct.pack("<d", value)


def test_s02_the_file_is_strict_json_even_with_nan_and_infinity(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, 1)
    log.append(step=1, loss=float("nan"), grad_norm=float("-inf"), lr=0.5)
    log.close()

    def refuse(text: str) -> None:
        raise AssertionError(text)

    line = json.loads(path.read_bytes(), parse_constant=refuse)
    assert line["loss"] is None and line["loss_hex"] == "nan" and line["grad_norm_hex"] == "-inf" and line["lr"] == 0.5


def test_a_torn_last_line_is_no_error_and_the_next_line_is_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 1, 1, 2)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with caplog.at_level(logging.WARNING):
            assert steps_of(read_steps(path)) in ([(1, 1)], [(1, 1), (1, 2)])
        assert not caplog.records
        write(path, 2, 2, 3)
        assert steps_of(read_steps(path))[-2:] == [(2, 2), (2, 3)]
        caplog.clear()


def test_what_is_no_line_of_ours_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 1, 1)
    with path.open("ab") as file:
        for bad in (b"\0" * 4096, b"\xff\xfe", b"[1]", b'{"step": "5"}', b"NaN", b"x" * 300_000, b""):
            file.write(bad + b"\n")
    write(path, 1, 2)
    with caplog.at_level(logging.WARNING):
        assert steps_of(read_steps(path)) == [(1, 1), (1, 2)]
    assert "5 unreadable lines skipped, the first is line 2" in caplog.text


def test_lines_of_a_later_release_are_read_by_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"new": 1, "step": 7, "attempt": 2, "loss_hex": "0x1p+1", "lr_hex": "zzz", "grad_norm_hex": 3}\n')
    assert read_steps(path) == [StepLine(2, 7, loss=2.0)]


def test_one_write_for_each_line(tmp_path: Path) -> None:
    with sound_disk() as faulty:
        write(tmp_path / "steps.jsonl", 1, 1, 2, 3)
    assert [name for name, _ in faulty.trace] == ["open", "write", "write", "write", "fsync"]


def test_a_full_disk_loses_one_line_aloud_and_never_stops_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"

    def fail(count: int, name: str, target: str) -> str | None:
        return "half" if count == 3 else None

    def full() -> None:
        raise no_space(str(path))

    with FaultyOs(fail, after_half=full), caplog.at_level(logging.ERROR):
        write(path, 1, 1, 2, 3)
    assert "one line is lost" in caplog.text and "No space left" in caplog.text
    assert steps_of(read_steps(path)) == [(1, 1), (1, 3)]


def test_two_processes_appending_at_once_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    child = os.fork()
    if child == 0:
        write(path, 2, *range(200))
        os._exit(0)
    write(path, 1, *range(200))
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(steps_of(read_steps(path))) == [(attempt, step) for attempt in (1, 2) for step in range(200)]


def test_a_long_log_is_read_for_its_last_few_lines_in_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 1, 1)
    line = path.read_bytes()
    with path.open("wb") as file:
        for start in range(0, 100_000, 1000):
            file.write(
                b"".join(line.replace(b'"step":1,', b'"step":%d,' % step) for step in range(start, start + 1000))
            )
    started = time.process_time()
    assert steps_of(read_steps(path, after_step=99_990)) == [(1, step) for step in range(99_991, 100_000)]
    assert time.process_time() - started < 1.0


def test_events_are_marks_for_people(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", 3)
    log.append("saved", step=100, path="step-00000100", note="naïve-模型")
    log.sync()
    log.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event.pop("time") and event == {
        "attempt": 3,
        "event": "saved",
        "step": 100,
        "path": "step-00000100",
        "note": "naïve-模型",
    }
