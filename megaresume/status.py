"""The status word: five numbers that all ranks add up once per step, so that a stop seen by one is a stop for all.

Posted at the end of a step and read at the end of the next, so that nobody waits for it. Also carries the loss, which
only the last pipeline stage has. The one collective on the default process group that megaresume adds to training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Word:
    """What the ranks said together: how many want to stop, whether the replay diverged, whether a save that went on
    behind the training has failed, and the mean loss over the ranks that have one (None: nobody)."""

    stop: int
    diverged: bool
    save_failed: bool
    loss: float | None


class StatusWord:
    """Posts one word at a time; `take` returns the one posted before, on every rank the same.

    Collective over the default group: all ranks post and take in the same order.
    """

    def __init__(self) -> None:
        self._distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._device = _device() if self._distributed else torch.device("cpu")
        self._posted: tuple[torch.Tensor, Any | None] | None = None

    def post(self, *, stop: bool, diverged: bool, save_failed: bool, loss: float | None) -> None:
        """Start the exchange of this rank's word; returns at once."""
        said = [float(stop), float(diverged), float(save_failed)]
        numbers = [*said, 0.0 if loss is None else loss, 0.0 if loss is None else 1.0]
        # float64 holds every float32 loss exactly, and the sum of a few thousand of them to the last bit that matters.
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        work = dist.all_reduce(tensor, async_op=True) if self._distributed else None
        self._posted = (tensor, work)

    def take(self) -> Word | None:
        """The word last posted, once all ranks have; None if none is under way."""
        if self._posted is None:
            return None
        tensor, work = self._posted
        self._posted = None
        if work is not None:
            work.wait()
        stop, diverged, save_failed, total, count = tensor.tolist()
        return Word(
            stop=round(stop),
            diverged=diverged > 0,
            save_failed=save_failed > 0,
            loss=total / count if count else None,
        )


def _device() -> torch.device:
    """The host where the default group can reduce there (gloo), the accelerator of this rank otherwise (NCCL)."""
    backends = dist.get_backend_config() if hasattr(dist, "get_backend_config") else dist.get_backend()
    return torch.device("cpu") if "gloo" in str(backends) else torch.device("cuda", torch.cuda.current_device())
