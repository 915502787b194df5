"""The order of one epoch: which sample id stands at which position.

An order maps (epoch, positions) to ids and depends on nothing else, least of all on a global random state. Knows
nothing of batches, tails or what was consumed; ranks matter only to Megatron's sharded order, which is made of shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megaresume.data.permutation import permute
from megaresume.errors import ConfigurationError

Shuffle = Literal["sequential", "feistel", "megatron", "megatron-sharded"]
SHUFFLES: tuple[Shuffle, ...] = ("sequential", "feistel", "megatron", "megatron-sharded")


@dataclass(frozen=True)
class Order:
    """How the ids of an epoch are ordered. Equal orders give equal ids; this is what a checkpoint records of it.

    `epoch_length` is the number of positions in an epoch: the dataset's size, except for Megatron's orders, which leave
    out what does not fill a micro-batch on every rank. `permutation_size` is the number of ids permuted, per shard
    where there are shards; `shard_width` shards take turns of `shard_turn` ids (both 0 where there are none).
    """

    shuffle: Shuffle
    seed: int
    dataset_size: int
    epoch_length: int
    permutation_size: int
    shard_width: int = 0
    shard_turn: int = 0
    _cache: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def ids(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ids (int64) at `positions` (each in [0, epoch_length)) of `epoch`."""
        if self.shuffle == "sequential":
            return positions
        if self.shuffle == "feistel":
            return permute(positions, size=self.permutation_size, seed=self.seed, epoch=epoch)
        permutation = self._megatron_permutation(epoch)
        ids: NDArray[np.int64]
        if self.shuffle == "megatron":
            ids = permutation[positions]
            return ids
        turn, within = np.divmod(positions, self.shard_turn * self.shard_width)
        shard, column = np.divmod(within, self.shard_turn)
        ids = shard * self.permutation_size + permutation[turn * self.shard_turn + column]
        return ids

    def _megatron_permutation(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._cache:
            import torch  # Megatron's order is torch's; the others must work where torch is not imported

            generator = torch.Generator()
            generator.manual_seed(epoch)
            permutation = torch.randperm(self.permutation_size, generator=generator).numpy()
            self._cache.clear()  # one epoch at a time: this is the order that costs memory
            self._cache[epoch] = permutation
        return self._cache[epoch]


def make_order(
    shuffle: bool | str, *, seed: int, dataset_size: int, micro_batch_size: int, data_parallel_size: int
) -> Order:
    """The order these settings ask for. Raises ConfigurationError for an unknown kind or one that cannot be served."""
    kind = _kind(shuffle)
    if kind in ("sequential", "feistel"):
        return Order(kind, seed, dataset_size, dataset_size, dataset_size)
    if seed != 0:
        raise ConfigurationError(
            f"shuffle={kind!r} is seeded by the epoch number alone, as Megatron's sampler is: seed must be 0, "
            f"got {seed}; use shuffle='feistel' for an order that follows a seed"
        )
    block = micro_batch_size * data_parallel_size
    epoch_length = dataset_size - dataset_size % block
    if epoch_length == 0:
        raise ConfigurationError(
            f"shuffle={kind!r} has nothing to serve: dataset_size {dataset_size} is smaller than micro_batch_size "
            f"{micro_batch_size} x data_parallel_size {data_parallel_size} = {block}"
        )
    if kind == "megatron":
        return Order(kind, 0, dataset_size, epoch_length, dataset_size - dataset_size % micro_batch_size)
    shard = epoch_length // data_parallel_size
    return Order(kind, 0, dataset_size, epoch_length, shard, data_parallel_size, micro_batch_size)


def _kind(shuffle: Any) -> Shuffle:
    if isinstance(shuffle, bool):
        return "feistel" if shuffle else "sequential"
    for kind in SHUFFLES:
        if shuffle == kind:
            return kind
    raise ConfigurationError(f"shuffle must be True, False or one of {', '.join(SHUFFLES)}, got {shuffle!r}")
