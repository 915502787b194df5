"""How much slower a training step is while a shard is being written: by a thread, and by a process with shared memory.

    python benchmarks/bench_writer.py

Small steps of a torch model with some Python in between, on as many threads as there are cores; a shard of 420 MB is
written durably meanwhile, six times each in turn.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megaresume.store.shard import Entry, ShardIdentity, write_shard

SIZE, TENSORS, ROUNDS = 400 << 20, 50, 6


def write(memory: memoryview, path: Path) -> None:
    part = SIZE // TENSORS
    entries = [Entry(f"t{i}", "U8", (part,), memory[i * part : (i + 1) * part]) for i in range(TENSORS)]
    write_shard(path, entries, identity=ShardIdentity("bench", 1, 1, "x"), index={})
    path.unlink()


def write_on_call(name: str, path: Path, begin: Any, done: Any) -> None:
    memory = shared_memory.SharedMemory(name)
    while begin.wait():
        begin.clear()
        write(memory.buf[:SIZE], path)
        done.set()


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()
    context = multiprocessing.get_context("spawn")
    memory = shared_memory.SharedMemory(create=True, size=SIZE)
    torch.frombuffer(memory.buf, dtype=torch.uint8)[:SIZE] = 1
    begin, done = context.Event(), context.Event()
    arguments = (memory.name, directory / "process.bin", begin, done)
    writing = context.Process(target=write_on_call, args=arguments, daemon=True)
    writing.start()
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(24)])
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(128, 512)

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        sum(range(200_000))  # the Python of a training loop, which holds the interpreter's lock
        return time.perf_counter() - started

    begin.set()
    while not done.is_set():
        step()
    steps: dict[str, list[float]] = {"no save": [], "thread": [], "process": []}
    for _ in range(ROUNDS):
        steps["no save"] += [step() for _ in range(15)]
        writer = threading.Thread(target=write, args=(memory.buf[:SIZE], directory / "thread.bin"))
        writer.start()
        while writer.is_alive():
            steps["thread"].append(step())
        steps["no save"] += [step() for _ in range(15)]
        done.clear()
        begin.set()
        while not done.is_set():
            steps["process"].append(step())
    for name, seconds in steps.items():
        middle, mean = statistics.median(seconds), statistics.mean(seconds)
        print(f"{name:8s} {len(seconds):4d} steps, median {middle * 1e3:.1f} ms, mean {mean * 1e3:.1f} ms")
    writing.kill()  # it waits for its next call
    memory.unlink()
    sys.stdout.flush()
    os._exit(0)  # views of the memory are still about


if __name__ == "__main__":
    main()
