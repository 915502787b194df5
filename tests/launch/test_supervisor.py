"""`megaresume run` without Slurm: real torchrun, real workers, real signals. One run is stopped in every way there is,
and goes on each time; at the end its log is that of a run nobody touched.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megaresume.launch.history import read_history
from megaresume.store.attempts import read_attempts
from tests.launch.supervised import Supervised, clean_environment, end_of, losses, processes_of, supervise, wait_until

STEPS = 150
STEP_S = "0.1"


@dataclass
class Story:
    """What was seen while the run was stopped again and again."""

    root: Path
    codes: dict[str, int] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    ends: dict[str, dict[str, object]] = field(default_factory=dict)
    left: dict[str, list[int]] = field(default_factory=dict)
    status: dict[str, str] = field(default_factory=dict)

    def chapter_ended(self, name: str, run: Supervised) -> None:
        self.codes[name] = run.finish()
        self.logs[name] = run.text()
        self.ends[name] = end_of(self.root)
        self.left[name] = processes_of(self.root)
        self.status[name] = read_history(self.root, now=time.time()).state


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """A run that nobody stops; it trains while the other one's story, which mostly waits, is being told."""
    with supervise(tmp_path_factory.mktemp("whole") / "root", steps=STEPS) as run:
        yield run


@pytest.fixture(scope="module")
def reference(untouched: Supervised) -> dict[int, str]:
    assert untouched.finish() == 0, untouched.text()
    return losses(untouched.root)


@pytest.fixture(scope="module")
def story(untouched: Supervised, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("story") / "root"
    told = Story(root)
    with supervise(root, steps=STEPS, TRAINEE_STEP_S=STEP_S, TRAINEE_WORKERS="2") as run:
        run.wait_for_step(13)
        told.status["while it runs"] = read_history(root, now=time.time()).state
        for _ in range(3):  # preemption sends three, to every process of the job where proctrack/linuxproc finds them
            run.send_to_all(signal.SIGTERM)
            time.sleep(0.05)
        told.chapter_ended("three SIGTERMs", run)
    with supervise(
        root, steps=STEPS, options=("--run-id", "night.1", "--hang-timeout", "5"), TRAINEE_STEP_S=STEP_S
    ) as run:
        run.wait_for_attempt(2, steps=13)
        os.kill(run.worker(1), signal.SIGKILL)
        run.wait_for_attempt(3, steps=13)
        os.kill(run.worker(0), signal.SIGSTOP)
        run.wait_for_attempt(4, steps=3)
        (root / "launches" / "night.1" / "stop").write_text("the cluster goes down at noon\n")
        told.chapter_ended("crash, hang, stop file", run)
    with supervise(root, steps=STEPS, TRAINEE_STEP_S="0.02") as run:
        wait_until(lambda: len(list((root / "launches").glob("*/try-0001.json"))) == 3, "the record", run)
        run.send(signal.SIGUSR1)  # before torchrun has started a worker
        told.chapter_ended("SIGUSR1 at the start", run)
    with supervise(root, steps=STEPS) as run:
        told.chapter_ended("to the end", run)
    yield told


def test_three_sigterms_to_every_process_are_one_stop_also_with_loader_workers(story: Story) -> None:
    assert story.codes["three SIGTERMs"] == 75
    assert story.ends["three SIGTERMs"]["outcome"] == "stopped"
    assert "SIGTERM" in str(story.ends["three SIGTERMs"]["reason"])
    second = read_attempts(story.root)[1]
    assert second.start_step >= 13, "the step at which it was stopped is where it goes on"
    assert second.start_step % 10 != 0, "no periodic save: it saved because it was asked to"


def test_a_killed_worker_is_restarted_in_place_from_the_last_commit(story: Story) -> None:
    log, third = story.logs["crash, hang, stop file"], read_attempts(story.root)[2]
    assert "try 1 crashed" in log
    assert third.start_step % 10 == 0 and third.start_step >= read_attempts(story.root)[1].start_step
    assert (third.job_id, third.restart_count) == ("night.1", 1)


def test_a_hung_worker_is_killed_with_all_others_and_the_reason_is_said(story: Story) -> None:
    log = story.logs["crash, hang, stop file"]
    assert "try 2 crashed: no progress for 5 s; the last sign of life: step" in log
    assert (read_attempts(story.root)[3].restart_count or 0) >= 2


def test_a_stop_file_stops_the_run_and_its_text_is_the_reason(story: Story) -> None:
    end = story.ends["crash, hang, stop file"]
    assert story.codes["crash, hang, stop file"] == 75
    assert end["outcome"] == "stopped"
    assert "the cluster goes down at noon" in str(end["reason"])


def test_a_signal_while_it_starts_is_kept_and_no_step_is_trained(story: Story) -> None:
    assert story.codes["SIGUSR1 at the start"] == 75
    assert read_attempts(story.root)[5].start_step == read_attempts(story.root)[4].start_step


def test_the_end_is_the_uninterrupted_run_bit_for_bit(story: Story, reference: dict[int, str]) -> None:
    assert story.codes["to the end"] == 0
    assert sorted(reference) == list(range(1, STEPS + 1))
    assert losses(story.root) == reference


def test_nothing_is_left_running(story: Story) -> None:
    assert not any(story.left.values()), story.left


def test_status_says_what_a_run_is_doing(story: Story) -> None:
    assert story.status == {
        "while it runs": "running",
        "three SIGTERMs": "stopped",
        "crash, hang, stop file": "stopped",
        "SIGUSR1 at the start": "stopped",
        "to the end": "finished",
    }
    history = read_history(story.root, now=time.time())
    assert (history.step, history.saved_step, history.attempts, history.crashes) == (STEPS, STEPS, 6, 2)
    times = history.times
    assert 0 < times.lost_steps < 40
    parts = times.training + times.lost + times.saving + times.resuming + times.waiting
    assert parts == pytest.approx(times.total, rel=0.05)
    assert 0 < times.goodput < 1


def test_j08_stops_leave_no_checkpoint_beyond_the_rotation(story: Story) -> None:
    assert len(list(story.root.glob("step-*"))) == 2


def test_a_crash_loop_ends_with_the_reason(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with supervise(
        root, steps=1, options=("--max-crashes", "2"), command=[sys.executable, "-c", "raise SystemExit(3)"]
    ) as run:
        assert run.finish() == 70
    assert end_of(root)["reason"] == (
        "crash loop: 2 tries in a row crashed and no checkpoint was ever committed. The last one: exit code 3"
    )
    assert read_history(root, now=time.time()).state == "crash loop"


def test_a_try_is_recorded_before_it_starts_so_that_a_lost_host_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "root"
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    for run_id in ("lost.0", "lost.1"):
        with supervise(root, steps=1, options=("--run-id", run_id), command=sleeper, SLURM_JOB_ID="4711") as run:
            wait_until((root / "launches" / run_id / "try-0001.json").exists, "the record", run)
            run.process.kill()  # the supervisor and its host are gone at once
    with supervise(
        root, steps=1, options=("--run-id", "lost.2", "--max-crashes", "2"), command=sleeper, SLURM_JOB_ID="4711"
    ) as run:
        assert run.finish() == 70
    assert "ended without a word" in str(end_of_launch(root, "lost.2"))


def test_a_refusal_is_not_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with supervise(root, steps=1, command=["no-such-program"]) as run:
        assert run.finish() == 78
    assert len(list((root / "launches").glob("*/try-*.json"))) == 2  # one try and its end


def test_a_newer_launch_ends_the_older_one(tmp_path: Path) -> None:
    root = tmp_path / "root"
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    with supervise(root, steps=1, options=("--run-id", "old"), command=sleeper) as old:
        wait_until((root / "launches" / "old" / "try-0001.json").exists, "the record", old)
        with supervise(root, steps=1, options=("--run-id", "new"), command=sleeper) as new:
            assert old.finish() == 78
            assert new.process.poll() is None
    assert "superseded: launch new has begun" in str(end_of_launch(root, "old"))


def test_the_same_run_id_is_refused_the_second_time(tmp_path: Path) -> None:
    root = tmp_path / "root"
    command = [sys.executable, "-c", ""]
    with supervise(root, steps=1, options=("--run-id", "one"), command=command) as run:
        assert run.finish() == 0
    with supervise(root, steps=1, options=("--run-id", "one"), command=command) as run:
        assert run.finish() == 78
        assert "was used before" in run.text()


def test_two_supervisors_meet_and_a_failure_of_one_is_everyones(tmp_path: Path) -> None:
    """Two hosts, by files alone: the second is told where to meet, tries again when the first does, ends with it."""
    root = tmp_path / "root"
    script = tmp_path / "torchrun"  # says which rendezvous it was given; the second host's part fails
    script.write_text(
        '#!/bin/sh\necho "given $*"\ncase "$*" in *node-rank=1*) sleep 0.5; exit 9;; esac\nexec sleep 60\n'
    )
    script.chmod(0o755)
    both = ("--run-id", "pair", "--nnodes", "2", "--max-crashes", "2", "--master-addr", "10.0.0.7")
    command = [str(script), "--nproc-per-node", "4", "train.py"]
    with (
        supervise(root, steps=1, options=(*both, "--node-rank", "0"), command=command) as first,
        supervise(root, steps=1, options=(*both, "--node-rank", "1"), command=command) as second,
    ):
        codes = first.finish(), second.finish()
    assert codes == (70, 70)
    for run, rank in ((first, 0), (second, 1)):
        given = [line for line in run.text().splitlines() if line.startswith("given")]
        assert [f"--node-rank={rank}" in line for line in given] == [True, True]
        assert [f"--rdzv-id=pair.{number}" in line for number, line in enumerate(given, 1)] == [True, True]
        assert all("--master-addr=10.0.0.7" in line and "--nproc-per-node 4 train.py" in line for line in given)
    assert "exit code 9" in str(end_of_launch(root, "pair")["reason"])


def end_of_launch(root: Path, run_id: str) -> dict[str, object]:
    import json

    return dict(json.loads((root / "launches" / run_id / "end.json").read_text("utf-8")))


def test_the_command_imports_no_torch() -> None:
    import subprocess

    check = "import megaresume.cli.main, sys; print(*sorted({'torch', 'megatron'} & sys.modules.keys()))"
    ran = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, env=clean_environment(), check=True
    )
    assert ran.stdout.strip() == ""
