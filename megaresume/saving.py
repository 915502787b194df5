"""A save, from live objects to a committed checkpoint: collected on every rank, published by rank 0, learned by all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megaresume.errors import CheckpointDamagedError
from megaresume.megatron.live import library_versions
from megaresume.megatron.parameters import synchronise
from megaresume.run_objects import TRAIN, Place, RunObjects
from megaresume.state import trainer_state
from megaresume.state.economy import Economy, leave_out, sources_in
from megaresume.state.rank_state import capture
from megaresume.state.scheduler import capture_scheduler
from megaresume.state.staging import Staged, Staging
from megaresume.state.tensors import dtype_code, host_bytes
from megaresume.state.trainer_state import TrainerState
from megaresume.store.attempts import Attempt, read_attempts
from megaresume.store.commit import CommitText, SaveReport, save_checkpoint
from megaresume.store.control import ControlPlane
from megaresume.store.manifest import Reference
from megaresume.store.references import Source, locate
from megaresume.store.shard import Entry, ShardIdentity
from megaresume.topology import RunShape

logger = logging.getLogger("megaresume.saving")


@dataclass(frozen=True)
class Counters:
    """The manager's counters at a step boundary."""

    step: int
    consumed_train_samples: int
    skipped_train_samples: int
    healthy: bool | None
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at a step boundary, ready to be written.

    `entries()` gives the tensors' bytes, in file order, once they are all there. `trainer_state` is the text of that
    file. Made from copies, nothing in it changes any more; made from live tensors, it is good until the next step.
    """

    step: int
    entries: Callable[[], list[Entry]]
    index: Mapping[str, Any]
    trainer_state: bytes


@dataclass(frozen=True)
class Target:
    """Where saves of this run go, and what is done around each commit, on rank 0 alone: before it, and after it."""

    root: Path
    place: Place
    shape: RunShape
    attempt: Attempt
    before_commit: Callable[[], None]
    after_commit: Callable[[], None]
    frozen: dict[str, Source]
    """Where this rank's weights that are not trained lie already; each committed save adds its own."""
    recycle: bool = False


def collect(
    target: Target, objects: RunObjects, counters: Counters, *, save_rng: bool, staging: Staging | None
) -> Callable[[], Snapshot]:
    """Take this rank's state as it is now: copied into `staging`, or as it lies in the live tensors.

    Not collective, but for a parameter all-gather that was left to overlap with the next forward pass, which is
    finished first. What cannot be captured is raised by the function that is returned, for all ranks are to hear of it.
    """
    synchronise(list(objects.chunks))
    try:
        snapshot = _collect(target, objects, counters, save_rng=save_rng, staging=staging)
    except Exception as error:
        failure = error

        def raise_it() -> Snapshot:
            raise failure

        return raise_it
    return lambda: snapshot


def storable(objects: RunObjects) -> list[torch.Tensor]:
    """The tensors that a save of now would hold, random streams apart."""
    return list(capture(objects.describe(), None, objects.registered).tensors.values())


def _collect(
    target: Target, objects: RunObjects, counters: Counters, *, save_rng: bool, staging: Staging | None
) -> Snapshot:
    state = capture(objects.describe(), objects.streams() if save_rng else None, objects.registered)
    # Built on every rank though rank 0 alone writes it: what cannot be written must fail before anything is.
    text = trainer_state.dumps(
        build_trainer_state(target.root, target.place, objects, target.attempt, counters, state.index)
    )
    # The widest first: then every tensor is aligned in the file, and no element is cut by the end of a chunk.
    tensors = dict(sorted(state.tensors.items(), key=lambda item: -item[1].element_size()))
    staged = Staged(tensors, lambda: None) if staging is None else staging.copy(tensors, settled=state.settled)

    def entries() -> list[Entry]:
        staged.wait()
        return [
            Entry(name, dtype_code(tensor.dtype, name), tuple(tensor.shape), host_bytes(tensor))
            for name, tensor in staged.copies.items()
        ]

    return Snapshot(counters.step, entries, state.index, text)


def save(target: Target, collected: Callable[[], Snapshot], *, step: int, control: ControlPlane) -> SaveReport:
    """Publish what `collect` took at `step` as `root/step-...`. Returns once it is committed, on every rank.

    Collective over the control plane; no tensor moves between ranks. Raises SaveError, or what cannot be captured, the
    same on all ranks; the root is then as it was.
    """
    box: list[tuple[Snapshot, Economy]] = []

    def take() -> None:
        snapshot = collected()
        box.append((snapshot, leave_out(snapshot.entries(), snapshot.index, _still_there(target))))

    attempt, shape, stem = target.attempt, target.shape, target.place.stem
    control.together(f"collect the state of step {step}", take)
    snapshot, economy = box[0]
    if control.rank == 0:
        target.before_commit()
    report = save_checkpoint(
        target.root,
        control=control,
        step=step,
        attempt=attempt,
        shard_name=f"{stem}.safetensors",
        entries=economy.entries,
        identity=ShardIdentity(attempt.root_id, attempt.attempt, step, stem),
        index=economy.index,
        references=[source.reference for source in economy.sources],
        recycle=target.recycle,
        describe=lambda: CommitText(
            snapshot.trainer_state, shape.topology.to_json(), dict(shape.model), library_versions()
        ),
    )
    if report.record is not None:
        written = Reference(step, attempt.attempt, f"{stem}.safetensors", **asdict(report.record))
        target.frozen.update(sources_in(economy.index, written))
    if control.rank == 0:
        target.after_commit()
    return report


def _still_there(target: Target) -> dict[str, Source]:
    """The known places of frozen weights whose files are there: somebody may have removed a checkpoint by hand."""
    there = {}
    for reference in {source.reference for source in target.frozen.values()}:
        try:
            there[reference] = locate(target.root, reference, root_id=target.attempt.root_id).exists()
        except CheckpointDamagedError as error:
            logger.warning("frozen weights are written anew: %s", error)
    return {key: source for key, source in target.frozen.items() if there.get(source.reference)}


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
        data={name: sampler.state_dict() for name, sampler in objects.positions.items()},
        topology=place.topology,
        scheduler=capture_scheduler(objects.scheduler),
        loss_scaler=scalers[0] if scalers else None,
        versions=library_versions(),
        lineage=tuple(each.to_json() for each in read_attempts(root)) if place.rank == 0 else (),
        healthy=counters.healthy,
        extra=dict(counters.extra),
    )
