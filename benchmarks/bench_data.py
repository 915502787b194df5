"""How long the sampler takes to its first batch after a resume, how fast it goes on, and what memory it holds.

Run as `make bench-data`. Beside it the usual way, `torch.randperm(n).tolist()` and a slice, at the size where it fits.
Each row is a process of its own, so that memory is that row's alone. Prints medians; takes about a minute on one core.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MICRO, GLOBAL, WIDTH = 4, 1024, 64
SIZES = ((10**7, 10**6), (10**10, 10**9), (10**13, 10**12))  # dataset, consumed


def sampler_batches(shuffle: bool | str, size: int, consumed: int) -> Iterator[list[int]]:
    from megaresume.data import DataParallelBatchSampler

    sampler = DataParallelBatchSampler(
        size,
        micro_batch_size=MICRO,
        global_batch_size=GLOBAL,
        data_parallel_rank=WIDTH - 1,
        data_parallel_size=WIDTH,
        shuffle=shuffle,
        consumed_samples=consumed,
    )
    return iter(sampler)


def list_batches(size: int, consumed: int) -> Iterator[list[int]]:
    """The usual way: the epoch's whole permutation as a list, the consumed part cut off, this rank's ids taken out."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(0)
    ids = torch.randperm(size, generator=generator).tolist()[consumed:][WIDTH - 1 :: WIDTH]
    return (ids[start : start + MICRO] for start in range(0, len(ids), MICRO))


def measure(what: str, size: int, consumed: int) -> dict[str, float]:
    """Medians over repeats in this process, and the growth of its peak memory."""
    make: Callable[[], Iterator[list[int]]] = partial(sampler_batches, what, size, consumed)
    if what == "list":
        make = partial(list_batches, size, consumed)
    # Imports and first calls come before the clock and the memory count start.
    next(sampler_batches("megatron" if what in ("list", "megatron") else what, 1024, 0))
    repeats, batches = (2 if what == "list" else 5), 20_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    firsts, rates = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        iterator = make()
        next(iterator)
        firsts.append(time.perf_counter() - start)
        start = time.perf_counter()
        ids = sum(len(batch) for batch in islice(iterator, batches))
        rates.append(ids / (time.perf_counter() - start))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "first_ms": 1e3 * statistics.median(firsts),
        "ids_per_second": statistics.median(rates),
        "mebibytes": (after - before) / 1024,
    }


def measure_apart(what: str, size: int, consumed: int) -> dict[str, Any]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, what, str(size), str(consumed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    print(f"micro batch {MICRO}, global batch {GLOBAL}, data-parallel width {WIDTH}; one rank, one core")
    print(f"{'order':<18}{'dataset':>10}{'consumed':>10}{'first batch':>14}{'ids/s per rank':>17}{'memory':>12}")
    rows = [(what, *place) for what in ("feistel", "sequential") for place in SIZES]
    rows += [(what, *SIZES[0]) for what in ("megatron", "list")]
    for what, size, consumed in rows:
        row = measure_apart(what, size, consumed)
        name = "randperm().tolist()" if what == "list" else what
        print(
            f"{name:<18}{size:>10.0e}{consumed:>10.0e}{row['first_ms']:>11.2f} ms"
            f"{row['ids_per_second']:>17,.0f}{row['mebibytes']:>8.1f} MiB",
            flush=True,
        )
    print("larger datasets do not fit the last two: 8 bytes and about 40 bytes per sample on every rank")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if len(sys.argv) == 4:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    else:
        main()
