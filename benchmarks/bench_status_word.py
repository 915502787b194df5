"""What the status word costs a step: 8 ranks, gloo, each step a sleep, so that what is measured is the exchange alone.

    python -m benchmarks.bench_status_word

Post and take are timed apart from the steps on every rank; the exchange itself goes on behind the step. The second
figure is the same word reduced and waited for at once, as a plain `all_reduce` of a stop flag would be.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from megaresume.status import StatusWord
from tests.ranks import Ranks

RANKS, STEPS, STEP_S = 8, 200, 0.05


def measure(wait_at_once: bool) -> list[float]:
    """Seconds per step that this rank spent on the word. Collective."""
    word, seconds = StatusWord(), []
    for _ in range(STEPS):
        time.sleep(STEP_S)
        began = time.perf_counter()
        if not wait_at_once:
            word.take()
        word.post(stop=False, diverged=False, save_failed=False, loss=1.0)
        if wait_at_once:
            word.take()
        seconds.append(time.perf_counter() - began)
    word.take()
    return seconds[10:]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        pool = Ranks(Path(directory))
        try:
            for name, at_once in (("taken a step later", False), ("waited for at once", True)):
                everyone = [each for rank in pool.run(measure, at_once, world_size=RANKS) for each in rank]
                quantiles = statistics.quantiles(everyone, n=100)
                print(
                    f"{name}: median {statistics.median(everyone) * 1e6:.0f} us, "
                    f"90 % {quantiles[89] * 1e6:.0f} us, 99 % {quantiles[98] * 1e6:.0f} us per step"
                )
        finally:
            pool.close()


if __name__ == "__main__":
    main()
