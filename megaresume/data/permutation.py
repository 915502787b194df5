"""A keyed bijection on [0, n): the shuffle that costs no memory and no start-up, whatever n is.

An alternating Feistel network over a grid of width x height >= n, both near sqrt(n): so few points of the grid lie
outside [0, n) that walking the cycle back inside almost never takes a second turn. Positions are evaluated one by one
or many at a time, in any order. It shuffles; it is not cryptography. Knows nothing of epochs' ends, ranks or batches.

The algorithm is part of the checkpoint format: another constant here would silently give resumed runs another order.
"""

from __future__ import annotations

import hashlib
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)  # the finaliser of splitmix64
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE = np.uint64(1)


def permute(positions: NDArray[Any], *, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The ids at `positions` (int, any shape, each in [0, size)) of the permutation of [0, size) named (seed, epoch).

    Returns int64 of the same shape. Pure: no random state is read or moved.
    """
    keys = _round_keys(size, seed, epoch)
    ids = _network(np.asarray(positions).astype(np.uint64).ravel(), size, keys)
    outside = np.flatnonzero(ids >= size)
    while outside.size:
        ids[outside] = _network(ids[outside], size, keys)
        outside = outside[ids[outside] >= size]
    return ids.astype(np.int64).reshape(np.shape(positions))


def _round_keys(size: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    # 8 rounds pass every test of ours from 1,000 samples on; on small grids a round mixes little, and costs little.
    rounds = 8 if size >= 4096 else 16
    name = f"megaresume.feistel.1/{size}/{seed}/{epoch}".encode()
    return np.frombuffer(hashlib.shake_128(name).digest(8 * rounds), dtype="<u8").astype(np.uint64)


def _network(points: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Rows of even length: on an odd x odd grid every round is an even permutation, and so would be the whole.
    even = isqrt(size - 1) + 1
    even += even % 2
    width, height = np.uint64(even), np.uint64(-(-size // even))
    high, low = points // width, points % width
    for number in range(0, len(keys), 2):
        low = (low + _mix(high + keys[number])) % width
        high = (high + _mix(low + keys[number + 1])) % height
    ids: NDArray[np.uint64] = high * width + low
    return ids


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words ^= words >> _SHIFT_1
    words *= _MULTIPLY_1
    words ^= words >> _SHIFT_2
    words *= _MULTIPLY_2
    words ^= words >> _SHIFT_3
    # A sum that wraps around 2**64 before the modulo would let two points of a round meet: leave it room.
    words >>= _ONE
    return words
