"""`resume_from_checkpoint`: one call for loops that keep their own counters and only want the state back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.progress import Progress, progress_of, read_progress
from megaresume.restoring import Options, restore_first_valid
from megaresume.run_objects import agree_on_shape, find_place, gather_objects
from megaresume.store.control import DEFAULT_TIMEOUT_S
from megaresume.store.rendezvous import open_control_plane

if TYPE_CHECKING:
    from megaresume.data.sampler import DataParallelBatchSampler


def resume_from_checkpoint(
    path: str | PathLike[str],
    *,
    model: Any,
    optimizer: Any | None = None,
    scheduler: Any | None = None,
    data: Mapping[str, DataParallelBatchSampler] | None = None,
    register: Mapping[str, Any] | None = None,
    weights_only: bool = False,
    skip_data: bool = True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Progress:
    """Restore `path`, a checkpoint or the newest one of a root, onto the objects given, and say how far it is.

    The counters returned are those to go on with: step 0 with `weights_only`, no samples consumed with
    `skip_data=False`. The objects and the two modes are those of `ResumeManager` and its `resume`. Nothing on disk is
    claimed or changed, so a run that also saves through a manager should resume through it. Collective; raises the same
    named error on all ranks.
    """
    objects = gather_objects(model=model, optimizer=optimizer, scheduler=scheduler, data=data, register=register)
    place = find_place(None)
    control = open_control_plane(timeout_s=timeout_s, label=place.stem)
    chosen = Path(control.decide(f"find a checkpoint in {path}", lambda: str(read_progress(path).path)))
    restored = restore_first_valid(
        [chosen],
        control=control,
        place=place,
        shape=agree_on_shape(control, place, objects),
        objects=objects,
        options=Options(weights_only=weights_only, skip_data=skip_data),
        fall_back=False,
    )
    control.close()
    progress = progress_of(restored.path)
    if weights_only:
        return replace(progress, global_step=0, consumed_train_samples=0)
    return progress if skip_data else replace(progress, consumed_train_samples=0)
