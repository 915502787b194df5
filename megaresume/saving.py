"""A save, from live objects to a committed checkpoint: collected on every rank, published by rank 0, learned by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.megatron.live import library_versions
from megaresume.megatron.parameters import synchronise
from megaresume.run_objects import TRAIN, Place, RunObjects
from megaresume.state import trainer_state
from megaresume.state.rank_state import RankState, capture
from megaresume.state.scheduler import capture_scheduler
from megaresume.state.tensors import dtype_code, host_bytes
from megaresume.state.trainer_state import TrainerState
from megaresume.store.attempts import Attempt, read_attempts
from megaresume.store.commit import CommitText, SaveReport, save_checkpoint
from megaresume.store.control import ControlPlane
from megaresume.store.shard import Entry, ShardIdentity
from megaresume.topology import RunShape


@dataclass(frozen=True)
class Counters:
    """The manager's counters at a step boundary."""

    step: int
    consumed_train_samples: int
    skipped_train_samples: int
    healthy: bool | None
    extra: Mapping[str, Any]


def save(
    root: Path,
    *,
    control: ControlPlane,
    place: Place,
    shape: RunShape,
    objects: RunObjects,
    attempt: Attempt,
    counters: Counters,
    save_rng: bool,
) -> SaveReport:
    """Save the state of this step boundary as `root/step-...`. Returns once it is committed, on every rank.

    Collective over the control plane; no tensor moves between ranks (but for a parameter all-gather that was left to
    overlap with the next forward pass, which is finished first). Raises SaveError, or what cannot be captured, the same
    on all ranks; the root is then as it was.
    """
    synchronise(list(objects.chunks))
    box: list[tuple[RankState, list[Entry], bytes]] = []

    def collect() -> None:
        state = capture(objects.describe(), objects.streams() if save_rng else None, objects.registered)
        entries = [
            Entry(name, dtype_code(tensor.dtype, name), tuple(tensor.shape), host_bytes(tensor))
            for name, tensor in state.tensors.items()
        ]
        # Built on every rank though rank 0 alone writes it: what cannot be written must fail before anything is.
        text = trainer_state.dumps(build_trainer_state(root, place, objects, attempt, counters, state.index))
        box.append((state, entries, text))

    control.together(f"collect the state of step {counters.step}", collect)
    state, entries, text = box[0]
    return save_checkpoint(
        root,
        control=control,
        step=counters.step,
        attempt=attempt,
        shard_name=f"{place.stem}.safetensors",
        entries=entries,
        identity=ShardIdentity(attempt.root_id, attempt.attempt, counters.step, place.stem),
        index=state.index,
        describe=lambda: CommitText(text, shape.topology.to_json(), dict(shape.model), library_versions()),
    )


def build_trainer_state(
    root: Path, place: Place, objects: RunObjects, attempt: Attempt, counters: Counters, index: Mapping[str, Any]
) -> TrainerState:
    """What `trainer_state.json` says at this boundary; `index` is that of this rank's shard."""
    scalers = [optimizer["scaler"] for optimizer in index["optimizers"] if optimizer["scaler"]]
    train = objects.data.get(TRAIN)
    valid = [sampler.consumed_samples for name, sampler in objects.data.items() if name != TRAIN]
    sampler_state = {} if train is None else train.state_dict()
    return TrainerState(
        global_step=counters.step,
        consumed_train_samples=counters.consumed_train_samples,
        consumed_valid_samples=sum(valid),
        skipped_train_samples=counters.skipped_train_samples,
        epoch=None if train is None else train.epoch,
        micro_batch_size=None if train is None else train.micro_batch_size,
        global_batch_size=None if train is None else train.global_batch_size,
        gradient_accumulation_steps=None if train is None else train.num_microbatches,
        batch_size_schedule=sampler_state.get("settings", {}).get("global_batch_size"),
        data={name: sampler.state_dict() for name, sampler in objects.data.items()},
        topology=place.topology,
        scheduler=capture_scheduler(objects.scheduler),
        loss_scaler=scalers[0] if scalers else None,
        versions=library_versions(),
        lineage=tuple(each.to_json() for each in read_attempts(root)) if place.rank == 0 else (),
        healthy=counters.healthy,
        extra=dict(counters.extra),
    )
