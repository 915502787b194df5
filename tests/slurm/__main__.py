"""`python -m tests.slurm short|all [NAME...]`: the stories of `scenarios.py` on a real Slurm, started and ended here.

The last line is `N passed, N failed`; the exit code is 0 where none failed. Where Slurm cannot be had the reason is the
last line but one, `0 passed, 0 failed` the last, and the exit code 77.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from megaresume.store import layout
from tests.launch.supervised import branch, clean_environment
from tests.slurm import scenarios
from tests.slurm.cluster import Cluster, missing_programs
from tests.slurm.scenarios import Stage, bits_of

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = 3  # jobs take two: one is left for what a lost node did
SKIPPED = 77


def main() -> int:
    which, names = (sys.argv[1:2] or ["all"])[0], sys.argv[2:]
    stories = {story.__name__: story for story in scenarios.SHORT + (scenarios.LONG if which == "all" else ())}
    chosen = [stories[name] for name in names] if names else list(stories.values())
    reason = install()
    if reason is not None:
        print(f"skipped: {reason}\n0 passed, 0 failed")
        return SKIPPED
    directory = Path(tempfile.mkdtemp(prefix="megaresume-slurm-"))
    directory.chmod(0o755)
    cluster = Cluster(directory / "cluster", nodes=NODES)
    failed = 0
    try:
        cluster.start()
        aloud = "" if cluster.proctrack == "cgroup" else " (cgroup, which clusters use, is not to be had here)"
        print(f"a Slurm of {NODES} nodes on this host, proctrack/{cluster.proctrack}{aloud}", flush=True)
        stage = prepare(cluster, directory)
        for story in chosen:
            failed += not tell(story, stage)
    finally:
        left = cluster.stop()
        print(f"left running: {left}" if left else "nothing is left running")
    if failed or left:
        print(f"logs: {directory}")
    else:
        shutil.rmtree(directory)
    print(f"{len(chosen) - failed} passed, {failed + bool(left)} failed")
    return int(bool(failed or left))


def install() -> str | None:
    """Have Slurm here; why that cannot be, or None."""
    if not missing_programs():
        return None
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"no {', '.join(missing_programs())} here, and only root can install {' '.join(PACKAGES)} by apt-get"
    print(f"installing {' '.join(PACKAGES)}", flush=True)
    commands = (["apt-get", "-qq", "update"], ["apt-get", "-qq", "install", "-y", "--no-install-recommends", *PACKAGES])
    for command in commands:
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        )
        if done.returncode != 0:
            return f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-300:]}"
    return f"still no {', '.join(missing_programs())} after installing" if missing_programs() else None


def prepare(cluster: Cluster, directory: Path) -> Stage:
    """Commands for the jobs' PATH, the data, and the run that nobody touches."""
    from cookbook.prepare_data import write_indexed_dataset

    bin_directory = directory / "bin"
    bin_directory.mkdir()
    for name, module in (("megaresume", "megaresume.cli"), ("torchrun", "torch.distributed.run")):
        path = bin_directory / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        path.chmod(0o755)
    environment = clean_environment(SLURM_CONF=cluster.environment["SLURM_CONF"])
    cluster.environment = {**environment, "PATH": f"{bin_directory}:{cluster.environment['PATH']}"}
    data = directory / "data" / "text"
    write_indexed_dataset(sorted((scenarios.REPOSITORY / "megaresume" / "store").glob("*.py")), data)
    stage = Stage(cluster, directory, data)
    began = time.monotonic()
    root = directory / "untouched"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *stage.training(root)],
        check=True,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=(directory / "untouched.log").open("wb"),
        timeout=300,
    )
    stage.reference = {step: bits_of(line) for step, line in branch(root).items()}
    assert sorted(stage.reference) == list(range(1, scenarios.STEPS + 1)), (root / layout.STEP_LOG).read_text()
    print(f"the untouched run: {len(stage.reference)} steps, {time.monotonic() - began:.0f} s", flush=True)
    return stage


def tell(story: object, stage: Stage) -> bool:
    name = story.__name__  # type: ignore[attr-defined]
    began = time.monotonic()
    try:
        story(stage)  # type: ignore[operator]
    except Exception:
        traceback.print_exc()
        print(f"FAILED  {name}, {time.monotonic() - began:.0f} s", flush=True)
        for job in stage.cluster.run("squeue", "-h", "-o", "%A").split():
            stage.cluster.run("scancel", job)
        return False
    print(f"passed  {name}, {time.monotonic() - began:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
