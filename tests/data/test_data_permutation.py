"""The shuffle that costs nothing: a bijection at every size, even in its statistics, and fixed for ever."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.data import DataParallelBatchSampler
from megaresume.data.permutation import permute

KNOWN_10 = [9, 1, 7, 3, 2, 8, 4, 0, 5, 6]
KNOWN_LARGE = [4443071915940, 2702807526845, 1209457055475, 8857499963081]


def epoch_of(size: int, *, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(size), size=size, seed=seed, epoch=epoch)


def excess(observed: np.ndarray, expected: float) -> float:
    """Chi-squared in standard deviations above what chance gives."""
    freedom = observed.size - 1
    chi = float(((observed - expected) ** 2 / expected).sum())
    return (chi - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [*range(1, 70), 97, 1000, 4095, 4096, 4097, 65_537])
def test_every_id_once(size: int) -> None:
    for epoch in range(3):
        assert np.array_equal(np.sort(epoch_of(size, epoch=epoch)), np.arange(size))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(size=st.integers(2, 2**48), seed=st.integers(-(2**70), 2**70), data=st.data())
def test_large_sizes_stay_in_range_and_do_not_collide(size: int, seed: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, max(0, size - 500)))
    positions = np.arange(first, min(size, first + 500))
    ids = permute(positions, size=size, seed=seed, epoch=7)
    assert ids.dtype == np.int64 and ids.min() >= 0 and ids.max() < size
    assert np.unique(ids).size == positions.size
    one_by_one = [int(permute(np.array([position]), size=size, seed=seed, epoch=7)[0]) for position in positions[:5]]
    assert one_by_one == ids[:5].tolist(), "an id depends on which others were asked for"


def test_the_order_is_part_of_the_format() -> None:
    """Known answers. If this fails, resumed runs would silently get another order: it must never change."""
    assert epoch_of(10, seed=1, epoch=2).tolist() == KNOWN_10
    assert permute(np.arange(4), size=10**13, seed=1234, epoch=5).tolist() == KNOWN_LARGE


def test_position_bias() -> None:
    size, epochs = 12, 3000
    table = np.zeros((size, size))
    for epoch in range(epochs):
        table[np.arange(size), epoch_of(size, epoch=epoch)] += 1
    # rows and columns each sum to `epochs`, so (size - 1)^2 cells are free
    chi = ((table - epochs / size) ** 2 / (epochs / size)).sum()
    assert abs(chi - (size - 1) ** 2) < 5 * math.sqrt(2 * (size - 1) ** 2)


def test_small_permutations_all_occur_alike() -> None:
    size, epochs = 5, 4000
    seen = Counter(tuple(epoch_of(size, epoch=epoch).tolist()) for epoch in range(epochs))
    counts = np.array([seen[order] for order in permutations(range(size))])
    assert excess(counts, epochs / counts.size) < 5


@pytest.mark.parametrize("size", [64, 1000, 4096, 10_007])
def test_serial_correlation(size: int) -> None:
    """Differences of neighbours, and of positions one row of the network's grid apart, are spread evenly."""
    row = math.isqrt(size - 1) + 1
    row += row % 2
    for lag in (1, 2, row):
        differences = np.zeros(size)
        epochs = max(20, 200_000 // size)
        for epoch in range(epochs):
            ids = epoch_of(size, epoch=epoch)
            differences += np.bincount((ids[lag:] - ids[:-lag]) % size, minlength=size)
        assert abs(excess(differences[1:], differences.sum() / (size - 1))) < 5
    ids = epoch_of(10_007).astype(float)
    assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 5 / math.sqrt(ids.size)


def test_seeds_and_epochs_are_unrelated() -> None:
    size = 10_000
    orders = [epoch_of(size, seed=seed, epoch=epoch) for seed in (0, 1, 2, -1) for epoch in (0, 1, 2)]
    for number, one in enumerate(orders):
        for other in orders[:number]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(size)
            assert (one == other).sum() < 10  # about one place in common is what chance gives
            shifts = np.bincount((one - other) % size, minlength=size)
            assert shifts.max() < 12


def test_first_batch_far_into_a_huge_dataset_is_free() -> None:
    def first_batch() -> list[int]:
        sampler = DataParallelBatchSampler(
            10**13,
            micro_batch_size=4,
            global_batch_size=1024,
            data_parallel_rank=5,
            data_parallel_size=64,
            consumed_samples=10**12,
        )
        return next(iter(sampler))

    first_batch()  # not the import of numpy's parts
    times = []
    for _ in range(5):
        start = time.perf_counter()
        first_batch()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005
    tracemalloc.start()
    first_batch()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
