"""DataParallelBatchSampler: which sample ids this data-parallel rank trains next, in micro-batches.

The global order is fixed first, consumed samples are skipped in it, the rest is cut into global batches, each of those into
micro-batches over all ranks, each of those into rank slices. It reads no sample, holds no random state and does not know
whether anything was trained: the training step says so by `advance()`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaresume.data.checks import MAX_DATASET_SIZE, as_count, divisors
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
    settings_to_json,
)
from megaresume.errors import ConfigurationError, DataMismatchError, TrainerStateError

logger = logging.getLogger("megaresume.data")

# Ids are worked out for several global batches in one vectorised call. One batch at first, so that a resume is not made to
# wait for ids it needs later; then twice as many each time, up to about this many ids of a rank.
_IDS_PER_CHUNK = 8192


class MicroBatch(NamedTuple):
    """One micro-batch of one rank: sample ids, the epoch each belongs to, and where the iterator stands after it."""

    ids: list[int]
    epochs: list[int]
    start: Position  # of the global batch it belongs to


class DataParallelBatchSampler:
    """Yields lists of sample ids, one micro-batch of this rank at a time; for `DataLoader(batch_sampler=...)`.

    The ids of global batch k, and their order, are the same for every data-parallel width and micro-batch size that divide
    it. One `iter()` serves the rest of the current epoch (`epoch_tail` "drop", "short") or all epochs as one stream ("carry").
    An iterator follows its own cursor from `consumed_samples` on, so a loader may fetch ahead; only `advance()` counts.

    Args:
        dataset_size: samples in the dataset, 1 to 2**48.
        micro_batch_size: samples per rank and micro-batch.
        global_batch_size: samples per training step over all ranks, or a `BatchSizeSchedule`.
        data_parallel_rank, data_parallel_size: of this rank; both or neither. Default: from the running parallel layout.
        seed: names the order of all epochs together with `shuffle`.
        shuffle: True or "feistel" (keyed, O(1) memory), False or "sequential", "megatron" and "megatron-sharded" (Megatron's
            cyclic sampler without and with data sharding, id for id; O(n) memory).
        epoch_tail: "carry" (a batch may span two epochs), "drop" (an incomplete global batch at an epoch's end is dropped),
            "short" (it is padded by repeats, flagged in `masks`).
        consumed_samples: true samples already trained; a count off the batch boundary goes on from exactly there.
        epochs: number of epochs in all, None for no end.
        fingerprint: what `dataset_fingerprint` says of the dataset, to refuse a resume on another one.

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
        self.data_parallel_rank, self.data_parallel_size = _coordinate(data_parallel_rank, data_parallel_size)
        schedule = as_schedule(global_batch_size)
        _check_divides(schedule, self.micro_batch_size, self.data_parallel_size)
        if epoch_tail not in EPOCH_TAILS:
            raise ConfigurationError(f"epoch_tail must be one of {', '.join(EPOCH_TAILS)}, got {epoch_tail!r}")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seed must be an integer, got {seed!r} of type {type(seed).__name__}")
        order = make_order(
            shuffle,
            seed=int(seed),
            dataset_size=size,
            micro_batch_size=self.micro_batch_size,
            data_parallel_size=self.data_parallel_size,
        )
        if epoch_tail == "drop" and schedule.sizes[-1] > order.epoch_length:
            raise ConfigurationError(
                f'epoch_tail="drop" would drop every sample: an epoch of {order.epoch_length} samples (dataset_size {size}) is '
                f"smaller than global_batch_size {schedule.sizes[-1]} (micro_batch_size {self.micro_batch_size} x "
                f"data_parallel_size {self.data_parallel_size} = {self.micro_batch_size * self.data_parallel_size}); use a "
                'global batch of at most that size, or epoch_tail="carry" or "short"'
            )
        self.epochs = None if epochs is None else as_count("epochs", epochs)
        self._settings = Settings(order, schedule, epoch_tail, None if fingerprint is None else dict(fingerprint))
        self._anchors: tuple[Anchor, ...] = (Anchor(Position(0, 0, 0), self._settings),)
        self._live: weakref.WeakSet[Any] = weakref.WeakSet()
        self._served: tuple[Position, Position] | None = None
        self._place(as_count("consumed_samples", consumed_samples, minimum=0))

    # -- where we are

    @property
    def consumed_samples(self) -> int:
        """True samples trained since the start of the run; moved by `advance()` alone."""
        return self._position.consumed

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0; `epochs` once all are done."""
        return self._position.epoch

    @property
    def finished(self) -> bool:
        """Whether all `epochs` are trained."""
        return self._stream.finished(self._position)

    @property
    def global_batch_size(self) -> int:
        """Nominal samples of the next global batch (a "short" one holds fewer true samples)."""
        return self._settings.schedule.at(self.consumed_samples)[0]

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per rank of the next global batch; 0 when finished."""
        if self.finished:
            return 0
        return self._microbatches(self._stream.batch_size(self._position))

    @property
    def masks(self) -> list[list[bool]]:
        """For each micro-batch of this rank in the next global batch: which samples count (False: a repeat that pads)."""
        if self.finished:
            return []
        offsets, true = self._rank_offsets(self._stream.batch_size(self._position))
        del offsets
        masks: list[list[bool]] = true.tolist()
        return masks

    def advance(self) -> int:
        """Count the global batch that was just trained; returns its true size. Called once per training step.

        Raises ConfigurationError when all epochs are already trained.
        """
        if self.finished:
            raise ConfigurationError(
                f"advance() past the end: all {self.epochs} epochs ({self.consumed_samples} samples) are trained already"
            )
        size = self._stream.batch_size(self._position)
        self._position = self._stream.after(self._position, size)
        return size

    def seek(self, consumed_samples: int) -> None:
        """Go to `consumed_samples` true samples since the start of the run. Idempotent.

        Raises ConfigurationError for a place beyond the end or before the last change of settings, or (unless it is where
        the sampler stands) while an iterator is live. Nothing has changed then.
        """
        consumed = as_count("consumed_samples", consumed_samples, minimum=0)
        if consumed == self.consumed_samples:
            self._served = None
            return
        self._refuse_live(f"move to consumed_samples {consumed}")
        self._place(consumed)

    # -- iteration

    def __iter__(self) -> Iterator[list[int]]:
        """Micro-batches from `consumed_samples` on: those of the rest of this epoch, or of the stream.

        After an iterator that was exhausted without any `advance()` the next one serves the next epoch. Through a torch
        DataLoader that fetches ahead, exhausted means fetched; `ResumableDataLoader` waits until all was handed out.
        """
        return _Ids(self)

    def __len__(self) -> int:
        """Micro-batches the next `iter()` will yield. TypeError for the endless stream ("carry" without `epochs`)."""
        return sum(self._microbatches(size) * number for size, number in self._stream.runs(self._start()))

    def _start(self) -> Position:
        # An iterator that was exhausted while nobody called advance() stands for its samples: without this, a loop that has
        # no manager would serve one epoch for ever.
        if self._served is not None and self._served[0] == self._position:
            return self._served[1]
        return self._position

    def _micro_batches(self, start: Position) -> Iterator[MicroBatch]:
        """The micro-batches of one iterator that begins at `start`; settings are those of now. Pure but for its cursor."""
        stream, anchors = self._stream, self._anchors
        position, number = start, 1
        while not stream.finished(position) and (stream.tail == "carry" or position.epoch == start.epoch):
            starts: list[Position] = []
            size = stream.batch_size(position)
            while (
                len(starts) < number
                and not stream.finished(position)
                and (stream.tail == "carry" or position.epoch == start.epoch)
                and stream.batch_size(position) == size
            ):
                starts.append(position)
                position = stream.after(position, size)
            within, _ = self._rank_offsets(size)
            first = starts[0]
            begins = np.array([first.offset + at.consumed - first.consumed for at in starts], dtype=np.int64)
            epochs, offsets = stream.locate(first.epoch, begins.reshape(-1, 1, 1) + within)
            ids = np.empty_like(offsets)
            for epoch in np.unique(epochs).tolist():
                chosen = epochs == epoch
                order = order_at(anchors, epoch)
                ids[chosen] = order.ids(epoch, offsets[chosen], micro_batch_size=self.micro_batch_size)
            for at, rows, row_epochs in zip(starts, ids.tolist(), epochs.tolist(), strict=True):
                for micro_ids, micro_epochs in zip(rows, row_epochs, strict=True):
                    yield MicroBatch(micro_ids, micro_epochs, at)
            number = max(1, min(2 * number, _IDS_PER_CHUNK // within.size))

    def _rank_offsets(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(offsets, masks), each [micro-batches, micro_batch_size], of this rank in a global batch of `size` true samples."""
        micro, width = self.micro_batch_size, self.data_parallel_size
        padded = np.arange(self._microbatches(size) * micro * width, dtype=np.int64)
        if self._settings.order.shuffle == "megatron":  # Megatron deals ids out one by one here, in blocks everywhere else
            mine = padded.reshape(-1, micro, width)[:, :, self.data_parallel_rank]
        else:
            mine = padded.reshape(-1, width, micro)[:, self.data_parallel_rank, :]
        return mine % size, mine < size

    def _microbatches(self, size: int) -> int:
        return -(-size // (self.micro_batch_size * self.data_parallel_size))

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """JSON values that tell where the sampler stands, the same on every rank. Pure."""
        if self._start() != self._position:
            logger.warning(
                "an iterator was exhausted but advance() was never called: the state says %d consumed samples",
                self.consumed_samples,
            )
        return {
            "version": STATE_VERSION,
            "consumed_samples": self._position.consumed,
            "epoch": self._position.epoch,
            "offset": self._position.offset,
            "anchors": anchors_to_json(self._anchors),
            "settings": settings_to_json(self._settings),
            "micro_batch_size": self.micro_batch_size,
            "data_parallel_size": self.data_parallel_size,
        }

    def check_state(self, state: Mapping[str, Any], allow_data_change: Set[str] = frozenset()) -> tuple[str, ...]:
        """The changes that `load_state_dict` would make of settings, one sentence each; raises what it would raise. Pure."""
        return self._planned(state, allow_data_change)[2]

    def load_state_dict(self, state: Mapping[str, Any], *, allow_data_change: Set[str] = frozenset()) -> None:
        """Go on where `state` was taken; all or nothing.

        `allow_data_change` names settings that may differ from the checkpoint's (`global_batch_size`, `seed`, `shuffle`,
        `epoch_tail`, `dataset_size`, `fingerprint`): training goes on from the next unseen sample and a new anchor records
        the change. A changed order begins with the next epoch; an epoch under way is finished in its own order.

        Raises DataMismatchError naming field and both values, TrainerStateError or FormatError for a state that is not one,
        ConfigurationError while an iterator is live.
        """
        anchors, position, changes = self._planned(state, allow_data_change)
        for change in changes:
            logger.warning("data: %s, from consumed sample %d on", change, position.consumed)
        self._anchors, self._settings, self._position = anchors, anchors[-1].settings, position
        self._stream = self._stream_of(anchors)
        self._served = None

    def _planned(
        self, state: Mapping[str, Any], allowed: Set[str]
    ) -> tuple[tuple[Anchor, ...], Position, tuple[str, ...]]:
        anchors, stored = parse_state(state)
        saved = anchors[-1].settings
        changes = check_changes(saved, self._settings, allowed)
        # A fingerprint that only the checkpoint has is kept: a later resume can then still be checked against it.
        current = replace(self._settings, fingerprint=self._settings.fingerprint or saved.fingerprint)
        for anchor in anchors:
            if anchor.position.offset > order_at(anchors, anchor.position.epoch).epoch_length:
                raise TrainerStateError(f"sampler state: an anchor's field 'offset' {anchor.position.offset} is past its epoch")
        if changes:
            position = self._after_change(anchors, stored, current)
            anchors = (*anchors, Anchor(position, current))
        else:
            anchors = (*anchors[:-1], replace(anchors[-1], settings=current))
        stream = self._stream_of(anchors)
        position = stream.seek(stored.consumed)[0]
        if not changes and position != stream.settle(stored):
            raise TrainerStateError(
                f"sampler state: {stored.consumed} consumed samples are offset {position.offset} of epoch {position.epoch}, "
                f"but fields 'epoch' and 'offset' say {stored.epoch} and {stored.offset}"
            )
        if (anchors, position) != (self._anchors, self._position):
            self._refuse_live(f"load a state of consumed_samples {stored.consumed}")
        return anchors, position, changes

    def _after_change(self, anchors: tuple[Anchor, ...], stored: Position, current: Settings) -> Position:
        """Where the changed settings take over."""
        length = order_at(anchors, stored.epoch).epoch_length
        if stored.offset > length:
            raise TrainerStateError(f"sampler state: field 'offset' {stored.offset} is past the epoch's {length} samples")
        if stored.offset and current.order.dataset_size < order_at(anchors, stored.epoch).dataset_size:
            logger.warning(
                "data: the dataset shrank, so epoch %d ends here: %d of its samples are not seen in it",
                stored.epoch,
                length - stored.offset,
            )
            return Position(stored.consumed, stored.epoch + 1, 0)
        return stored

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

    def _place(self, consumed: int) -> None:
        stream = self._stream_of(self._anchors)
        position, on_boundary = stream.seek(consumed)
        if not on_boundary:  # batches are counted from here now, and so are the tails that are dropped
            self._anchors = (*self._anchors, Anchor(position, self._settings))
            stream = self._stream_of(self._anchors)
        self._stream, self._position, self._served = stream, position, None

    def _refuse_live(self, action: str) -> None:
        if len(self._live):
            raise ConfigurationError(
                f"cannot {action}: an iterator of this sampler is live and has begun at another place; restore first and "
                "call iter() afterwards, or delete the iterator"
            )


class _Ids:
    """An iterator of the sampler: ids alone. A class, not a generator, so that the sampler can hold it weakly."""

    def __init__(self, sampler: DataParallelBatchSampler) -> None:
        self._sampler = sampler
        self._begun_at, self._start = sampler._position, sampler._start()
        self._batches = sampler._micro_batches(self._start)
        self._last: Position | None = None
        sampler._live.add(self)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        for batch in self._batches:
            self._last = batch.start
            return batch.ids
        sampler = self._sampler
        if self in sampler._live:
            sampler._live.discard(self)
            if self._last is not None:
                stream = sampler._stream
                sampler._served = (self._begun_at, stream.after(self._last, stream.batch_size(self._last)))
        raise StopIteration


def _coordinate(rank: int | None, size: int | None) -> tuple[int, int]:
    if (rank is None) != (size is None):
        raise ConfigurationError(
            f"give data_parallel_rank and data_parallel_size both or neither, got rank {rank!r} and size {size!r}"
        )
    if rank is None or size is None:
        from megaresume.megatron.parallel import data_parallel_coordinate  # the one arrow up, see the architecture test

        rank, size = data_parallel_coordinate()
    width = as_count("data_parallel_size", size)
    place = as_count("data_parallel_rank", rank, minimum=0)
    if place >= width:
        raise ConfigurationError(f"data_parallel_rank must be from 0 to {width - 1} with data_parallel_size {width}, got {place}")
    return place, width


def _check_divides(schedule: BatchSizeSchedule, micro: int, width: int) -> None:
    block = micro * width
    for size in schedule.sizes:
        if size % block == 0:
            continue
        below, above = size - size % block, size - size % block + block
        nearest = f"{below} or {above}" if below else f"{above}"
        widths = divisors(size // micro) if size % micro == 0 else []
        micros = divisors(size // width) if size % width == 0 else []
        raise ConfigurationError(
            f"global_batch_size {size} is not a multiple of micro_batch_size {micro} x data_parallel_size {width} = {block}. "
            f"What would do: global_batch_size {nearest}; "
            f"with micro_batch_size {micro}, data_parallel_size in {widths or 'none'}; "
            f"with data_parallel_size {width}, micro_batch_size in {micros or 'none'}"
        )
