"""The demo of adapters: three are trained in turn on one base, killed, and resumed; all must be equal in every bit.

    python cookbook/demo_adapters.py          (or `make demo-adapters`)

As demo.py does with one run, this starts `torchrun ... cookbook/multi_lora_resume.py ...` on 8 ranks (2x2x2), once
never stopped and once killed and resumed. It leaves demo-adapters-out/.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import demo  # the scripts beside this one
import multi_lora_resume

from megaresume import read_progress
from megaresume.adapters.naming import encode_name
from megaresume.store import layout
from megaresume.store.steplog import read_events, read_steps

OUT = Path("demo-adapters-out")
SAVE_INTERVAL = 5
STEPS = {name: adapter.train_iters for name, adapter in multi_lora_resume.ADAPTERS.items()}
TOTAL = sum(STEPS.values())
KILL_AT = 22  # in turn: 8, 7 and 7 steps, of which each has saved 5


def main() -> None:
    began = time.monotonic()
    os.chdir(demo.REPOSITORY)
    reference, interrupted = OUT / "reference", OUT / "interrupted"
    prepare_data()
    for old in (reference, interrupted):
        if old.exists():
            shutil.rmtree(old)

    train("never stopped", reference)
    train("killed", interrupted, kill_at=KILL_AT)
    train("resumed", interrupted)

    differing: list[str] = []
    problems: list[str] = []
    for name, steps in STEPS.items():
        expected, found = (read_steps(root_of(root, name) / layout.STEP_LOG) for root in (reference, interrupted))
        resumed_at = min(line.step for line in found if line.attempt > 1) - 1
        audits = [each for each in read_events(root_of(interrupted, name) / layout.EVENTS) if each["event"] == "replay"]
        print(f"\n{name}: {steps} steps, resumed at step {resumed_at}")
        print("".join(f"  replay audit: {each['summary']}\n" for each in audits), end="")
        differing += [f"{name}: {each}" for each in demo.differing_steps(expected, found, steps)]
        last = (read_progress(root_of(root, name)).path for root in (reference, interrupted))
        problems += [f"{name}: {each}" for each in demo.differing_shards(*last)]
    print(f"\n{time.monotonic() - began:.0f} s in all")
    sys.exit(demo.conclude(TOTAL, differing, problems))


def root_of(root: Path, name: str) -> Path:
    """Where the adapter's checkpoints are."""
    return root / "adapters" / encode_name(name)


def prepare_data() -> None:
    """A data set for each adapter: the source files of the part of Python's standard library it is named after."""
    for name in STEPS:
        prefix = OUT / "data" / name
        if not prefix.with_suffix(".idx").exists():
            source = importlib.import_module(name).__path__[0]
            command = [sys.executable, "-W", "ignore", "cookbook/prepare_data.py", "--input", source]
            subprocess.run([*command, "--output-prefix", str(prefix)], check=True)


def train(title: str, root: Path, kill_at: int | None = None) -> None:
    """All adapters to their ends, or until `kill_at` steps are done in all."""
    torchrun = os.path.relpath(Path(sys.executable).with_name("torchrun"))
    command = [
        *(torchrun, "--standalone", f"--nproc-per-node={demo.RANKS}", "cookbook/multi_lora_resume.py"),
        *("--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2", "--bf16"),
        *(f"--data-path={OUT / 'data'}", f"--save={root}", f"--save-interval={SAVE_INTERVAL}"),
    ]
    log = OUT / f"{title.replace(' ', '-')}.log"
    demo.run_until(title, command, log, [root_of(root, name) / layout.STEP_LOG for name in STEPS], TOTAL, kill_at)


if __name__ == "__main__":
    main()
