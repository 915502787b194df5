"""What happens to jobs on a real Slurm, and that the run comes through it: each function is one story, told unattended.

All train cookbook/tp_resume.py at 2x1x2, two ranks on each of two nodes, by the job script that `megaresume slurm
render` gives; all are held against the log of a run that nobody touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megaresume.launch.history import read_history
from megaresume.launch.records import past_tries
from megaresume.store import layout
from megaresume.store.attempts import read_attempts
from megaresume.store.discovery import check_files, find_candidates
from megaresume.store.steplog import read_steps
from tests.launch.supervised import branch
from tests.slurm.cluster import Cluster

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TRAINEE = REPOSITORY / "tests" / "slurm" / "trainee.py"
STEPS = 60
INTERVAL = 10
DEADLINE_S = 600.0


@dataclass
class Stage:
    """Where the stories play: the cluster, the data, and the log of the untouched run."""

    cluster: Cluster
    directory: Path
    data: Path
    reference: dict[int, tuple[str, str]] = field(default_factory=dict)

    def training(self, root: Path | str, **changed: object) -> list[str]:
        """The arguments of the training script."""
        arguments: dict[str, object] = {
            "tensor-model-parallel-size": 2,
            "num-layers": 2,
            "hidden-size": 32,
            "seq-length": 16,
            "micro-batch-size": 1,
            "global-batch-size": 4,
            "lr-warmup-iters": 2,
            "train-iters": STEPS,
            "save-interval": INTERVAL,
            "data-path": self.data,
            "save": root,
            **{name.replace("_", "-"): value for name, value in changed.items()},
        }
        return [
            str(TRAINEE),
            "--bf16",
            *(word for name, value in arguments.items() for word in (f"--{name}", str(value))),
        ]


@dataclass
class Job:
    """A submitted job and where it trains."""

    stage: Stage
    id: str
    root: Path
    log: Path

    @property
    def state(self) -> str:
        return self.stage.cluster.job(self.id)["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.stage.cluster.job(self.id)["Restarts"])

    def wait(self, happened: Callable[[], bool], what: str, *, seconds: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} never came: {self.stage.cluster.job(self.id)}\n{self.text()[-6000:]}")
            time.sleep(0.3)

    def wait_for_steps(self, attempt: int, steps: int) -> None:
        """Until an attempt has trained so many steps."""
        path = self.root / layout.STEP_LOG
        self.wait(
            lambda: sum(line.attempt == attempt for line in read_steps(path)) >= steps,
            f"step {steps} of attempt {attempt} of {self.root.name}",
        )

    def wait_for_end(self, *states: str) -> None:
        """Until the job is over for good, in one of these states."""
        self.wait(lambda: self.state in (*states, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), f"{states}")
        assert self.state in states, f"{self.state} instead of {states}:\n{self.text()[-6000:]}"

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace") if self.log.exists() else "(no log yet)"

    def check_exact(self, *, until: int = STEPS) -> None:
        """The log of the branch it ended on is that of the untouched run, step by step and bit by bit."""
        ours = {step: bits_of(line) for step, line in branch(self.root).items()}
        assert sorted(ours) == list(range(1, until + 1)), f"steps {sorted(ours)} instead of 1 to {until}"
        different = [step for step in ours if ours[step] != self.stage.reference[step]]
        assert not different, f"steps {different} differ from the untouched run"

    def check_no_step_lost_beyond_the_last_commit(self) -> None:
        """Each start goes on from the newest checkpoint there was."""
        events = (self.root / layout.EVENTS).read_text("utf-8").splitlines()
        saved: dict[int, int] = {}
        for event in map(json.loads, events):
            if event["event"] == "save":
                saved[event["attempt"]] = event["step"]
        newest = 0
        for attempt in read_attempts(self.root):
            assert attempt.start_step == newest, (
                f"attempt {attempt.attempt} began at {attempt.start_step}, not {newest}"
            )
            newest = max(newest, saved.get(attempt.attempt, 0))


def bits_of(line: object) -> tuple[str, str]:
    return tuple(float(getattr(line, name) or 0.0).hex() for name in ("loss", "grad_norm"))  # type: ignore[return-value]


def submit(
    stage: Stage,
    name: str,
    *,
    options: tuple[str, ...] = (),
    nodes: int = 2,
    per_node: int = 2,
    root: Path | None = None,
    more: tuple[str, ...] = (),
    changed: dict[str, object] | None = None,
    **accidents: str,
) -> Job:
    """Submit the trainee as a user would: by the rendered job script."""
    root = root or stage.directory / name
    log = stage.directory / f"{name}.log"
    render = [
        *(sys.executable, "-m", "megaresume.cli", "slurm", "render", "--root", str(root), "--job-name", name),
        *("--nodes", str(nodes), "--cpus-per-task", "2", "--time", "20", "--signal-lead", "10"),
        *(f"--sbatch=--output={log}", *options, "--", "torchrun", "--nproc-per-node", str(per_node)),
        *stage.training(root, **(changed or {})),
    ]
    script = subprocess.run(render, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout
    job = stage.cluster.submit(script, *more, **accidents)
    return Job(stage, job, root, log)


def occupy(stage: Stage, seconds: int, *options: str) -> str:
    """A job of the higher partition that takes whole nodes for so long."""
    script = f"#!/bin/sh\nsleep {seconds}\n"
    return stage.cluster.submit(script, "-p", "high", "--exclusive", "-o", "/dev/null", *options)


# --- the short ones ---------------------------------------------------------------------------------------------------


def a_requeue_and_then_scancel(stage: Stage) -> None:
    """USR1 to the batch script: saved, requeued, resumed. Then scancel: saved, and never back."""
    job = submit(stage, "requeue", TRAINEE_STEP_S="0.2")
    job.wait_for_steps(1, 7)
    stage.cluster.run("scancel", "--signal=USR1", "--batch", job.id)
    job.wait_for_steps(2, 7)
    assert job.restarts == 1
    attempts = read_attempts(job.root)
    assert attempts[1].start_step >= 7 and (attempts[1].job_id, attempts[1].restart_count) == (job.id, 1)
    assert "queued again: the run has saved and stopped: the batch script got USR1" in job.text()
    stage.cluster.run("scancel", job.id)
    job.wait_for_end("CANCELLED")
    trained = max(line.step for line in read_steps(job.root / layout.STEP_LOG))
    job.wait(
        lambda: not stage.cluster.run("squeue", "-h", "-j", job.id).strip(), "the end of its processes", seconds=60
    )
    time.sleep(8)  # cred_expire is 5: it would be back by now
    assert (job.state, job.restarts, len(read_attempts(job.root))) == ("CANCELLED", 1, 2)
    assert find_candidates(job.root)[0][0].step == trained, "it saved before it was gone"
    job.check_exact(until=trained)
    job.check_no_step_lost_beyond_the_last_commit()


def a_crash_loop(stage: Stage) -> None:
    """A script that fails at once is tried three times, and then left alone with the reason."""
    job = submit(stage, "loop", TRAINEE_CRASH="start")
    job.wait_for_end("FAILED")
    assert job.restarts == 0
    assert "NOT queued again: the run has crashed: crash loop: 3 tries in a row crashed" in job.text()
    assert read_history(job.root, now=time.time()).state == "crash loop"


# --- the long ones ----------------------------------------------------------------------------------------------------


def walltime(stage: Stage) -> None:
    """A time limit of two minutes: it stops by itself, in time, is requeued, and comes to its end."""
    job = submit(stage, "walltime", options=("--time", "2"), TRAINEE_STEP_S="3")
    job.wait(lambda: job.state in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), "its end", seconds=1500)
    assert job.state == "COMPLETED", job.text()[-6000:]
    assert len(read_attempts(job.root)) >= 3
    assert "the job ends in" in job.text()
    job.check_exact()
    job.check_no_step_lost_beyond_the_last_commit()
    assert all(each.end is not None and each.end.outcome in ("stopped", "finished") for each in past_tries(job.root))
    assert read_history(job.root, now=time.time()).times.lost_steps == 0


def preemption(stage: Stage) -> None:
    """A higher partition takes the nodes: saved within the grace, requeued, resumed when they are free again."""
    job = submit(stage, "preempted", TRAINEE_STEP_S="0.2")
    job.wait_for_steps(1, 13)
    occupy(stage, 5, "-N", str(len(stage.cluster.nodes)))
    job.wait_for_end("COMPLETED")
    attempts = read_attempts(job.root)
    assert job.restarts == 1 and len(attempts) == 2 and attempts[1].start_step >= 13
    job.check_exact()
    job.check_no_step_lost_beyond_the_last_commit()


def preemption_with_a_save_longer_than_the_grace(stage: Stage) -> None:
    """The save is cut off: Slurm requeues, and the run goes on from the commit before."""
    job = submit(stage, "cut-off", TRAINEE_STEP_S="0.4", TRAINEE_STOP_SAVE_S="60")
    job.wait_for_steps(1, 13)
    occupy(stage, 5, "-N", str(len(stage.cluster.nodes)))
    job.wait(lambda: job.restarts == 1, "Slurm's requeue")
    job.wait_for_end("COMPLETED")
    start = read_attempts(job.root)[1].start_step
    assert start >= 10 and start % INTERVAL == 0, f"went on from {start}"
    job.check_exact()
    job.check_no_step_lost_beyond_the_last_commit()
    first = past_tries(job.root)[0]
    assert first.end is not None and first.end.outcome == "stopped", "it uses up none of the crashes"


def a_lost_node(stage: Stage) -> None:
    """All of a node dies at once: Slurm requeues on others, and the run goes on from its last commit."""
    job = submit(stage, "lost-node", TRAINEE_STEP_S="0.2")
    job.wait_for_steps(1, 13)
    nodes = stage.cluster.job(job.id)["NodeList"]
    lost = nodes_of(nodes)[1]
    stage.cluster.kill_node(lost)
    job.wait(lambda: job.restarts == 1, "Slurm's requeue")
    job.wait_for_steps(2, 1)
    assert lost not in nodes_of(stage.cluster.job(job.id)["NodeList"])
    job.wait_for_end("COMPLETED")
    start = read_attempts(job.root)[1].start_step
    assert start >= 10 and start % INTERVAL == 0, f"went on from {start}"
    job.check_exact()
    job.check_no_step_lost_beyond_the_last_commit()
    stage.cluster.start_node(lost)


def an_orphan(stage: Stage) -> None:
    """A slurmd dies and its tasks train on, while Slurm starts the job again elsewhere: the orphans cannot commit."""
    job = submit(stage, "orphan", nodes=1, per_node=4, TRAINEE_STEP_S="1.5")
    job.wait_for_steps(1, 13)
    (node,) = nodes_of(stage.cluster.job(job.id)["NodeList"])
    (supervisor,) = [
        each for each in processes_with(job.root) if "megaresume.cli" in each.cmdline() and "run" in each.cmdline()
    ]
    supervisor.send_signal(
        signal.SIGSTOP
    )  # it would end the orphans at once; that they cannot commit is the store's doing
    stage.cluster.kill_daemon(node)
    try:
        job.wait(lambda: job.restarts == 1, "Slurm's requeue")
        job.wait_for_steps(2, 1)
        alive = max(line.step for line in read_steps(job.root / layout.STEP_LOG) if line.attempt == 1)
        assert alive > read_attempts(job.root)[1].start_step, "the orphans trained on"
    finally:
        with contextlib.suppress(psutil.Error):
            supervisor.send_signal(signal.SIGCONT)
    job.wait_for_end("COMPLETED")
    job.wait(
        lambda: not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE,
        "the orphans' end",
        seconds=60,
    )
    job.check_exact()
    claimed = read_attempts(job.root)[1].started
    for candidate in find_candidates(job.root)[0]:
        check_files(candidate)
        assert candidate.attempt == 2 or candidate.manifest.created <= claimed
    stage.cluster.start_node(node)


def a_segmentation_fault(stage: Stage) -> None:
    """One worker segfaults once: started again in place, in the same job, from the last commit."""
    marker = stage.directory / "segfaulted"
    job = submit(stage, "segfault", TRAINEE_STEP_S="0.1", TRAINEE_SEGV=f"17:2:{marker}")
    job.wait_for_end("COMPLETED")
    assert marker.exists()
    attempts = read_attempts(job.root)
    assert job.restarts == 0 and [each.start_step for each in attempts] == [0, 10]
    job.check_exact()
    job.check_no_step_lost_beyond_the_last_commit()


def a_crash_at_the_same_step_always(stage: Stage) -> None:
    """It commits, crashes, and crashes again without a newer commit: the guard counts from the commit on."""
    job = submit(stage, "always", TRAINEE_CRASH="17")
    job.wait_for_end("FAILED")
    assert [each.start_step for each in read_attempts(job.root)] == [0, 10, 10, 10]
    assert "the newest checkpoint is still step 10" in job.text()
    assert "this one crashes always" in job.text()
    job.check_exact(until=16)  # a step is in the log once all ranks have said their word on it, at the next one


def a_refusal(stage: Stage) -> None:
    """The same root with another batch size: refused on all ranks, neither tried again nor requeued."""
    root = stage.directory / "segfault"
    attempts = len(read_attempts(root))
    job = submit(stage, "refusal", root=root, changed={"global_batch_size": 8})
    job.wait_for_end("FAILED")
    assert job.restarts == 0 and len(read_attempts(root)) == attempts
    assert "NOT queued again: the run has refused: DataMismatchError" in job.text()
    assert stage.cluster.job(job.id)["ExitCode"] == "78:0"


def fewer_nodes(stage: Stage) -> None:
    """Half of the nodes: another topology, refused with the table."""
    job = submit(stage, "fewer", root=stage.directory / "segfault", nodes=1)
    job.wait_for_end("FAILED")
    assert job.restarts == 0
    assert "NOT queued again: the run has refused: TopologyMismatchError" in job.text()


def an_array_of_which_one_task_is_preempted(stage: Stage) -> None:
    """Two tasks on a node each; one loses its node and comes back; the other never notices."""
    job = submit(stage, "array", nodes=1, per_node=4, options=("--array", "0-1"), TRAINEE_STEP_S="0.3")
    tasks = [
        Job(stage, f"{job.id}_{number}", job.root / f"task-{number}", stage.directory / "array.log")
        for number in (0, 1)
    ]
    for task in tasks:
        task.wait_for_steps(1, 13)
    occupy(stage, 5, "-w", stage.cluster.job(tasks[0].id)["NodeList"])
    for task in tasks:
        task.wait_for_end("COMPLETED")
        task.check_exact()
        task.check_no_step_lost_beyond_the_last_commit()
    assert [task.restarts for task in tasks] == [1, 0]
    assert [len(read_attempts(task.root)) for task in tasks] == [2, 1]
    assert read_attempts(tasks[0].root)[1].job_id == tasks[0].id


def nodes_of(text: str) -> list[str]:
    """["n1", "n3"] of "n[1,3]", as Slurm abbreviates."""
    if "[" not in text:
        return text.split(",")
    prefix, _, inside = text.rstrip("]").partition("[")
    found = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        found += [f"{prefix}{number}" for number in range(int(first), int(last or first) + 1)]
    return found


def processes_with(root: Path) -> list[psutil.Process]:
    """The processes that have this root among their arguments."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(root) in process.cmdline() and process.pid != os.getpid():
                found.append(process)
    return found


SHORT = (a_requeue_and_then_scancel, a_crash_loop)
LONG = (
    walltime,
    preemption,
    preemption_with_a_save_longer_than_the_grace,
    a_lost_node,
    an_orphan,
    a_segmentation_fault,
    a_crash_at_the_same_step_always,
    a_refusal,
    fewer_nodes,
    an_array_of_which_one_task_is_preempted,
)
