"""ResumableDataLoader: torch's DataLoader, going on at exactly the sample where training stopped.

It wraps a DataLoader by public arguments only. What is read follows from the sampler (map-style datasets) or from the
states of the stream itself (`stream.py`); fetching ahead counts nothing. Knows nothing of checkpoints.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from megaresume.data.checks import as_count
from megaresume.data.position import Position
from megaresume.data.sampler import DataParallelBatchSampler, MicroBatch
from megaresume.data.samples import Collate, FailurePolicy, Key, Replacement, Samples, iterator_failed
from megaresume.data.seeding import derive
from megaresume.data.stream import OnIterable, StreamReader
from megaresume.data.workers import IgnoreStopSignals
from megaresume.errors import ConfigurationError

logger = logging.getLogger("megaresume.data")

_REFUSED = {
    "sampler": "the order comes from batch_sampler",
    "shuffle": "the order comes from batch_sampler (its own shuffle=)",
    "drop_last": "the tail comes from batch_sampler (its epoch_tail=)",
    "generator": "the loader has one of its own, so that no random state of the training step is drawn from",
    "in_order": "batches always come in order here: a resume could not repeat any other",
}


class ResumableDataLoader:
    """Batches of `dataset` in the order of `batch_sampler`, from its `consumed_samples` on.

    Map-style datasets take a `DataParallelBatchSampler` as `batch_sampler`; another sampler is refused, because nothing
    is known of its order. No skipped sample is read. Before each sample Python's, NumPy's and torch's CPU generators
    are seeded from (seed, epoch, index), and put back afterwards in this process. Workers ignore TERM and USR1.

    An `IterableDataset` takes `batch_size` (the micro-batch) and `global_batch_size` instead; this loader itself is
    then what counts (`advance()`, `state_dict()`, ...), see `stream.StreamReader`. So does a torchdata
    `StatefulDataLoader` given as `dataset`, which brings its own workers and batches.

    Args beyond torch's public ones (`num_workers`, `collate_fn`, `pin_memory`, `prefetch_factor`, `persistent_workers`,
    `timeout`, `multiprocessing_context`, ...):
        max_replacements: how many other samples are tried in place of one that fails to load (0: the error is raised).
        none_fails: a sample that is None has failed to load.
        on_iterable: what a resume does with a stream that has no state: None refuses, "restart" begins it again,
            "fast-forward" reads up to the place and throws away.

    Raises ConfigurationError or TypeError for arguments that cannot be served.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_sampler: DataParallelBatchSampler | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        max_replacements: int = 0,
        none_fails: bool = False,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        on_iterable: OnIterable | None = None,
        **torch_arguments: Any,
    ) -> None:
        for name in _REFUSED.keys() & torch_arguments.keys():
            raise ConfigurationError(f"ResumableDataLoader takes no {name}=: {_REFUSED[name]}")
        attempts = as_count("max_replacements", max_replacements, minimum=0)
        torch_arguments |= {
            "num_workers": as_count("num_workers", num_workers, minimum=0),
            "worker_init_fn": IgnoreStopSignals(worker_init_fn),
        }
        self.dataset = dataset
        self._position: DataParallelBatchSampler | StreamReader
        self._source: _SampleReader | StreamReader
        if isinstance(dataset, (IterableDataset, DataLoader)):
            if batch_sampler is not None or attempts or none_fails:
                raise ConfigurationError(
                    f"{type(dataset).__name__} is a stream of no indices: it takes batch_size= and global_batch_size= "
                    "and neither batch_sampler= nor max_replacements= nor none_fails="
                )
            self._position = self._source = StreamReader(
                dataset,
                micro_batch_size=batch_size,
                global_batch_size=global_batch_size,
                data_parallel_rank=data_parallel_rank,
                data_parallel_size=data_parallel_size,
                on_iterable=on_iterable,
                collate_fn=collate_fn or default_collate,
                torch_arguments=torch_arguments,
            )
            return
        given = (batch_size, global_batch_size, data_parallel_rank, data_parallel_size, on_iterable)
        if not isinstance(batch_sampler, DataParallelBatchSampler) or any(value is not None for value in given):
            raise ConfigurationError(
                "a map-style dataset takes batch_sampler=DataParallelBatchSampler(...), which knows batch sizes and "
                f"ranks; got batch_sampler of type {type(batch_sampler).__name__} (another sampler's order cannot be "
                f"resumed), batch_size={batch_size!r}, global_batch_size={global_batch_size!r}, "
                f"data_parallel_rank={data_parallel_rank!r}, on_iterable={on_iterable!r}"
            )
        self._position = batch_sampler
        policy = FailurePolicy(attempts=attempts, none_fails=none_fails)
        self._source = _SampleReader(dataset, batch_sampler, policy, collate_fn or default_collate, torch_arguments)

    def __iter__(self) -> Iterator[Any]:
        """Batches from `consumed_samples` on: of the rest of the epoch, or of the stream, as the sampler's `iter()`."""
        return iter(self._source)

    def __len__(self) -> int:
        """Batches the next `iter()` will yield; TypeError where that has no end or is not known."""
        return len(self._position)

    # -- where training stands: what batch_sampler says, or the stream itself

    @property
    def consumed_samples(self) -> int:
        """True samples trained since the start of the run, over all ranks."""
        return self._position.consumed_samples

    @property
    def epoch(self) -> int:
        """Epoch of the next sample."""
        return self._position.epoch

    @property
    def global_batch_size(self) -> int:
        """Nominal samples of the next global batch."""
        return self._position.global_batch_size

    @property
    def micro_batch_size(self) -> int:
        """Samples per data-parallel rank and micro-batch."""
        return self._position.micro_batch_size

    @property
    def num_microbatches(self) -> int:
        """Batches of this rank in the next global batch."""
        return self._position.num_microbatches

    @property
    def replaced_samples(self) -> int:
        """Samples of this rank that failed to load and were trained as another, on top of those a resume was told."""
        return self._source.replaced_samples if isinstance(self._source, _SampleReader) else 0

    def advance(self) -> int:
        """Count the global batch that was just trained; returns its true size."""
        return self._position.advance()

    @property
    def per_rank_state(self) -> bool:
        """Whether `state_dict()` is this rank's alone (a stream's), so that each rank must store and get back its
        own."""
        return isinstance(self._position, StreamReader)

    def state_dict(self) -> dict[str, Any]:
        """JSON values that tell where training stands; of a stream, those of this data-parallel rank alone."""
        return self._position.state_dict()

    def check_state(self, state: Mapping[str, Any], allow_data_change: Set[str] = frozenset()) -> tuple[str, ...]:
        """The changes of settings `load_state_dict` would make; raises what it would raise. Pure."""
        return self._position.check_state(state, allow_data_change)

    def load_state_dict(self, state: Mapping[str, Any], *, allow_data_change: Set[str] = frozenset()) -> None:
        """Go on where `state` was taken; all or nothing."""
        self._position.load_state_dict(state, allow_data_change=allow_data_change)

    def skip_consumed_samples(self, n: int) -> None:
        """Go on `n` true samples (over all ranks) further.

        Raises ConfigurationError for more than is left, or while an iterator is live. Nothing has changed then.
        """
        self._position.seek(self.consumed_samples + as_count("n", n, minimum=0))

    def resume_from_checkpoint(self, n: int, *, replaced_samples: int = 0) -> None:
        """Go to `n` true samples (over all ranks) since the start of the run. Idempotent; raises as the skip does."""
        replaced = as_count("replaced_samples", replaced_samples, minimum=0)
        self._position.seek(as_count("n", n, minimum=0))
        if isinstance(self._source, _SampleReader):
            self._source.replaced_before = replaced

    def get_state(self) -> dict[str, int]:
        """`consumed_train_samples` over all ranks and `replaced_samples` of this rank, as of the last `advance()`."""
        return {"consumed_train_samples": self.consumed_samples, "replaced_samples": self.replaced_samples}


class _SampleReader:
    """A map-style dataset, read in the sampler's order."""

    def __init__(
        self,
        dataset: Any,
        sampler: DataParallelBatchSampler,
        policy: FailurePolicy,
        collate_fn: Callable[[list[Any]], Any],
        torch_arguments: Mapping[str, Any],
    ) -> None:
        size = len(dataset)
        if size != sampler.dataset_size:
            raise ConfigurationError(
                f"the dataset holds {size} samples, its sampler was made for dataset_size {sampler.dataset_size}; "
                "make the sampler with len(dataset)"
            )
        if hasattr(dataset, "__getitems__"):
            logger.info("%s.__getitems__ is not used: samples are read and seeded one by one", type(dataset).__name__)
        self.sampler = sampler
        self.replaced_before = 0
        self.replacements: deque[tuple[Position, int]] = deque()
        self.keys = _Keys(sampler)
        generator = torch.Generator()
        generator.manual_seed(derive(sampler.seed, 0, 0, "loader") % 2**63)
        self.loader: DataLoader[Any] = DataLoader(
            Samples(dataset, size, sampler.seed, policy),
            batch_sampler=self.keys,
            collate_fn=Collate(collate_fn),
            generator=generator,
            **torch_arguments,
        )

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self)

    @property
    def replaced_samples(self) -> int:
        # Batches that were handed out but not trained come again after a resume, and are counted then.
        while self.replacements and self.replacements[0][0].consumed < self.sampler.consumed_samples:
            self.replaced_before += self.replacements.popleft()[1]
        return self.replaced_before


class _Keys:
    """The batch sampler that torch sees: micro-batches of `Key`, beside a queue of what was asked for, in order."""

    def __init__(self, sampler: DataParallelBatchSampler) -> None:
        self._sampler = sampler
        self.asked: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[list[Key]]:
        asked: deque[MicroBatch] = deque()
        self.asked = asked
        return self._generate(self._sampler._micro_batches(self._sampler._start()), asked)

    def __len__(self) -> int:
        return len(self._sampler)

    @staticmethod
    def _generate(batches: Iterator[MicroBatch], asked: deque[MicroBatch]) -> Iterator[list[Key]]:
        for batch in batches:
            asked.append(batch)
            yield [Key(epoch, index) for epoch, index in zip(batch.epochs, batch.ids, strict=True)]


class _Batches:
    """One pass over the loader. The sampler holds it weakly, to refuse a restore behind its back."""

    def __init__(self, reader: _SampleReader) -> None:
        self._reader = reader
        self._begun_at = reader.sampler._position
        reader.replaced_samples  # noqa: B018  counts what was trained of the former pass, the rest comes again
        reader.replacements.clear()
        self._inner = iter(reader.loader)
        self._asked = reader.keys.asked
        self._last: Position | None = None
        self._failed = ""  # the error in words: itself it would hold on to frames, and those to the workers
        reader.sampler._live.add(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        sampler = self._reader.sampler
        if self._failed:
            raise iterator_failed(self._failed)
        try:
            for batch, replacements in self._inner:
                self._last = self._asked.popleft().start
                if replacements:
                    self._report(replacements)
                return batch
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            sampler._live.discard(self)
            raise
        if self in sampler._live and self._last is not None:
            sampler._note_served(self._begun_at, self._last)
        sampler._live.discard(self)
        raise StopIteration

    def _report(self, replacements: list[Replacement]) -> None:
        assert self._last is not None
        self._reader.replacements.append((self._last, len(replacements)))
        for epoch, index, used, reason in replacements:
            logger.warning("sample %d of epoch %d %s: sample %d is used instead", index, epoch, reason, used)
