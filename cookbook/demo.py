"""The demo: one run is never stopped, another is killed in the middle and resumed; they must be equal in every bit.

    python cookbook/demo.py          (or `make demo`)

Both are `torchrun ... cookbook/tp_resume.py ...` on 8 ranks (tensor x pipeline x data parallel = 2x2x2), started from
here and watched through their step logs; nothing of the training happens in this process. It leaves demo-out/. It uses
the CPU on every machine, where two runs always agree; GPUs need deterministic kernels for that.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megaresume import read_progress
from megaresume.store import layout
from megaresume.store.shard import ShardHeader, read_header, verify_shard
from megaresume.store.steplog import StepLine, read_events, read_steps

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = Path("demo-out")
DATA = OUT / "data" / "stdlib"
RANKS, TRAIN_ITERS, SAVE_INTERVAL = 8, 40, 10
KILL_AT = 26  # between the saves of steps 20 and 30


def main() -> None:
    began = time.monotonic()
    os.chdir(REPOSITORY)
    reference, interrupted = OUT / "reference", OUT / "interrupted"
    prepare_data()
    for old in (reference, interrupted):
        if old.exists():
            shutil.rmtree(old)

    train("never stopped", reference)
    train("killed", interrupted, kill_at=KILL_AT)
    train("resumed", interrupted)

    expected, found = read_steps(reference / layout.STEP_LOG), read_steps(interrupted / layout.STEP_LOG)
    print("\n" + side_by_side(expected, found) + "\n")
    print(audit_and_times(read_events(reference / layout.EVENTS) + read_events(interrupted / layout.EVENTS)))
    draw(expected, found, OUT / "losses.png")
    print(f"{OUT}/losses.png shows both loss curves; {OUT}/ also holds the checkpoints and torchrun's output")
    problems = differing_shards(read_progress(reference).path, read_progress(interrupted).path)
    print(f"{time.monotonic() - began:.0f} s in all")
    sys.exit(verdict(expected, found, problems))


def prepare_data() -> None:
    if not DATA.with_suffix(".idx").exists():
        print("preparing the data: the source files of Python's standard library, one token per byte", flush=True)
        command = [sys.executable, "-W", "ignore", "cookbook/prepare_data.py", "--output-prefix", str(DATA)]
        subprocess.run(command, check=True)


def torchrun(root: Path) -> list[str]:
    """The line that starts a run. Given again, it resumes."""
    return [
        *(os.path.relpath(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={RANKS}"),
        *("cookbook/tp_resume.py", "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2", "--bf16"),
        *(f"--data-path={DATA}", f"--save={root}", f"--save-interval={SAVE_INTERVAL}", f"--train-iters={TRAIN_ITERS}"),
    ]


def train(title: str, root: Path, kill_at: int | None = None) -> None:
    """The run of this root, until it ends or until step `kill_at`."""
    log = OUT / f"{title.replace(' ', '-')}.log"
    run_until(title, torchrun(root), log, [root / layout.STEP_LOG], TRAIN_ITERS, kill_at)


def run_until(
    title: str, command: list[str], log: Path, step_logs: Sequence[Path], total: int, kill_at: int | None
) -> None:
    """Run torchrun until it ends, or until `kill_at` steps are in the logs and then SIGKILL it and all its ranks."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    lines_before = [len(read_steps(step_log)) for step_log in step_logs]
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **settings},
            start_new_session=True,
        )
    try:
        reached = follow(title, process, dict(zip(step_logs, lines_before, strict=True)), total, kill_at)
    finally:
        killed = kill_with_descendants(process)
    if reached and kill_at is not None:
        print(f"SIGKILL to {killed} processes: torchrun and its ranks")
    elif process.returncode != 0 or kill_at is not None:
        print("\n".join(log.read_text("utf-8", errors="replace").splitlines()[-40:]))
        sys.exit(f"torchrun ended with exit code {process.returncode}; the whole output is in {log}")


def follow(
    title: str, process: subprocess.Popen[bytes], step_logs: Mapping[Path, int], total: int, until: int | None
) -> bool:
    """Show the steps that the process adds to the step logs, which had so many lines before. True once `until` of
    `total` steps are there, counted over the logs, False when it has ended."""
    began, shown = time.monotonic(), ""
    while process.poll() is None:
        lines = [lines[-1] for step_log, skip in step_logs.items() if (lines := read_steps(step_log)[skip:])]
        step = sum(line.step for line in lines)
        state = f"step {step} of {total}, loss {lines[-1].loss:.4f}" if lines else f"starting {RANKS} ranks"
        if sys.stdout.isatty():
            print(f"\r{title}: {state} ({time.monotonic() - began:.0f} s)\033[K", end="", flush=True)
        elif state != shown and step % SAVE_INTERVAL == 0:
            print(f"{title}: {state} ({time.monotonic() - began:.0f} s)", flush=True)
        shown = state
        if until is not None and step >= until:
            break
        time.sleep(0.2)
    if sys.stdout.isatty():
        print()
    return process.poll() is None


def kill_with_descendants(process: subprocess.Popen[bytes]) -> int:
    """SIGKILL a process and everything it started, the parent first so that it cannot tidy up; return how many."""
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            pass
    process.wait()
    psutil.wait_procs(family[1:], timeout=30)
    return len(family)


def final_branch(lines: Sequence[StepLine]) -> dict[int, StepLine]:
    """Step by step what led to the final state: a step that was trained again counts as the last attempt left it."""
    return {line.step: line for line in sorted(lines, key=lambda line: line.attempt)}


def bits(line: StepLine | None) -> tuple[str, ...]:
    """All that a step's training determines, floats in hex; empty for a step that was not trained."""
    if line is None or line.loss is None or line.grad_norm is None or line.lr is None:
        return ()
    return (line.loss.hex(), line.grad_norm.hex(), line.lr.hex(), str(line.consumed_train_samples))


def side_by_side(expected: Sequence[StepLine], found: Sequence[StepLine]) -> str:
    """The losses, and their bits, in the steps around the cut: one column per run and attempt."""
    reference = final_branch(expected)
    killed, resumed = (columns := by_attempt(found))[0], columns[-1]
    cut = max(killed)
    rows = [f"{'step':>4}  {'never stopped':<30}  {'killed':<21}  resumed"]
    for step in range(min(resumed) - 3, cut + 5):
        row = f"{step:>4}  {reference[step].loss:<8.6f}  {reference[step].loss.hex():<20}"
        for line in (killed.get(step), resumed.get(step)):
            differs = line is not None and bits(line) != bits(reference[step])
            row += f"  {line.loss.hex() if line else '':<20}{'!' if differs else ' '}"
        notes = [f"saved as {layout.step_directory(step)}"] if step % SAVE_INTERVAL == 0 else []
        notes += ["last in the log at SIGKILL"] if step == cut else []
        rows.append(f"{row}  {', '.join(notes)}".rstrip())
    return "\n".join(rows)


def by_attempt(lines: Sequence[StepLine]) -> list[dict[int, StepLine]]:
    """The lines of each attempt by step, in the order of the attempts."""
    attempts = sorted({line.attempt for line in lines})
    return [{line.step: line for line in lines if line.attempt == attempt} for attempt in attempts]


def audit_and_times(events: Sequence[Mapping[str, Any]]) -> str:
    """What megaresume itself logged of the replay, of saving and of loading, one line each."""
    lines = [f"replay audit: {event['summary']}" for event in events if event["event"] == "replay"]
    saves = [event for event in events if event["event"] == "save"]
    seconds = [event["seconds"] for event in saves]
    lines.append(
        f"save: {len(saves)} times, {saves[-1]['bytes'] / 1e6:.1f} MB in {statistics.median(seconds):.2f} s (median; "
        f"slowest {max(seconds):.2f} s)"
    )
    for event in events:
        if event["event"] == "resume":
            seconds = f"{event['restore_seconds']:.2f} s, the whole resume {event['seconds']:.2f} s"
            lines.append(f"load: {event['path']} in {seconds}")
    return "\n".join(lines)


def differing_shards(expected: Path, found: Path) -> list[str]:
    """What differs between two checkpoints' shards, whose digests are checked first. Whose they are may differ."""
    names = sorted(path.name for path in expected.glob(f"*{layout.SHARD_SUFFIX}"))
    if names != sorted(path.name for path in found.glob(f"*{layout.SHARD_SUFFIX}")):
        return [f"{expected} and {found} do not hold shards of the same names"]
    problems, tensors, data_bytes = [], 0, 0
    for name in names:
        (one, one_data), (other, other_data) = read_shard(expected / name), read_shard(found / name)
        if one.tensors != other.tensors or one.index != other.index:
            problems.append(f"{name} does not hold the same tensors")
        elif one_data != other_data:
            spans = one.tensors.values()
            differing = [
                span.name for span in spans if one_data[span.begin : span.end] != other_data[span.begin : span.end]
            ]
            problems.append(f"{name} differs in {len(differing)} tensors: {differing[:10]}")
        tensors, data_bytes = tensors + len(one.tensors), data_bytes + len(one_data)
    print(
        f"last checkpoints, {expected} and {found}: {len(names) - len(problems)} of {len(names)} shards have the same "
        f"bits ({tensors} tensors, {data_bytes:,} bytes)"
    )
    return problems


def read_shard(path: Path) -> tuple[ShardHeader, bytes]:
    """A shard's header and its data section, checked against each other."""
    header = read_header(path)
    verify_shard(path, header)
    return header, path.read_bytes()[header.data_start :]


def draw(expected: Sequence[StepLine], found: Sequence[StepLine], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    killed, *_, resumed = (list(column.values()) for column in by_attempt(found))
    figure, axes = pyplot.subplots(figsize=(9, 5))
    curves = [
        (expected, "never stopped", {"color": "0.75", "linewidth": 7}),
        (killed, "killed", {"color": "tab:red", "linewidth": 2.5}),
        (resumed, "resumed", {"color": "tab:blue", "linestyle": (0, (3, 1.5)), "linewidth": 2.5}),
    ]
    for lines, label, style in curves:
        axes.plot([line.step for line in lines], [line.loss for line in lines], label=label, **style)
    axes.plot(killed[-1].step, killed[-1].loss, "X", color="tab:red", markersize=12, label="SIGKILL")
    axes.axvline(resumed[0].step - 1, color="tab:blue", linestyle=":", label="checkpoint it resumed from")
    axes.set(xlabel="step", ylabel="training loss", title="One run was never stopped, one was killed and resumed")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def verdict(expected: Sequence[StepLine], found: Sequence[StepLine], problems: Sequence[str]) -> int:
    """Print what differs and, last, how many steps match; return the exit code."""
    return conclude(TRAIN_ITERS, differing_steps(expected, found, TRAIN_ITERS), problems)


def differing_steps(expected: Sequence[StepLine], found: Sequence[StepLine], train_iters: int) -> list[str]:
    """One line for each step that differs or is missing."""
    reference, resumed = final_branch(expected), final_branch(found)
    return [
        f"step {step}: {reference.get(step)} and {resumed.get(step)}"
        for step in range(1, train_iters + 1)
        if not bits(reference.get(step)) == bits(resumed.get(step)) != ()
    ]


def conclude(steps: int, differing: Sequence[str], problems: Sequence[str]) -> int:
    """Print what differs and, last, how many of all steps match; return the exit code."""
    for problem in [*problems, *differing[:10]]:
        print(f"NOT EQUAL: {problem}")
    exact = not problems and not differing
    print(f"{'exact' if exact else 'not exact'}: {steps - len(differing)} of {steps} steps match bit for bit")
    return 0 if exact else 1


if __name__ == "__main__":
    main()
