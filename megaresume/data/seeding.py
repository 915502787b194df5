"""Random numbers of one sample: seeded by what the sample is, never by what was loaded before it.

Augmentation then does not depend on where a run stopped, on the number of workers or on how far they fetch ahead.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info


def derive(seed: int, epoch: int, index: int, purpose: str) -> int:
    """A 64-bit number named by (seed, epoch, index) and what it is for; the same in every process and release."""
    name = f"megaresume.sample.1/{purpose}/{seed}/{epoch}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


@contextmanager
def seeded(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Inside, Python's, NumPy's and torch's CPU generators are those of this sample; afterwards what they were before.

    A worker process has no random state of anyone else's to give back, so there the states are left as they are.
    """
    number = derive(seed, epoch, index, "seed")
    if get_worker_info() is not None:
        _seed_all(number)
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        _seed_all(number)
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed_all(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    # Not torch.manual_seed: that would seed the device generators as well, which belong to the training step.
    torch.default_generator.manual_seed(number % 2**63)
