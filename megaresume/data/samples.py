"""Reading single samples: seeded by (seed, epoch, index), and replaced by another of the dataset where one fails.

Runs in the worker processes. Knows nothing of batches or of what was consumed; a replaced sample counts as the one
asked for, so positions do not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from megaresume.data.seeding import derive, seeded
from megaresume.errors import ConfigurationError, MegaresumeError


class SampleError(MegaresumeError, RuntimeError):
    """A sample, and every replacement tried for it, failed to load. The iterator cannot go on; nothing was counted."""


def iterator_failed(reason: str) -> ConfigurationError:
    """What an iterator raises that is asked again after an error: torch's would pass over the batch that failed."""
    return ConfigurationError(
        f"this iterator ended with {reason}; going on would skip the batch that failed. Call iter() again: it begins "
        "after the last trained batch"
    )


class Key(NamedTuple):
    """What the sampler asks for: a sample id, as part of `epoch`."""

    epoch: int
    sample: int


class Replacement(NamedTuple):
    """Sample id `sample` of `epoch` failed to load for `reason`; sample id `used` was loaded in its place."""

    epoch: int
    sample: int
    used: int
    reason: str


@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of a sample that fails to load: at most `attempts` replacements; None may count as failed."""

    attempts: int = 0
    none_fails: bool = False


class Samples(Dataset[Any]):
    """A map-style dataset read by `Key`: item -> (sample, replacements made for it)."""

    def __init__(self, dataset: Any, size: int, seed: int, policy: FailurePolicy) -> None:
        self._dataset, self._size, self._seed, self._policy = dataset, size, seed, policy

    def __getitem__(self, key: Key) -> tuple[Any, tuple[Replacement, ...]]:
        failures: list[tuple[int, str]] = []
        cause: Exception | None = None
        for attempt in range(self._policy.attempts + 1):
            used = key.sample if attempt == 0 else self._substitute(key, attempt)
            try:
                with seeded(self._seed, key.epoch, used):
                    sample = self._dataset[used]
                if sample is not None or not self._policy.none_fails:
                    break
                failures.append((used, "is None"))
            except Exception as error:
                # Also a StopIteration, which would otherwise end the epoch here without a word.
                if self._policy.attempts == 0 and not isinstance(error, StopIteration):
                    raise
                failures.append((used, f"{type(error).__name__}: {error}"))
                cause = error
        else:
            tried = "; ".join(f"sample {index} {reason}" for index, reason in failures)
            raise SampleError(
                f"sample {key.sample} of epoch {key.epoch} failed to load, and so did all {self._policy.attempts} "
                f"replacements (max_replacements): {tried}"
            ) from cause
        if not failures:
            return sample, ()
        return sample, (Replacement(key.epoch, key.sample, used, failures[0][1]),)

    def _substitute(self, key: Key, attempt: int) -> int:
        # An offset from 1 to size - 1: never the failed sample itself, and never outside the dataset.
        if self._size == 1:
            return key.sample
        offset = 1 + derive(self._seed, key.epoch, key.sample, f"replacement {attempt}") % (self._size - 1)
        return (key.sample + offset) % self._size


class Collate:
    """The user's collate function, beside the replacements made: items -> (batch, replacements)."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, items: Sequence[tuple[Any, tuple[Replacement, ...]]]) -> tuple[Any, list[Replacement]]:
        batch = self._collate_fn([sample for sample, _ in items])
        return batch, [replacement for _, replacements in items for replacement in replacements]
