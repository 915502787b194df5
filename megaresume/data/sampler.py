"""DataParallelBatchSampler: which sample ids this data-parallel rank trains next, in micro-batches.

The global order is fixed first, consumed samples are skipped in it, the rest is cut into global batches, each of those
into micro-batches over all ranks, each of those into rank slices. It reads no sample, holds no random state and does
not know whether anything was trained: the training step says so by `advance()`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaresume.data.checks import MAX_DATASET_SIZE, as_count, as_integer
from megaresume.data.layout import check_divides, data_parallel_place
from megaresume.data.order import make_order
from megaresume.data.position import EPOCH_TAILS, EpochTail, Position, Stream
from megaresume.data.schedule import BatchSizeSchedule, as_schedule
from megaresume.data.settings import (
    STATE_VERSION,
    Anchor,
    Settings,
    anchors_to_json,
    check_changes,
    order_at,
    parse_state,
    position_to_json,
    settings_to_json,
)
from megaresume.errors import ConfigurationError, TrainerStateError

logger = logging.getLogger("megaresume.data")

# Ids are worked out for several global batches in one vectorised call: one batch at first, so that a resume need not
# wait for ids it wants later, then twice as many each time, up to about this many ids of a rank.
_IDS_PER_CHUNK = 8192


class MicroBatch(NamedTuple):
    """One micro-batch of one rank: sample ids, the epoch each belongs to, the position its global batch begins at."""

    ids: list[int]
    epochs: list[int]
    start: Position


class DataParallelBatchSampler:
    """Yields lists of sample ids, one micro-batch of this rank at a time; for `DataLoader(batch_sampler=...)`.

    The ids of global batch k, and their order, are the same for every data-parallel width and micro-batch size that
    divide it. One `iter()` serves the rest of the current epoch (`epoch_tail` "drop", "short") or all epochs as one
    stream ("carry"). An iterator follows its own cursor from `consumed_samples` on, so a loader may fetch ahead; only
    `advance()` counts. Nothing here is collective.

    Args:
        dataset_size: samples in the dataset, 1 to 2**48.
        micro_batch_size: samples per rank and micro-batch.
        global_batch_size: samples per training step over all ranks, or a `BatchSizeSchedule`.
        data_parallel_rank, data_parallel_size: give both, or neither to take those of the running parallel layout.
        seed: names the order of every epoch, together with `shuffle`.
        shuffle: True or "feistel" (keyed, O(1) memory); False or "sequential"; "megatron" and "megatron-sharded" are
            Megatron's cyclic sampler without and with data sharding, id for id (O(n) memory, seeded by the epoch).
        epoch_tail: "carry" (a batch may span two epochs), "drop" (an incomplete global batch at an epoch's end is
            dropped), "short" (it is padded by repeats, which `masks` flags).
        consumed_samples: true samples already trained; a count off the batch boundary goes on from exactly there.
        epochs: how many epochs there are in all; None for no end.
        fingerprint: what `dataset_fingerprint` says of the dataset, so that a resume on another one is refused.

    Raises TypeError or ConfigurationError (a ValueError) for arguments that cannot be served, naming ones that can.
    """

    def __init__(
        self,
        dataset_size: int,
        *,
        micro_batch_size: int,
        global_batch_size: int | BatchSizeSchedule,
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        seed: int = 0,
        shuffle: bool | str = True,
        epoch_tail: EpochTail = "carry",
        consumed_samples: int = 0,
        epochs: int | None = None,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> None:
        size = as_count("dataset_size", dataset_size)
        if size > MAX_DATASET_SIZE:
            raise ConfigurationError(f"dataset_size must be at most 2**48 = {MAX_DATASET_SIZE}, got {size}")
        self.micro_batch_size = as_count("micro_batch_size", micro_batch_size)
        self.data_parallel_rank, self.data_parallel_size = data_parallel_place(data_parallel_rank, data_parallel_size)
        self.epochs = None if epochs is None else as_count("epochs", epochs)
        schedule = as_schedule(global_batch_size)
        for stage_size in schedule.sizes:
            check_divides(stage_size, self.micro_batch_size, self.data_parallel_size)
        order = make_order(
            shuffle,
            seed=as_integer("seed", seed),
            dataset_size=size,
            micro_batch_size=self.micro_batch_size,
            data_parallel_size=self.data_parallel_size,
        )
        if epoch_tail not in EPOCH_TAILS:
            raise ConfigurationError(f"epoch_tail must be one of {', '.join(EPOCH_TAILS)}, got {epoch_tail!r}")
        if epoch_tail == "drop" and schedule.sizes[-1] > order.epoch_length:
            raise ConfigurationError(
                f'epoch_tail="drop" would drop every sample: global_batch_size {schedule.sizes[-1]} is larger than an '
                f"epoch of {order.epoch_length} samples (dataset_size {size}, data_parallel_size "
                f'{self.data_parallel_size}); use a smaller global batch, or epoch_tail="carry" or "short"'
            )
        self._settings = Settings(order, schedule, epoch_tail, None if fingerprint is None else dict(fingerprint))
        self._anchors: tuple[Anchor, ...] = (Anchor(Position(0, 0, 0), self._settings),)
        consumed = as_count("consumed_samples", consumed_samples, minimum=0)
        self._anchors, self._stream, self._position = self._placed(consumed)
        self._served: tuple[Position, Position] | None = None
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()

    # -- where training stands

    @property
    def dataset_size(self) -> int:
        """Samples in the dataset."""
        return self._settings.order.dataset_size

    @property
    def seed(self) -> int:
        """The data seed."""
        return self._settings.order.seed

    @property
    def consumed_samples(self) -> int:
        """True samples trained since the start of the run; moved by `advance()` alone."""
        return self._position.consumed

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0; `epochs` once all are trained."""
        return self._position.epoch

    @property
    def finished(self) -> bool:
        """Whether all `epochs` are trained."""
        return self._stream.finished(self._position)

    @property
    def global_batch_size(self) -> int:
        """Nominal size in samples of the next global batch (a "short" one holds fewer true samples)."""
        return self._settings.schedule.at(self.consumed_samples)[0]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per rank in the next global batch; 0 when finished."""
        return 0 if self.finished else self._microbatches(self._stream.batch_size(self._position))

    @property
    def masks(self) -> list[list[bool]]:
        """Per micro-batch of this rank in the next global batch: which samples count (False: a repeat that pads)."""
        if self.finished:
            return []
        masks: list[list[bool]] = self._rank_offsets(self._stream.batch_size(self._position))[1].tolist()
        return masks

    def advance(self) -> int:
        """Count the global batch that was just trained; returns its true size. Call it once per training step.

        Raises ConfigurationError when all epochs are trained already.
        """
        if self.finished:
            raise ConfigurationError(
                f"advance() past the end: all {self.epochs} epochs are trained ({self.consumed_samples} samples)"
            )
        size = self._stream.batch_size(self._position)
        self._position = self._stream.after(self._position, size)
        return size

    def seek(self, consumed_samples: int) -> None:
        """Go to `consumed_samples` true samples since the start of the run. Idempotent.

        Raises ConfigurationError for a place beyond the end, before the last change of settings, or (unless training
        stands there already) while an iterator is live. Nothing has changed then.
        """
        consumed = as_count("consumed_samples", consumed_samples, minimum=0)
        if consumed != self.consumed_samples:
            placed = self._placed(consumed)
            self._refuse_live(f"move to consumed_samples {consumed}")
            self._anchors, self._stream, self._position = placed
        self._served = None

    # -- iteration

    def __iter__(self) -> Iterator[list[int]]:
        """Micro-batches from `consumed_samples` on: those of the rest of this epoch, or of the stream.

        After an iterator that was exhausted without any `advance()`, the next one serves the next epoch. Through a
        torch DataLoader that fetches ahead, exhausted means fetched; `ResumableDataLoader` waits until all was handed
        out.
        """
        return _Ids(self)

    def __len__(self) -> int:
        """Micro-batches the next `iter()` will yield. TypeError for the endless stream ("carry" without `epochs`)."""
        return sum(self._microbatches(size) * number for size, number in self._stream.runs(self._start()))

    def _start(self) -> Position:
        # An iterator that was exhausted while nobody called advance() stands for its samples: else a loop that has no
        # manager would be served one epoch for ever.
        if self._served is not None and self._served[0] == self._position:
            return self._served[1]
        return self._position

    def _note_served(self, begun_at: Position, last: Position) -> None:
        """An iterator made when training stood at `begun_at` was exhausted; its last global batch began at `last`."""
        self._served = (begun_at, self._stream.after(last, self._stream.batch_size(last)))

    def _micro_batches(self, start: Position) -> Iterator[MicroBatch]:
        return self._generate(start, self._stream, self._anchors)  # bound now: the body runs at the first next()

    def _generate(self, start: Position, stream: Stream, anchors: tuple[Anchor, ...]) -> Iterator[MicroBatch]:
        def ended(at: Position) -> bool:
            return stream.finished(at) or (stream.tail != "carry" and at.epoch != start.epoch)

        position, number = start, 1
        while not ended(position):
            first, size = position, stream.batch_size(position)
            starts: list[Position] = []
            while len(starts) < number and not ended(position) and stream.batch_size(position) == size:
                starts.append(position)
                position = stream.after(position, size)
            within, _ = self._rank_offsets(size)
            begins = np.array([first.offset + at.consumed - first.consumed for at in starts], dtype=np.int64)
            epochs, offsets = stream.locate(first.epoch, begins.reshape(-1, 1, 1) + within)
            ids = np.empty_like(offsets)
            for epoch in np.unique(epochs).tolist():
                chosen = epochs == epoch
                ids[chosen] = order_at(anchors, epoch).ids(epoch, offsets[chosen])
            for at, batch_ids, batch_epochs in zip(starts, ids.tolist(), epochs.tolist(), strict=True):
                for micro_ids, micro_epochs in zip(batch_ids, batch_epochs, strict=True):
                    yield MicroBatch(micro_ids, micro_epochs, at)
            number = max(1, min(2 * number, _IDS_PER_CHUNK // within.size))

    def _rank_offsets(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(offsets, masks), each [micro-batches, micro_batch_size], of this rank in a batch of `size` true samples."""
        micro, width = self.micro_batch_size, self.data_parallel_size
        padded = np.arange(self._microbatches(size) * micro * width, dtype=np.int64)
        if self._settings.order.shuffle == "megatron":  # there Megatron deals ids out one by one, elsewhere in slices
            mine = padded.reshape(-1, micro, width)[:, :, self.data_parallel_rank]
        else:
            mine = padded.reshape(-1, width, micro)[:, self.data_parallel_rank, :]
        return mine % size, mine < size

    def _microbatches(self, size: int) -> int:
        return -(-size // (self.micro_batch_size * self.data_parallel_size))

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """JSON values that tell where training stands in the data, the same on every rank. Pure."""
        if self._start() != self._position:
            logger.warning(
                "an iterator was exhausted but advance() was never called: the state says %d consumed samples",
                self.consumed_samples,
            )
        return {
            "version": STATE_VERSION,
            **position_to_json(self._position),
            "anchors": anchors_to_json(self._anchors),
            # For the reader: a resume goes by the anchors, and may change the last two freely.
            "settings": settings_to_json(self._settings),
            "micro_batch_size": self.micro_batch_size,
            "data_parallel_size": self.data_parallel_size,
        }

    def check_state(self, state: Mapping[str, Any], allow_data_change: Set[str] = frozenset()) -> tuple[str, ...]:
        """The changes of settings `load_state_dict` would make, a sentence each; raises what it would raise. Pure."""
        return self._planned(state, allow_data_change)[2]

    def load_state_dict(self, state: Mapping[str, Any], *, allow_data_change: Set[str] = frozenset()) -> None:
        """Go on where `state` was taken; all or nothing.

        `allow_data_change` names settings that may differ from the checkpoint's (`global_batch_size`, `seed`,
        `shuffle`, `epoch_tail`, `dataset_size`, `fingerprint`): training goes on from the next unseen sample, and a new
        anchor records the change. An epoch under way is finished in its own order; a changed order waits for the next.

        Raises DataMismatchError naming field and both values, TrainerStateError or FormatError for a state that is not
        one, ConfigurationError while an iterator is live that began elsewhere.
        """
        anchors, position, changes = self._planned(state, allow_data_change)
        for change in changes:
            logger.warning("data: %s, from consumed sample %d on", change, position.consumed)
        self._settings, self._anchors, self._position = anchors[-1].settings, anchors, position
        self._stream, self._served = self._stream_of(anchors), None

    def _planned(
        self, state: Mapping[str, Any], allowed: Set[str]
    ) -> tuple[tuple[Anchor, ...], Position, tuple[str, ...]]:
        anchors, stored = parse_state(state)
        stream = self._stream_of(anchors)
        position, _ = stream.seek(stored.consumed)
        if position != stream.settle(stored):
            raise TrainerStateError(
                f"sampler state: {stored.consumed} consumed samples are offset {position.offset} of epoch "
                f"{position.epoch}, but fields 'epoch' and 'offset' say {stored.epoch} and {stored.offset}"
            )
        saved = anchors[-1].settings
        changes = check_changes(saved, self._settings, allowed, offset=position.offset)
        # A fingerprint that only the checkpoint has is kept, for later resumes to be checked against.
        current = replace(self._settings, fingerprint=self._settings.fingerprint or saved.fingerprint)
        if changes:
            anchors = (*anchors, Anchor(_takeover(anchors, position, current), current))
        else:
            anchors = (*anchors[:-1], replace(anchors[-1], settings=current))
        position, _ = self._stream_of(anchors).seek(stored.consumed)
        if (anchors, position) != (self._anchors, self._position):
            self._refuse_live(f"load a state of consumed_samples {stored.consumed}")
        return anchors, position, changes

    def _stream_of(self, anchors: tuple[Anchor, ...]) -> Stream:
        anchor = anchors[-1]
        return Stream(
            anchor=anchor.position,
            schedule=anchor.settings.schedule,
            tail=anchor.settings.epoch_tail,
            anchor_epoch_length=order_at(anchors, anchor.position.epoch).epoch_length,
            epoch_length=anchor.settings.order.epoch_length,
            epochs=self.epochs,
        )

    def _placed(self, consumed: int) -> tuple[tuple[Anchor, ...], Stream, Position]:
        stream = self._stream_of(self._anchors)
        position, on_boundary = stream.seek(consumed)
        if on_boundary:
            return self._anchors, stream, position
        # Batches are counted from here now, and so are the tails that are dropped.
        anchors = (*self._anchors, Anchor(position, self._settings))
        return anchors, self._stream_of(anchors), position

    def _refuse_live(self, action: str) -> None:
        if len(self._live):
            raise ConfigurationError(
                f"cannot {action}: an iterator of this sampler is live and began elsewhere (its workers may have "
                "fetched already). Restore first and call iter() afterwards, or delete the iterator"
            )


class _Ids:
    """An iterator over ids alone. A class, not a generator, so that the sampler knows when it is exhausted or gone."""

    def __init__(self, sampler: DataParallelBatchSampler) -> None:
        self._sampler, self._begun_at = sampler, sampler._position
        self._batches = sampler._micro_batches(sampler._start())
        self._last: Position | None = None
        sampler._live.add(self)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        for batch in self._batches:
            self._last = batch.start
            return batch.ids
        if self in self._sampler._live and self._last is not None:
            self._sampler._note_served(self._begun_at, self._last)
        self._sampler._live.discard(self)
        raise StopIteration


def _takeover(anchors: tuple[Anchor, ...], position: Position, current: Settings) -> Position:
    """Where changed settings take over: here, or in a new epoch where this one's ids are no longer all there."""
    order = order_at(anchors, position.epoch)
    if position.offset == 0 or current.order.dataset_size >= order.dataset_size:
        return position
    logger.warning(
        "data: the dataset shrank from %d to %d samples: epoch %d ends here, %d of its samples are not seen in it",
        order.dataset_size,
        current.order.dataset_size,
        position.epoch,
        order.epoch_length - position.offset,
    )
    return Position(position.consumed, position.epoch + 1, 0)
