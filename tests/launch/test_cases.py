"""Cases of being stopped and started again that others have met, each named by its number, and what users copy."""

from __future__ import annotations

import json
import logging
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaresume import DataParallelBatchSampler, ResumableDataLoader, ResumeManager, read_progress, supervised
from megaresume.cli.main import main
from megaresume.errors import CheckpointNotFoundError
from megaresume.launch import sbatch
from megaresume.store.attempts import read_attempts
from megaresume.store.commit import SaveReport
from megaresume.store.steplog import read_steps
from megaresume.store.writer import Writer
from tests.launch.supervised import REPOSITORY, TRAINEE, clean_environment, losses
from tests.launch.trainee import Samples
from tests.ranks import Ranks

STOPS = (signal.SIGTERM, signal.SIGUSR1)
JOB = {"SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": "1"}


def train(root: Path, steps: int, *, signal_after: float | None = None, **manager_args: object) -> ResumeManager:
    """One small run in this process up to a step or a stop; a signal comes so many seconds after the resume.

    A negative number: after the resume has begun.
    """
    torch.manual_seed(5)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sampler = DataParallelBatchSampler(64, micro_batch_size=2, global_batch_size=4, seed=3)
    with ResumeManager(root, model=model, optimizer=optimizer, data={"train": sampler}, **manager_args) as manager:  # type: ignore[arg-type]
        timer = threading.Timer(abs(signal_after or 0.0), os.kill, (os.getpid(), random.choice(STOPS)))
        if signal_after is not None and signal_after < 0:
            timer.start()
        manager.resume()
        if signal_after is not None and signal_after >= 0:
            timer.start()
        batches = iter(ResumableDataLoader(Samples(), batch_sampler=sampler))
        while manager.step < steps and not manager.should_stop:
            optimizer.zero_grad()
            total = torch.zeros(())
            for _ in range(manager.num_microbatches):
                loss = (model(next(batches)) + torch.rand(())).square().mean()
                loss.backward()
                total += loss.detach()
            optimizer.step()
            manager.end_step(loss=total / manager.num_microbatches)
    return manager


def stop_at_random_moments(directory: Path, runs: int, times: int) -> dict[str, int]:
    """On a rank: train, be signalled, start again, so many times in each of so many runs; returns the steps reached."""
    logging.getLogger("megaresume").setLevel(logging.ERROR)
    moments = random.Random(11)
    reached = {}
    for name in map(str, range(runs)):
        step = 0
        for _ in range(times):
            manager = train(
                directory / name, 10**9, signal_after=moments.uniform(-0.01, 0.04), save_every=7, keep_last=2
            )
            assert manager.should_stop and manager.step >= step
            step = manager.step
        reached[name] = step
    return reached


def test_j01_j08_signals_at_200_random_moments_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    (reached,) = ranks.run(stop_at_random_moments, tmp_path, 10, 20, world_size=1, timeout_s=240)
    ranks.run(_train_quietly, tmp_path / "whole", max(reached.values()), world_size=1)
    whole = losses(tmp_path / "whole")
    assert sum(reached.values()) > 200
    for name, step in reached.items():
        root = tmp_path / name
        assert len(read_attempts(root)) == 20
        assert losses(root) == {each: whole[each] for each in range(1, step + 1)}
        assert len(list(root.glob("step-*"))) <= 2, "emergency checkpoints are in the rotation too"


def _train_quietly(root: Path, steps: int) -> None:
    logging.getLogger("megaresume").setLevel(logging.ERROR)
    train(root, steps)


# --- the end of the job's time ----------------------------------------------------------------------------------------


def test_the_run_stops_by_itself_when_the_jobs_time_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megaresume")
    train(tmp_path, 4, save_every=2)  # from which it learns how long a save takes
    manager = train(tmp_path, 10**9, save_every=1000, job_end=time.time() + 21.5)
    assert manager.should_stop
    assert 4 < manager.step < 10**9
    assert read_progress(tmp_path).global_step == manager.step
    assert "the job ends in" in caplog.text


def test_the_line_of_a_step_is_logged_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash right after a commit: the replay begins after that step, so nobody would write its line any more."""
    logged: dict[int, list[int]] = {}
    start = Writer.start

    def look(writer: Writer, step: int, save: Callable[[], SaveReport]) -> None:
        logged[step] = [line.step for line in read_steps(tmp_path / "steps.jsonl")]
        start(writer, step, save)

    monkeypatch.setattr(Writer, "start", look)
    train(tmp_path, 5, save_every=2)
    assert logged == {2: [1, 2], 4: [1, 2, 3, 4]}


def test_a_save_that_cannot_be_finished_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes so long that the job is about to be killed when it ends: the checkpoint of a step ago must do."""
    late = 0.0
    clock = types.SimpleNamespace(time=lambda: time.time() + late)
    monkeypatch.setattr("megaresume.walltime.time", clock)
    train(tmp_path, 4, save_every=2)

    class Slow(torch.nn.Linear):
        def forward(self, features: torch.Tensor) -> torch.Tensor:
            nonlocal late
            late = 1000.0
            return super().forward(features)

    monkeypatch.setattr(torch.nn, "Linear", Slow)
    manager = train(tmp_path, 10**9, save_every=1000, job_end=time.time() + 1000.0)
    assert manager.should_stop
    assert manager.step == 6, "a stop is agreed on one step after it is wanted"
    assert read_progress(tmp_path).global_step == 4


# --- J02: the job script, with a Slurm that is not there -----------------------------------------------------------

TORCHRUN = """
import os, sys, time
from pathlib import Path
from megaresume.outcome import write_status
from megaresume import supervised
Path(os.environ["FAKES"], "training").touch()
files = [Path(os.environ[name]) for name in (supervised.STOP_FILE, supervised.SHARED_STOP_FILE)]
while not any(path.exists() for path in files):
    time.sleep(0.02)
write_status(Path(os.environ[supervised.STATUS_FILE]), "stopped", "as asked", step=12)
sys.exit(1)  # as torchrun does after a clean stop
"""
SRUN = 'while [ "$1" != megaresume ]; do shift; done\nexport SLURM_STEP_NUM_NODES=1 SLURM_NODEID=0\nexec "$@"\n'
SCONTROL = """
echo "$*" >> "$FAKES/asked"
case "$*" in
    *"show job"*) echo "JobId=4711 JobState=RUNNING Reason=None Requeue=1 Restarts=1 BatchFlag=1" ;;
    requeue*) exit ${REQUEUE_CODE:-0} ;;
esac
"""


def run_job_script(
    tmp_path: Path, number: str, *, to: str, way: str = "scontrol", scontrol: str | None = SCONTROL, **more: str
) -> tuple[int, str, list[str]]:
    """(exit code, log, what scontrol was asked) of a rendered job script that gets a signal while it trains."""
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    programs = {"srun": f"#!/bin/sh\n{SRUN}", "scontrol": None if scontrol is None else f"#!/bin/sh\n{scontrol}"}
    programs["torchrun"] = f"#!{sys.executable}\n{TORCHRUN}"
    programs["megaresume"] = f'#!/bin/sh\nexec {sys.executable} -m megaresume.cli "$@"\n'
    for name, text in programs.items():
        if text is not None:
            (fakes / name).write_text(text)
            (fakes / name).chmod(0o755)
    script = sbatch.render(
        sbatch.JobScript(root=str(tmp_path / "root"), command=("torchrun", "train.py"), requeue_by=way)
    )
    (tmp_path / "job.sh").write_text(script)
    path = f"{fakes}:{os.environ['PATH']}"
    environment = clean_environment(**JOB, SLURM_JOB_NODELIST="n1", FAKES=str(fakes), PATH=path, **more)
    with (tmp_path / "log").open("wb") as log:
        batch = subprocess.Popen(["bash", str(tmp_path / "job.sh")], env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (fakes / "training").exists():
            assert time.monotonic() < deadline and batch.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        supervisor = batch.pid if to == "batch" else _child_of(batch.pid)
        os.kill(supervisor, signal.Signals[number])
        code = batch.wait(60)
    finally:
        batch.kill()
        batch.wait()
    asked = (fakes / "asked").read_text().splitlines() if (fakes / "asked").exists() else []
    return code, (tmp_path / "log").read_text(), asked


def _child_of(pid: int) -> int:
    import psutil

    return next(each.pid for each in psutil.Process(pid).children() if "megaresume.cli" in each.cmdline())


@pytest.mark.parametrize(
    ("number", "to"), [("SIGUSR1", "batch"), ("SIGTERM", "batch"), ("SIGTERM", "step"), ("SIGUSR2", "step")]
)
def test_j02_a_signal_is_one_stop_and_one_requeue(tmp_path: Path, number: str, to: str) -> None:
    code, log, asked = run_job_script(tmp_path, number, to=to)
    assert asked == ["-o show job 4711", "requeue 4711"]
    assert code == 75
    assert "queued again: the run has saved and stopped: as asked" in log
    written = json.loads((tmp_path / "root" / "launches" / "4711.1" / "requeue.json").read_text())
    assert written["requeued"] is True


def test_j02_the_exit_code_can_be_the_request(tmp_path: Path) -> None:
    code, _, asked = run_job_script(tmp_path, "SIGUSR1", to="batch", way="exit-code")
    assert (code, asked) == (75, ["-o show job 4711"])


def test_j02_a_requeue_that_fails_is_said_and_changes_the_exit_code(tmp_path: Path) -> None:
    code, log, asked = run_job_script(tmp_path, "SIGUSR1", to="batch", REQUEUE_CODE="1")
    assert code == 71
    assert asked == ["-o show job 4711", "requeue 4711"]
    assert "NOT queued again: it should be, but scontrol requeue 4711: exit code 1" in log


@pytest.mark.parametrize("scontrol", ["exit 1", "echo nothing known"])
def test_j02_a_slurm_that_does_not_answer_requeues_nothing(tmp_path: Path, scontrol: str) -> None:
    code, log, _ = run_job_script(tmp_path, "SIGUSR1", to="batch", scontrol=scontrol)
    assert code == 71
    assert "NOT queued again: Slurm cannot be asked about job 4711" in log


def test_j02_a_cancelled_job_stays_cancelled(tmp_path: Path) -> None:
    code, log, asked = run_job_script(
        tmp_path, "SIGTERM", to="batch", scontrol=SCONTROL.replace("RUNNING", "COMPLETING")
    )
    assert (code, asked) == (76, ["-o show job 4711"])
    assert "NOT queued again: the job is COMPLETING: cancelled" in log


# --- J12, J14 -------------------------------------------------------------------------------------------------------


def test_j12_a_requeued_job_that_finds_nothing_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("megaresume.watch.find_job_end", lambda given: None)
    with pytest.raises(CheckpointNotFoundError, match="restart 1 of job 4711"):
        train(tmp_path / "2026-11-30", 3)
    # Stopped before it came to resume(), the first start has left its record alone: this is the right root.
    monkeypatch.setenv(supervised.EARLIER_TRIES, "1")
    assert train(tmp_path / "2026-11-30", 3).step == 3


def test_j14_elastic_restarts_go_on_from_the_last_commit_and_not_from_the_base(tmp_path: Path) -> None:
    """By launch/torchrun.sh: the base named in the arguments is taken once; a worker that dies resumes what it had."""
    base, root, programs = tmp_path / "base", tmp_path / "root", tmp_path / "bin"
    programs.mkdir()
    (programs / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    (programs / "torchrun").chmod(0o755)

    def start(steps: int, into: Path, **more: str) -> str:
        environment = clean_environment(
            TRAINEE_ROOT=str(into),
            TRAINEE_STEPS=str(steps),
            NPROC_PER_NODE="2",
            PATH=f"{programs}:{os.environ['PATH']}",
            **more,
        )
        command = ["bash", str(REPOSITORY / "launch" / "torchrun.sh"), str(TRAINEE)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stderr

    start(20, base)
    log = start(60, root, TRAINEE_FROM=str(base / "step-00000020"), TRAINEE_DIE="43", TRAINEE_STEP_S="0.1")
    attempts = read_attempts(root)
    assert [(each.start_step, each.resumed_from) for each in attempts] == [(20, None), (40, (1, 40))]
    assert attempts[0].restart_count == 0 and attempts[1].restart_count == 1
    assert "is passed over" in log and "has checkpoints of its own, the newest is step 40" in log


# --- what users copy --------------------------------------------------------------------------------------------------


def test_the_copied_job_script_is_what_render_gives(capsys: pytest.CaptureFixture[str]) -> None:
    copied = (REPOSITORY / "launch" / "slurm" / "train.sbatch").read_text("utf-8")
    lines = copied.splitlines()
    command = copied[copied.index("torchrun --nproc") : copied.index(" &\nsrun=$!")]
    training = shlex.split(command.replace("\\\n", "").replace('"$root"', "/shared/checkpoints/gpt"))
    assert lines[0] == "#!/bin/bash"
    options = "--root /shared/checkpoints/gpt --job-name gpt --nodes 2 --gpus-per-node 8 --partition gpu"
    assert main(["slurm", "render", *options.split(), "--venv", "/shared/venv", "--", *training]) == 0
    assert capsys.readouterr().out == copied


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ("--array 0-3", ["#SBATCH --array=0-3", "#SBATCH --output=%x-%A_%a.log", "root=/r/task-$SLURM_ARRAY_TASK_ID"]),
        ("--account a --time 1-00:00:00", ["#SBATCH --account=a", "#SBATCH --time=1-00:00:00"]),
        ("--signal-lead 300 --requeue-limit 7", ["#SBATCH --signal=B:USR1@300", "--limit 7"]),
        ("--sbatch=--qos=high --sbatch=--exclusive", ["#SBATCH --qos=high", "#SBATCH --exclusive"]),
        ("--venv /v", ["source /v/bin/activate"]),
        ("", ["#SBATCH --requeue", '--save "$root" &']),
    ],
)
def test_options_come_out_where_they_belong(options: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["slurm", "render", "--root", "/r", *options.split(), "--", "torchrun", "train.py", "--save", "/r"]) == 0
    )
    script = capsys.readouterr().out
    for line in lines:
        assert line in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_a_container_comes_before_the_supervisor(capsys: pytest.CaptureFixture[str]) -> None:
    container = ["--container", "apptainer exec --nv image.sif"]
    assert main(["slurm", "render", "--root", "/r", *container, "--", "torchrun", "train.py"]) == 0
    assert "--kill-on-bad-exit=0 apptainer exec --nv image.sif \\\n    megaresume run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["slurm", "render", "--root", "/r", "--", "python", "train.py"],
        ["slurm", "render", "--root", "/r", "--time", "soon", "--", "torchrun", "x.py"],
        ["slurm", "render", "--root", "/r", "--job-name", "a\n#SBATCH --x", "--", "torchrun", "x.py"],
        ["slurm", "requeue", "--root", "/r", "--run-id", "1.0"],
        ["run", "--root", "/r", "--nnodes", "2", "--node-rank", "2", "--run-id", "a", "--", "torchrun", "x.py"],
        ["run", "--root", "/r", "--nnodes", "2", "--node-rank", "0", "--master-addr", "h", "--", "torchrun", "x.py"],
        ["run", "--root", "/r", "--nnodes", "2", "--node-rank", "0", "--run-id", "a", "--", "torchrun", "x.py"],
        ["status", "/no/such/root"],
    ],
)
def test_refusals_are_one_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    assert main(arguments) == 78
    assert capsys.readouterr().err.startswith(f"megaresume {arguments[0]}")
