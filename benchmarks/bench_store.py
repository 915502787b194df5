"""Saving and loading: megaresume beside its peers and beside what this machine allows, in one run.

    make bench                                   1 rank with 1 GB of state and 4 with 1.5 GB, 7 rounds, 5 starts
    python benchmarks/bench_store.py --help

A GPT of megatron-core (bf16, distributed optimizer, on the CPU) is saved and loaded by each in turn, round after round,
in an order that is drawn anew each time, so that a disk that drifts drifts for all; the first save of each is measured
in several starts. Writes bench-out/bench.json and
bench-out/bench.png, prints a table with every contender's settings, and last `bench: N of M targets met`. Needs about 5
times the state in memory and on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

MODES = {1: {"tp": 1, "dp": 1}, 4: {"tp": 2, "dp": 2}}
GIGABYTES = {1: 1.0, 4: 1.5}
COLLECTIVE_TIMEOUT = timedelta(minutes=3)  # a peer that fails on one rank alone must not hold up the others for ever
HIDDEN = 1024
BYTES_PER_LAYER = 14 * 12 * HIDDEN**2  # weights in bf16, masters and two moments in fp32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, help="size of the state, over all ranks")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=5, help="of new processes, for the first save in each")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    options = parser.parse_args()
    if min(options.starts, options.rounds) < 1:
        parser.error("--starts and --rounds must be at least 1")
    from benchmarks.storebench import report

    options.out.mkdir(exist_ok=True)
    machine = {"host": platform.platform(), "cpus": os.cpu_count(), "torch": torch.__version__}
    results: dict[str, Any] = {}
    for world in options.ranks:
        mode = f"{world} rank{'s' * (world > 1)}"
        results[mode] = run_mode(world, options)
        print(report.table(mode, results[mode]), flush=True)
        (options.out / "bench.json").write_text(json.dumps({"machine": machine, "modes": results}, indent=1), "utf-8")
    print("settings")
    for name, settings in next(iter(results.values()))["settings"].items():
        print(f"  {name:32s}{settings}")
    report.picture(results, options.out / "bench.png")
    print(f"{options.out / 'bench.json'} and {options.out / 'bench.png'} written")
    print(report.verdict([target for mode, result in results.items() for target in report.targets_of(mode, result)]))


def run_mode(world: int, options: argparse.Namespace) -> dict[str, Any]:
    scratch = (options.out / "scratch").resolve()
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    layers = max(1, round((options.gigabytes or GIGABYTES[world]) * 1e9 / BYTES_PER_LAYER))
    results = []
    try:
        for start in range(options.starts):
            rounds = 0 if start < options.starts - 1 else options.rounds
            torch.multiprocessing.spawn(_rank, (world, port, layers, rounds, start, str(scratch)), nprocs=world)
            results.append(json.loads((scratch / "result.json").read_text("utf-8")))
            shutil.rmtree(scratch / f"start{start}", ignore_errors=True)
        return joined(results)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def joined(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """The last start's result, with what the others say of first saves."""
    *others, result = starts
    for other in others:
        for row, values in other["rows"].items():
            for name, samples in values.items():
                result["rows"].setdefault(row, {}).setdefault(name, []).extend(samples)
    return result


def _rank(rank: int, world: int, port: int, layers: int, rounds: int, start: int, scratch: str) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    from benchmarks.storebench.rounds import measure
    from tests.small_models import SmallModel

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    config = SmallModel(
        **MODES[world], num_layers=layers, hidden_size=HIDDEN, global_batch_size=MODES[world]["dp"], dropout=0.0
    )
    result = measure(config, Path(scratch) / f"start{start}", rounds, seed=start)
    if rank == 0:
        Path(scratch, "result.json").write_text(json.dumps(result), "utf-8")
    torch.distributed.barrier()
    sys.stdout.flush()
    # A peer's helper processes and threads are not all willing to end.
    for helper in torch.multiprocessing.active_children():
        helper.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
