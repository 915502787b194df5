"""Positions in the stream of samples, in closed form: anchor + consumed samples -> epoch and offset.

Pure arithmetic on integers, O(number of batch-size stages) whatever was consumed. Knows no ids and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megaresume.data.schedule import BatchSizeSchedule
from megaresume.errors import ConfigurationError

EpochTail = Literal["carry", "drop", "short"]
EPOCH_TAILS: tuple[EpochTail, ...] = ("carry", "drop", "short")


@dataclass(frozen=True)
class Position:
    """`consumed` samples were trained in all; the next one stands at `offset` of `epoch`."""

    consumed: int
    epoch: int
    offset: int


@dataclass(frozen=True)
class Stream:
    """The samples from `anchor` on: epochs of `epoch_length` samples, cut into global batches.

    `anchor_epoch_length` is the length of the anchor's own epoch: still the former one after a changed setting.
    `epochs` bounds the stream, epoch `epochs - 1` is the last. With "drop" no batch may be larger than an epoch.

    A position is *settled* when its next global batch begins there: not at an epoch's end, not on a dropped tail.
    """

    anchor: Position
    schedule: BatchSizeSchedule
    tail: EpochTail
    anchor_epoch_length: int
    epoch_length: int
    epochs: int | None = None

    def length_of(self, epoch: int) -> int:
        """Samples in `epoch`, dropped ones included."""
        return self.anchor_epoch_length if epoch == self.anchor.epoch else self.epoch_length

    def finished(self, position: Position) -> bool:
        """Whether nothing is left to serve at a settled `position`."""
        return self.epochs is not None and position.epoch >= self.epochs

    def settle(self, position: Position) -> Position:
        """`position` moved on to where its next global batch begins."""
        while not self.finished(position):
            needed = self.schedule.at(position.consumed)[0] if self.tail == "drop" else 1
            if self.length_of(position.epoch) - position.offset >= needed:
                break
            position = Position(position.consumed, position.epoch + 1, 0)
        return position

    def batch_size(self, position: Position) -> int:
        """True samples of the global batch that begins at a settled, not finished `position`."""
        size, _ = self.schedule.at(position.consumed)
        left = self.left(position)
        return size if left is None else min(size, left)

    def left(self, position: Position) -> int | None:
        """Samples one iterator has left: of the epoch, or of the whole stream for "carry" (None: endless)."""
        if self.tail != "carry":
            return self.length_of(position.epoch) - position.offset
        if self.epochs is None:
            return None
        later = max(0, self.epochs - position.epoch - 1) * self.epoch_length
        return self.length_of(position.epoch) - position.offset + later

    def after(self, position: Position, size: int) -> Position:
        """The settled position after a global batch of `size` true samples that begins at `position`."""
        epoch, offset = self._roll(position.epoch, position.offset + size)
        return self.settle(Position(position.consumed + size, epoch, offset))

    def seek(self, consumed: int) -> tuple[Position, bool]:
        """(settled position at `consumed` samples, whether a global batch begins there when counted from the anchor).

        Raises ConfigurationError for a count before the anchor or beyond the stream's end.
        """
        if consumed < self.anchor.consumed:
            raise ConfigurationError(
                f"consumed_samples {consumed} lies before {self.anchor.consumed}, where the present data settings took "
                "over; load the state of a checkpoint from before that point instead"
            )
        if self.tail == "drop":
            return self._seek_dropping(consumed)
        epoch, offset = self._roll(self.anchor.epoch, self.anchor.offset + consumed - self.anchor.consumed)
        position = self.settle(Position(consumed, epoch, offset))
        if self._past_end(position):
            raise self._beyond(consumed)
        return position, True  # no sample is left out: where batches begin does not change what follows

    def runs(self, position: Position) -> Iterator[tuple[int, int]]:
        """(true size, number) of equal global batches, in the order one iterator from `position` on yields them.

        Raises TypeError for an endless stream.
        """
        if self.finished(position):
            return
        left = self.left(position)
        if left is None:
            raise TypeError('an endless stream has no len(): epoch_tail="carry" without epochs=')
        consumed = position.consumed
        while left:
            size, end = self.schedule.at(consumed)
            number = left // size
            if end is not None:
                number = min(number, -(-(end - consumed) // size))
            if number == 0:
                if self.tail != "drop":
                    yield left, 1
                return
            yield size, number
            consumed += size * number
            left -= size * number

    def locate(self, epoch: int, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs, offsets within them) of samples given by `offsets` from the start of `epoch`, past its end too."""
        beyond = offsets - self.length_of(epoch)
        over = beyond >= 0
        epochs = np.where(over, epoch + 1 + beyond // self.epoch_length, epoch)
        return epochs, np.where(over, beyond % self.epoch_length, offsets)

    def _roll(self, epoch: int, offset: int) -> tuple[int, int]:
        beyond = offset - self.length_of(epoch)
        if beyond < 0:
            return epoch, offset
        return epoch + 1 + beyond // self.epoch_length, beyond % self.epoch_length

    def _seek_dropping(self, consumed: int) -> tuple[Position, bool]:
        position = self.settle(self.anchor)
        while position.consumed < consumed and not self.finished(position):
            wanted = consumed - position.consumed
            size, end = self.schedule.at(position.consumed)
            batches = wanted // size
            if end is not None:
                batches = min(batches, -(-(end - position.consumed) // size))
            if batches == 0:
                inside = Position(consumed, position.epoch, position.offset + wanted)
                return self.settle(inside), False
            position = self.settle(self._skip_batches(position, size, batches))
        if position.consumed < consumed or self._past_end(position):
            raise self._beyond(consumed)
        return position, True

    def _skip_batches(self, position: Position, size: int, batches: int) -> Position:
        # Not settled on purpose: whether a tail is dropped depends on the size of the batch that comes next, which may
        # be of another stage.
        consumed = position.consumed + size * batches
        here = (self.length_of(position.epoch) - position.offset) // size
        if batches <= here:
            return Position(consumed, position.epoch, position.offset + size * batches)
        epochs, last = divmod(batches - here - 1, self.epoch_length // size)
        return Position(consumed, position.epoch + 1 + epochs, (last + 1) * size)

    def _past_end(self, position: Position) -> bool:
        return self.epochs is not None and (position.epoch, position.offset) > (self.epochs, 0)

    def _beyond(self, consumed: int) -> ConfigurationError:
        return ConfigurationError(
            f"consumed_samples {consumed} lies beyond the end of the stream: {self.epochs} epochs of "
            f"{self.epoch_length} samples (epoch_tail={self.tail!r}); raise epochs= to train longer"
        )
