"""A keyed bijection on [0, n): the shuffle that costs no memory and no start-up, whatever n is.

An alternating Feistel network over the mixed radix a x b >= n with a, b near sqrt(n): so few points of the a x b grid lie
outside [0, n) that walking the cycle back inside almost never takes a second turn. Positions are evaluated one by one or
many at a time, in any order. It shuffles; it is not cryptography. Knows nothing of epochs, ranks or batches.

The algorithm is part of the checkpoint format: a change of any constant here would silently give resumed runs another order.
"""

from __future__ import annotations

import hashlib
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)  # the finaliser of splitmix64
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def permute(positions: NDArray[Any], *, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The ids at `positions` (int, any shape, each in [0, size)) of the permutation of [0, size) named by (seed, epoch).

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
    name = f"megaresume.feistel.1/{size}/{seed}/{epoch}".encode()
    return np.frombuffer(hashlib.shake_128(name).digest(8 * _ROUNDS), dtype="<u8").astype(np.uint64)


def _network(points: NDArray[np.uint64], size: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    width = np.uint64(isqrt(size - 1) + 1)
    height = np.uint64(-(-size // int(width)))
    high, low = np.divmod(points, width)
    for number in range(0, _ROUNDS, 2):
        low = (low + _mix(high + keys[number])) % width
        high = (high + _mix(low + keys[number + 1])) % height
    return high * width + low


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words ^= words >> _SHIFT_1
    words *= _MULTIPLY_1
    words ^= words >> _SHIFT_2
    words *= _MULTIPLY_2
    words ^= words >> _SHIFT_3
    # low + mix must not wrap around 2**64: a sum that wraps before the modulo would make rounds collide.
    words >>= np.uint64(1)
    return words
