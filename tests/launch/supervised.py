"""Starting `megaresume run` in tests, looking at what it does, leaving nothing behind. Real processes and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megaresume.store import layout
from megaresume.store.attempts import read_attempts
from megaresume.store.lineage import on_branch
from megaresume.store.steplog import StepLine, read_steps

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TRAINEE = REPOSITORY / "tests" / "launch" / "trainee.py"
DEADLINE_S = 240.0


@dataclass
class Supervised:
    """A running `megaresume run`; `root` is where it trains, `log` what it prints."""

    root: Path
    log: Path
    process: subprocess.Popen[bytes]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def send_to_all(self, number: signal.Signals) -> None:
        """To the supervisor, torchrun, the ranks and their data loaders' workers."""
        for each in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            each.send_signal(number)

    def wait_for_step(self, step: int) -> None:
        """Until a line of this step or a later one is in the log."""
        wait_until(
            lambda: any(line.step >= step for line in read_steps(self.root / layout.STEP_LOG)), f"step {step}", self
        )

    def wait_for_attempt(self, attempt: int, steps: int = 1) -> None:
        """Until this attempt has trained so many steps."""
        wait_until(
            lambda: sum(line.attempt == attempt for line in read_steps(self.root / layout.STEP_LOG)) >= steps,
            f"{steps} steps of attempt {attempt}",
            self,
        )

    def worker(self, rank: int) -> int:
        return int((self.root / f"pids-{rank}").read_text())

    def finish(self) -> int:
        """The exit code; the process must end by itself."""
        return self.process.wait(DEADLINE_S)

    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")


def wait_until(happened: Callable[[], bool], what: str, run: Supervised) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, f"{what} never came:\n{run.text()[-4000:]}"
        assert run.process.poll() is None, f"ended before {what}:\n{run.text()[-4000:]}"
        time.sleep(0.05)


@contextmanager
def supervise(
    root: Path, *, steps: int, options: tuple[str, ...] = (), command: list[str] | None = None, **environment: str
) -> Iterator[Supervised]:
    """`megaresume run` of the trainee on two ranks, or of `command`; killed with all it started at the block's end."""
    root.mkdir(exist_ok=True)
    command = command or [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(TRAINEE)]
    log = root.parent / f"{root.name}-{len(list(root.parent.glob('*.log')))}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "megaresume.cli", "run", "--root", str(root), *options, "--", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=clean_environment(TRAINEE_ROOT=str(root), TRAINEE_STEPS=str(steps), **environment),
        )
    try:
        yield Supervised(root, log, process)
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process] if process.poll() is None else []:
            each.kill()
        process.wait()


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what a scheduler or another launcher put there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MEGARESUME_", "PET_"))}
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}


def processes_of(root: Path) -> list[int]:
    """Every process, of whatever parent, that trains in this root."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TRAINEE_ROOT") == str(root) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def branch(root: Path) -> dict[int, StepLine]:
    """Step -> its line on the branch that the run is on now."""
    attempts = read_attempts(root)
    return {
        line.step: line for line in read_steps(root / layout.STEP_LOG) if on_branch(line.attempt, line.step, attempts)
    }


def losses(root: Path) -> dict[int, str]:
    """Step -> the loss on the current branch, to the last bit."""
    return {step: (line.loss or 0.0).hex() for step, line in branch(root).items()}


def end_of(root: Path) -> dict[str, Any]:
    """The end that the newest launch of a root recorded."""
    newest = max((root / "launches").iterdir(), key=lambda path: (path / "try-0001.json").stat().st_mtime)
    return dict(json.loads((newest / "end.json").read_text("utf-8")))
