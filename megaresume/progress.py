"""How far a run is, read from its files alone: no torch, no megatron-core, nothing claimed or changed."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from megaresume.errors import CheckpointNotFoundError, MegaresumeError
from megaresume.state import trainer_state
from megaresume.state.trainer_state import TrainerState
from megaresume.store import layout
from megaresume.store.discovery import find_candidates, open_checkpoint


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


def why_unhealthy(checkpoint: Path) -> str | None:
    """Why a run should not go back to this checkpoint: loss or gradient norm of its last step were not finite, or its
    `trainer_state.json` cannot be read. None for a healthy one, and for one that says nothing of its health."""
    try:
        healthy = progress_of(checkpoint).state.healthy
    except MegaresumeError as error:
        return str(error)
    return "loss or gradient norm of its last step were not finite" if healthy is False else None


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
