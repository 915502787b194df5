"""Streams: iterable datasets, resumed through their own state, or else refused.

A stream has no indices, so what is remembered is the state of the dataset in each worker of each data-parallel rank
after the last batch that was *trained*. Every batch carries the state its worker had after it; states of batches that
were only fetched ahead are never kept. A state is one rank's: each rank saves and loads its own.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megaresume.data.checks import as_count
from megaresume.data.layout import check_divides, data_parallel_place
from megaresume.data.samples import iterator_failed
from megaresume.data.seeding import seeded
from megaresume.data.stream_state import Layout, StreamPosition, check_stream_state, stream_state_to_json
from megaresume.errors import ConfigurationError

logger = logging.getLogger("megaresume.data")

OnIterable = Literal["restart", "fast-forward"]
_POLICIES: tuple[OnIterable, ...] = ("restart", "fast-forward")
_TURN_PASSES = -1  # the worker of a delivery that only keeps the round of workers in step
_PROGRESS_SECONDS = 5.0


class Delivery(NamedTuple):
    """What a worker hands over: a micro-batch, and the worker's own state after it (None: the stream has none)."""

    worker: int
    batch: Any
    state: dict[str, Any] | None


class StreamReader:
    """An `IterableDataset`, or a loader that has a state, in micro-batches; counts the way a sampler does.

    The dataset splits itself over data-parallel ranks and workers (`get_worker_info()`), as torch asks of it. One with
    `state_dict()` and `load_state_dict()` is resumed through them, by `load_state_dict` of this reader; a plain one
    only as `on_iterable` says. `advance()` counts `global_batch_size` samples, a short last micro-batch like a whole.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int | None,
        global_batch_size: int | None,
        data_parallel_rank: int | None,
        data_parallel_size: int | None,
        on_iterable: OnIterable | None,
        collate_fn: Callable[[list[Any]], Any],
        torch_arguments: Mapping[str, Any],
    ) -> None:
        if on_iterable is not None and on_iterable not in _POLICIES:
            raise ConfigurationError(f"on_iterable must be None or one of {', '.join(_POLICIES)}, got {on_iterable!r}")
        if torch_arguments.get("persistent_workers"):
            raise ConfigurationError(
                "persistent_workers=True cannot serve a stream: a worker learns where to begin when it is started"
            )
        micro = as_count("batch_size", micro_batch_size)
        rank, width = data_parallel_place(data_parallel_rank, data_parallel_size)
        self.micro_batch_size, self.global_batch_size = micro, micro * width
        if global_batch_size is not None:
            self.global_batch_size = as_count("global_batch_size", global_batch_size)
        check_divides(self.global_batch_size, micro, width)
        self.num_microbatches = self.global_batch_size // (micro * width)
        self.stateful = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._layout = Layout(micro, self.global_batch_size, rank, width, int(torch_arguments["num_workers"]))
        self._on_iterable = on_iterable
        self._open = _opener(dataset, self._layout, self.stateful, collate_fn, torch_arguments)
        self._now = StreamPosition()
        self._exhausted = False
        self._handed_out: deque[tuple[int, dict[str, Any] | None]] = deque()  # not trained yet
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def consumed_samples(self) -> int:
        """Samples trained since the start of the run, over all ranks."""
        return self._now.consumed

    @property
    def epoch(self) -> int:
        """Passes over the stream before the present one."""
        return self._now.epoch

    def __len__(self) -> int:
        raise TypeError("the length of a stream is not known")

    def __iter__(self) -> Iterator[Any]:
        """Batches after the last trained one; after a pass that was exhausted, those of the next pass."""
        if self._exhausted:
            self._now, self._exhausted = StreamPosition(self._now.consumed, self._now.epoch + 1), False
        begin, skip = self._now, 0
        if self._now.batches and not self.stateful:
            self._refuse_plain(self._now.batches)
            if self._on_iterable == "restart":
                self._now = self._restarted(self._now)
            begin, skip = StreamPosition(self._now.consumed, self._now.epoch), self._now.batches
        self._handed_out.clear()
        return _Pass(self, self._open(begin), skip)

    def advance(self) -> int:
        """Count the global batch that was just trained; returns `global_batch_size`. Call it once per training step."""
        now = replace(self._now, consumed=self._now.consumed + self.global_batch_size, workers=dict(self._now.workers))
        for _ in range(min(self.num_microbatches, len(self._handed_out))):
            worker, state = self._handed_out.popleft()
            now = replace(now, batches=now.batches + 1, last_worker=worker)
            if state is not None:
                now.workers[str(worker)] = state
        self._now = now
        return self.global_batch_size

    def seek(self, consumed_samples: int) -> None:
        """Go to `consumed_samples` since the start of the run, counted in whole micro-batches of this one pass.

        Raises ConfigurationError unless training stands there already or `on_iterable` says how: a count is no state.
        """
        consumed = as_count("consumed_samples", consumed_samples, minimum=0)
        if consumed == self.consumed_samples:
            return
        block = self._layout.micro_batch_size * self._layout.data_parallel_size
        if consumed % block:
            raise ConfigurationError(
                f"consumed_samples {consumed} is no whole number of micro-batches of {block} samples over all ranks; "
                f"{consumed - consumed % block} or {consumed - consumed % block + block} would be"
            )
        self._refuse_plain(consumed // block)
        self._refuse_live()
        if self.stateful and self._on_iterable == "fast-forward":
            raise ConfigurationError("a stream with a state of its own is not fast-forwarded; use load_state_dict")
        position = StreamPosition(consumed, 0, consumed // block)
        self._now = self._restarted(position) if self._on_iterable == "restart" else position
        self._exhausted = False

    def state_dict(self) -> dict[str, Any]:
        """JSON values that tell where this rank stands. UnsupportedError where the dataset's own are not."""
        return stream_state_to_json(self._now, self._layout)

    def check_state(self, state: Mapping[str, Any], allow_data_change: Set[str] = frozenset()) -> tuple[str, ...]:
        """The changes `load_state_dict` would make, a sentence each; raises what it would raise. Pure."""
        return self._planned(state, allow_data_change)[1]

    def load_state_dict(self, state: Mapping[str, Any], *, allow_data_change: Set[str] = frozenset()) -> None:
        """Go on where `state` was taken on this rank; all or nothing.

        Raises DataMismatchError naming field and both values, TrainerStateError or FormatError for a state that is not
        one, ConfigurationError for a plain stream without `on_iterable` or while an iterator is live.
        """
        position, changes = self._planned(state, allow_data_change)
        for change in changes:
            logger.warning("data: %s, from consumed sample %d on", change, position.consumed)
        if position.batches and not self.stateful and self._on_iterable == "restart":
            position = self._restarted(position)
        self._now, self._exhausted = position, False

    def _planned(self, state: Mapping[str, Any], allowed: Set[str]) -> tuple[StreamPosition, tuple[str, ...]]:
        position, changes = check_stream_state(
            state,
            self._layout,
            allowed,
            stateful=self.stateful,
            restarted=not self.stateful and self._on_iterable == "restart",
        )
        if position.batches and not self.stateful:
            self._refuse_plain(position.batches)
        if position != self._now:
            self._refuse_live()
        return position, changes

    def _refuse_plain(self, batches: int) -> None:
        if self._on_iterable is None:
            raise ConfigurationError(
                f"a plain stream cannot go on after {batches} micro-batches of this rank: only a state of its own "
                "would tell where that is. Give the dataset state_dict() and load_state_dict() and load what it saved, "
                'or say on_iterable="fast-forward" (read up to there and throw away) or "restart" (begin again)'
            )

    def _restarted(self, position: StreamPosition) -> StreamPosition:
        logger.warning(
            'data: the stream restarts at its beginning (on_iterable="restart"): %d micro-batches of this rank are '
            "trained again",
            position.batches,
        )
        return StreamPosition(position.consumed, position.epoch)

    def _refuse_live(self) -> None:
        if len(self._live):
            raise ConfigurationError(
                "cannot move: an iterator of this stream is live and began elsewhere (its workers may have fetched "
                "already). Restore first and call iter() afterwards, or delete the iterator"
            )


class _Pass:
    """One pass over a stream; the reader holds it weakly, to refuse a restore behind its back."""

    def __init__(self, reader: StreamReader, deliveries: Iterator[Delivery], skip: int) -> None:
        self._reader, self._deliveries, self._skip, self._skipped = reader, deliveries, skip, 0
        self._told = time.monotonic()
        self._failed = ""  # the error in words: itself it would hold on to frames, and those to the workers
        reader._live.add(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._failed:
            raise iterator_failed(self._failed)
        try:
            return self._read()
        except StopIteration:
            self._reader._live.discard(self)
            raise
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            self._reader._live.discard(self)
            raise

    def _read(self) -> Any:
        for worker, batch, state in self._deliveries:
            if worker == _TURN_PASSES:
                continue
            if self._skipped < self._skip:
                self._skipped += 1
                self._tell_progress()
                continue
            self._reader._handed_out.append((worker, state))
            return batch
        if self._skipped < self._skip:
            raise ConfigurationError(
                f"the stream ended after {self._skipped} of the {self._skip} micro-batches to fast-forward over"
            )
        self._reader._exhausted = True
        raise StopIteration

    def _tell_progress(self) -> None:
        done = self._skipped == self._skip
        if not done and time.monotonic() - self._told < _PROGRESS_SECONDS:
            return
        self._told = time.monotonic()
        filled = 30 * self._skipped // self._skip
        if sys.stderr.isatty():
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\rfast-forward [{bar}] {self._skipped}/{self._skip}" + ("\n" if done else ""))
        else:
            logger.info("data: fast-forwarded over %d of %d micro-batches", self._skipped, self._skip)


def _opener(
    dataset: Any,
    layout: Layout,
    stateful: bool,
    collate_fn: Callable[[list[Any]], Any],
    torch_arguments: Mapping[str, Any],
) -> Callable[[StreamPosition], Iterator[Delivery]]:
    """A function that begins a pass at a position."""
    if isinstance(dataset, DataLoader):
        if not stateful:
            raise ConfigurationError(
                f"a {type(dataset).__name__} without state_dict() and load_state_dict() cannot be resumed; give its "
                "dataset, or a torchdata StatefulDataLoader"
            )
        return lambda position: _deliver_loader(dataset, position)
    initial = copy.deepcopy(dataset.state_dict()) if stateful else None

    def open_workers(position: StreamPosition) -> Iterator[Delivery]:
        generator = torch.Generator()  # one of its own: iter() of a DataLoader draws a number
        generator.manual_seed(0)
        part = _WorkerPart(dataset, initial, layout, collate_fn, position)
        loader: DataLoader[Delivery] = DataLoader(
            part, batch_size=None, collate_fn=_as_it_is, generator=generator, **torch_arguments
        )
        return iter(loader)

    return open_workers


def _deliver_loader(loader: Any, position: StreamPosition) -> Iterator[Delivery]:
    if position.batches:
        loader.load_state_dict(copy.deepcopy(position.workers["0"]))
    for batch in loader:
        yield Delivery(0, batch, copy.deepcopy(loader.state_dict()))


class _WorkerPart(IterableDataset[Delivery]):
    """A worker's part of a stream, batched in the worker so that each batch can carry the state after it."""

    def __init__(
        self,
        dataset: Any,
        initial: Any,
        layout: Layout,
        collate_fn: Callable[[list[Any]], Any],
        position: StreamPosition,
    ) -> None:
        self._dataset, self._initial, self._layout = dataset, initial, layout
        self._collate_fn, self._position = collate_fn, position

    def __iter__(self) -> Iterator[Delivery]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        # torch asks worker 0 first. Those whose turn in the interrupted round is over let it pass once.
        if worker <= self._position.last_worker < workers - 1:
            yield Delivery(_TURN_PASSES, None, None)
        saved = self._position.workers.get(str(worker), {})
        count = saved.get("count", 0)
        if self._initial is not None:
            self._dataset.load_state_dict(copy.deepcopy(saved.get("dataset", self._initial)))
        samples = iter(self._dataset)
        while True:
            batch = []
            for sample in _take(samples, self._layout.micro_batch_size, self._sample_seeds(count, worker, workers)):
                batch.append(sample)
            if not batch:
                return
            count += len(batch)
            state = None
            if self._initial is not None:
                state = {"count": count, "dataset": copy.deepcopy(self._dataset.state_dict())}
            yield Delivery(worker, self._collate_fn(batch), state)

    def _sample_seeds(self, count: int, worker: int, workers: int) -> Iterator[tuple[int, int]]:
        """(epoch, number) of this worker's samples from its `count`-th on; no two workers or ranks share a number."""
        rank, width = self._layout.data_parallel_rank, self._layout.data_parallel_size
        while True:
            yield self._position.epoch, (count * workers + worker) * width + rank
            count += 1


def _take(samples: Iterator[Any], number: int, seeds: Iterator[tuple[int, int]]) -> Iterator[Any]:
    ended = object()
    for _ in range(number):
        with seeded(0, *next(seeds)):
            sample = next(samples, ended)
        if sample is ended:
            return
        yield sample


def _as_it_is(delivery: Any) -> Any:
    # torch's default would turn arrays into tensors, in the user's batch and in the states alike.
    return delivery
