"""What 32 adapters cost to save, one after the other, beside one run that holds the same bytes.

Run as `make bench-adapters`. One process; each adapter is 16 MiB of fp32 weights and AdamW moments, 512 MiB in all,
written to the temporary directory, or where MEGARESUME_BENCH_DIR says, and fsynced. Prints medians over interleaved
rounds, and their ratio.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADAPTERS, MEBIBYTES, ROUNDS = 32, 16, 5
ALLOWED = 1.2  # times one save of the same bytes


def main() -> None:
    import torch

    from megaresume import AdapterManager, ResumeManager

    logging.disable(logging.WARNING)
    elements = MEBIBYTES * 2**20 // 4 // 3  # a weight and two moments of 4 bytes
    shape = (elements // 1024, 1024)
    model = torch.nn.ModuleDict(
        {f"adapter{n}": torch.nn.Linear(shape[1], shape[0], bias=False) for n in range(ADAPTERS)}
    )
    model["base"] = torch.nn.Linear(8, 8).requires_grad_(False)
    owns = {n: torch.optim.AdamW(model[n].parameters(), lr=1e-3) for n in model if n != "base"}
    one = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    for optimizer in (*owns.values(), one):
        optimizer.step()

    with tempfile.TemporaryDirectory(dir=os.environ.get("MEGARESUME_BENCH_DIR")) as place:
        root = Path(place)
        whole = ResumeManager(root / "one", model=model, optimizer=one, async_save=False, keep_last=1)
        many = AdapterManager(root / "many", model=model, keep_last=1)
        for name, optimizer in owns.items():
            many.add(name, {}, optimizer=optimizer, parameters=partial(starts_with, f"{name}."))
        whole.resume()
        many.resume_all()
        seconds: dict[str, list[float]] = {"one run": [], f"{ADAPTERS} adapters": []}
        for turn in range(ROUNDS + 1):  # the first one warms up
            whole.end_step(samples=1)
            for name in owns:
                many.end_step(name, samples=1)
            began = time.perf_counter()
            whole.save()
            between = time.perf_counter()
            for name in owns:
                many.save(name)
            ended = time.perf_counter()
            if turn:
                seconds["one run"].append(between - began)
                seconds[f"{ADAPTERS} adapters"].append(ended - between)
        sizes = {
            "one run": size_of(root / "one"),
            f"{ADAPTERS} adapters": size_of(root / "many"),
        }
        whole.close()
        many.close()
    print(f"{'saved':<14}{'bytes':>16}{'seconds':>10}{'GB/s':>8}")
    for what, times in seconds.items():
        median = statistics.median(times)
        print(f"{what:<14}{sizes[what]:>16,}{median:>10.3f}{sizes[what] / median / 1e9:>8.2f}")
    first, second = (statistics.median(times) for times in seconds.values())
    print(f"{second / first:.2f} x one save of the same bytes (allowed: {ALLOWED})")


def starts_with(prefix: str, name: str) -> bool:
    return name.startswith(prefix)


def size_of(root: Path) -> int:
    """Bytes of the shards of the last step under a root."""
    return sum(path.stat().st_size for path in root.rglob(f"step-{ROUNDS + 1:08d}/*.safetensors"))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
