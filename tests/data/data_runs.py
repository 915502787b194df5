"""Training runs without training: the samplers of all data-parallel ranks, stepped together in one process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from megaresume.data import DataParallelBatchSampler


class Step(NamedTuple):
    """One global batch: its true ids in global order, and each rank's micro-batches as they were yielded."""

    ids: list[int]
    per_rank: list[list[list[int]]]


class Run:
    """All ranks of one run. `stop()` and `Run(state=...)` are its interruption and its resume."""

    def __init__(
        self,
        *,
        width: int,
        micro: int = 1,
        state: dict[str, Any] | None = None,
        allow: frozenset[str] = frozenset(),
        dataset_size: int,
        **settings: Any,
    ) -> None:
        self.samplers = [
            DataParallelBatchSampler(
                dataset_size, micro_batch_size=micro, data_parallel_rank=rank, data_parallel_size=width, **settings
            )
            for rank in range(width)
        ]
        if state is not None:
            for sampler in self.samplers:
                sampler.load_state_dict(state, allow_data_change=allow)
        self.iterators: list[Any] = []

    @property
    def consumed(self) -> int:
        """The counter, which must be the same on every rank."""
        (consumed,) = {sampler.consumed_samples for sampler in self.samplers}
        return consumed

    def step(self) -> Step:
        """Train one global batch. Raises IndexError when the run is at its end."""
        if self.samplers[0].finished:
            raise IndexError("the run is finished")
        number = self.samplers[0].num_microbatches
        first = [next(iterator, None) for iterator in self.iterators]
        if not first or first[0] is None:
            assert all(batch is None for batch in first), "ranks must end an epoch together"
            self.iterators = [iter(sampler) for sampler in self.samplers]
            first = [next(iterator) for iterator in self.iterators]
        per_rank = [
            [batch, *(next(iterator) for _ in range(number - 1))]
            for batch, iterator in zip(first, self.iterators, strict=True)
        ]
        masks = [sampler.masks for sampler in self.samplers]
        ids = [
            sample
            for micro in range(number)
            for rank in range(len(self.samplers))
            for sample, counts in zip(per_rank[rank][micro], masks[rank][micro], strict=True)
            if counts
        ]
        assert all(sampler.advance() == len(ids) for sampler in self.samplers)
        return Step(ids, per_rank)

    def steps(self, number: int) -> list[Step]:
        """Train `number` global batches."""
        return [self.step() for _ in range(number)]

    def stop(self) -> dict[str, Any]:
        """The state all ranks agree on, as a checkpoint would hold it."""
        texts = {json.dumps(sampler.state_dict(), allow_nan=False) for sampler in self.samplers}
        (text,) = texts
        state: dict[str, Any] = json.loads(text)
        return state


def ids_of(steps: list[Step]) -> list[list[int]]:
    """The true ids of each step, in global order."""
    return [step.ids for step in steps]
