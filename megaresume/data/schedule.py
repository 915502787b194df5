"""The global batch size as a function of consumed samples: constant, Megatron's ramp-up, or a table.

All three are one thing, a table of stages; a ramp-up is worked out into its table once. Knows nothing of data order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megaresume.data.checks import as_count
from megaresume.errors import ConfigurationError


@dataclass(frozen=True)
class BatchSizeSchedule:
    """A table of stages `(consumed samples from which it holds, global batch size in samples)`, the first from 0.

    The size of a global batch is the one in force at the consumed samples at which the batch begins, so a run that is
    resumed anywhere has the sizes of a run that was not interrupted. Raises TypeError or ConfigurationError for a table
    that is not one.
    """

    stages: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigurationError("a batch-size schedule needs at least one stage, got none")
        checked = tuple(_as_stage(number, stage) for number, stage in enumerate(self.stages))
        if checked[0][0] != 0:
            raise ConfigurationError(f"the first stage must begin at 0 samples, got {checked[0][0]}")
        for (before, _), (after, _) in pairwise(checked):
            if after <= before:
                raise ConfigurationError(f"stages must begin at rising sample counts, got {after} after {before}")
        object.__setattr__(self, "stages", checked)

    @classmethod
    def constant(cls, global_batch_size: int) -> BatchSizeSchedule:
        """The same global batch size throughout."""
        return cls(((0, as_count("global_batch_size", global_batch_size)),))

    @classmethod
    def ramp_up(cls, global_batch_size: int, *, start: int, increment: int, samples: int) -> BatchSizeSchedule:
        """Megatron's `--rampup-batch-size start increment samples`, up to `global_batch_size` in equal steps.

        Raises ConfigurationError where Megatron's calculator would fail: no step, no samples, a step that does not fit.
        """
        last, first = as_count("global_batch_size", global_batch_size), as_count("start", start)
        step, over = as_count("increment", increment), as_count("samples", samples)
        if first >= last:
            raise ConfigurationError(f"a ramp-up must start below global_batch_size {last}, got start {first}")
        if left := (last - first) % step:
            raise ConfigurationError(
                f"global_batch_size {last} - start {first} = {last - first} must be a multiple of increment {step}; "
                f"global_batch_size {last - left} or {last + step - left} would do"
            )
        steps = (last - first) // step
        begins = {_ramp_stage_begin(number, over / steps): first + number * step for number in range(steps + 1)}
        return cls(tuple(begins.items()))  # where two stages begin at one sample, the later one is in force

    def at(self, consumed_samples: int) -> tuple[int, int | None]:
        """(global batch size in force at `consumed_samples`, where the next stage begins or None for the last)."""
        stage = bisect_right(self.stages, consumed_samples, key=lambda entry: entry[0]) - 1
        return self.stages[stage][1], self.stages[stage + 1][0] if stage + 1 < len(self.stages) else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch size that occurs, rising."""
        return tuple(sorted({size for _, size in self.stages}))

    def __str__(self) -> str:
        if len(self.stages) == 1:
            return str(self.stages[0][1])
        shown = self.stages if len(self.stages) <= 8 else (*self.stages[:6], self.stages[-1])
        text = ", ".join(f"{size} from {begins}" for begins, size in shown)
        return f"[{text}]" if len(shown) == len(self.stages) else f"[{text}; {len(self.stages)} stages]"


def as_schedule(global_batch_size: int | BatchSizeSchedule) -> BatchSizeSchedule:
    """An int as a constant schedule; a schedule as it is."""
    if isinstance(global_batch_size, BatchSizeSchedule):
        return global_batch_size
    return BatchSizeSchedule.constant(global_batch_size)


def _as_stage(number: int, stage: object) -> tuple[int, int]:
    if not isinstance(stage, Sequence) or isinstance(stage, str) or len(stage) != 2:
        raise TypeError(f"stage {number} of the schedule must be a pair (samples, global batch), got {stage!r}")
    begins = as_count(f"samples of stage {number}", stage[0], minimum=0)
    return begins, as_count(f"global_batch_size of stage {number}", stage[1])


def _ramp_stage_begin(number: int, samples_per_step: float) -> int:
    # Megatron asks int(consumed / samples_per_step) in floating point. Only the same division finds the sample at which
    # it gives `number`; exact arithmetic would begin some stages one sample away from Megatron's.
    begins = max(0, int(number * samples_per_step) - 2)
    while int(begins / samples_per_step) < number:
        begins += 1
    return begins
