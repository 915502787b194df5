"""ResumableDataLoader (first cut)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from megaresume.data.sampler import DataParallelBatchSampler


class _WorkerInit:
    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self.inner = inner

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if self.inner is not None:
            self.inner(worker_id)


class ResumableDataLoader:
    def __init__(
        self,
        dataset: Any,
        *,
        batch_sampler: DataParallelBatchSampler,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        self.dataset, self.batch_sampler = dataset, batch_sampler
        self._loader = DataLoader(
            dataset,
            batch_sampler=batch_sampler,  # type: ignore[arg-type]
            num_workers=num_workers,
            worker_init_fn=_WorkerInit(worker_init_fn),
            generator=generator if generator is not None else torch.Generator(),
            **kwargs,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def skip_consumed_samples(self, n: int) -> None:
        self.batch_sampler.seek(self.batch_sampler.consumed_samples + n)

    def resume_from_checkpoint(self, n: int) -> None:
        self.batch_sampler.seek(n)

    def get_state(self) -> dict[str, int]:
        return {"consumed_train_samples": self.batch_sampler.consumed_samples}
