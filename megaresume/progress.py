"""How far a run is, read from its files alone: no torch, no megatron-core, nothing claimed or changed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from megaresume.errors import CheckpointNotFoundError, MegaresumeError
from megaresume.state import trainer_state
from megaresume.state.trainer_state import TrainerState
from megaresume.store import layout
from megaresume.store.discovery import find_candidates, open_checkpoint

logger = logging.getLogger("megaresume.progress")


@dataclass(frozen=True)
class Progress:
    """Where a checkpoint stands. Samples are counted over all data-parallel ranks."""

    path: Path
    global_step: int
    consumed_train_samples: int
    gradient_accumulation_steps: int | None
    state: TrainerState


def read_progress(root: str | PathLike[str]) -> Progress:
    """The progress of the newest checkpoint on the current branch of `root`, or of the checkpoint directory given.

    Raises CheckpointNotFoundError where there is none, and as reading its files does.
    """
    path = Path(root)
    if (path / layout.MANIFEST).exists():
        return progress_of(open_checkpoint(path).path)
    candidates, passed = find_candidates(path)
    if not candidates:
        reasons = "".join(f"\n  {each.path.name}: {each.reason}" for each in passed)
        raise CheckpointNotFoundError(f"{path} holds no checkpoint that a run could resume from{reasons}")
    return progress_of(candidates[0].path)


def is_unhealthy(checkpoint: Path) -> bool:
    """Whether loss or gradient norm of a checkpoint's last step were not finite. One whose `trainer_state.json` cannot
    be read is none to go back to either; one that says nothing of its health is taken for healthy."""
    try:
        return progress_of(checkpoint).state.healthy is False
    except MegaresumeError as error:
        logger.warning("not taken for healthy: %s", error)
        return True


def progress_of(checkpoint: Path) -> Progress:
    """The progress that a checkpoint directory's `trainer_state.json` tells."""
    state = trainer_state.read(checkpoint / layout.TRAINER_STATE)
    return Progress(
        path=checkpoint,
        global_step=state.global_step,
        consumed_train_samples=state.consumed_train_samples,
        gradient_accumulation_steps=state.gradient_accumulation_steps,
        state=state,
    )
