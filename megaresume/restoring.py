"""Bringing a checkpoint back onto live objects: rank 0 proposes, all agree, then all act, in two phases.

Phase 1 reads and compares and touches nothing live: a refusal there leaves everything as it was. Phase 2 reads into
live tensors and verifies; damage found there makes all ranks together take the next older checkpoint. Every failure of
one rank is raised on all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megaresume.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ConfigurationError,
    FormatError,
    MegaresumeError,
    PoisonedError,
    StateMismatchError,
    TopologyMismatchError,
)
from megaresume.run_objects import TRAIN, Place, RunObjects
from megaresume.state import trainer_state
from megaresume.state.economy import sources_in
from megaresume.state.rank_state import RestorePlan, check_form, plan_restore
from megaresume.state.scheduler import (
    SET_BY_SCHEDULE,
    restore_scheduler,
    scheduler_differences,
    scheduler_mismatches,
)
from megaresume.state.tensors import room_beside, target_for
from megaresume.state.trainer_state import TrainerState
from megaresume.store import layout
from megaresume.store.control import ControlPlane
from megaresume.store.manifest import Manifest, Reference, parse_manifest, read_trainer_state
from megaresume.store.references import Source, locate
from megaresume.store.shard import (
    ShardHeader,
    ShardIdentity,
    ShardRecord,
    Target,
    check_identity,
    read_ahead,
    read_header,
    stream_tensors,
    verify_shard,
)
from megaresume.topology import RunShape, Topology, compare, format_differences

logger = logging.getLogger("megaresume.restoring")

# What a run that takes weights alone goes on from.
_FRESH = TrainerState(global_step=0, consumed_train_samples=0)
_WAY_OUT = "Start the process again; to go on from an older checkpoint, name its step."
_HALF_WAY = "live state was partly overwritten from {path}, and then: {reason}\n" + _WAY_OUT


@dataclass(frozen=True)
class Options:
    """What to take from a checkpoint and how: see `ResumeManager`, whose arguments these are."""

    weights_only: bool = False
    skip_data: bool = True
    load_rng: bool = True
    override_opt_param_scheduler: bool = False
    allow_data_change: AbstractSet[str] = frozenset()
    allow_model_change: AbstractSet[str] = frozenset()
    verify: str = "load"


@dataclass(frozen=True)
class Restored:
    """What came back. `changes` are what differs on purpose ("data", "lr", "weights_only"); the texts say it to
    people."""

    path: Path
    manifest: Manifest
    state: TrainerState
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    passed: tuple[tuple[str, str], ...]
    bytes_read: int
    seconds: float
    frozen: Mapping[str, Source]
    """Where this rank's weights that are not trained lie, for saves to refer to."""


@dataclass(frozen=True)
class _Prepared:
    """Phase 1's result on this rank: all that phase 2 needs, nothing live changed."""

    header: ShardHeader
    shard: Path
    plan: RestorePlan
    state: TrainerState
    manifest: Manifest
    data_changes: tuple[str, ...]
    notes: tuple[str, ...]
    model_changes: tuple[str, ...] = ()
    elsewhere: tuple[_Elsewhere, ...] = ()


@dataclass(frozen=True)
class _Elsewhere:
    """A file of an earlier checkpoint in which frozen weights of this one lie."""

    header: ShardHeader
    shard: Path
    destinations: Mapping[str, torch.Tensor]


def restore_first_valid(
    paths: Sequence[Path],
    *,
    control: ControlPlane,
    place: Place,
    shape: RunShape,
    objects: RunObjects,
    options: Options,
    fall_back: bool,
) -> Restored:
    """Restore the first of `paths` (the same on all ranks) that is whole; with `fall_back`, damaged ones are passed
    over, aloud.

    Collective: the control plane, then the replica groups. Raises the same error on all ranks; after PoisonedError the
    live objects are undefined, after any other they are as they were.
    """
    started = time.monotonic()
    passed: list[tuple[str, str]] = []
    overwritten: str | None = None

    def pass_over(path: Path, error: MegaresumeError) -> None:
        passed.append((path.name, str(error)))
        if place.rank == 0:
            logger.warning("passing over %s: %s", path, error)

    for path in paths:
        try:
            prepared = _prepare(path, control, place, shape, objects, options)
        except (CheckpointDamagedError, FormatError) as error:
            if not fall_back:
                raise
            pass_over(path, error)
            continue
        except MegaresumeError as error:
            if overwritten is None:
                raise
            raise PoisonedError(_HALF_WAY.format(path=overwritten, reason=error)) from error
        overwritten = path.name
        try:
            _overwrite(prepared, control, objects, options)
        except CheckpointDamagedError as error:
            pass_over(path, error)
            if not fall_back:
                break
            continue
        return Restored(
            path=path,
            manifest=prepared.manifest,
            state=prepared.state,
            changes=_changes(prepared, objects, options),
            notes=prepared.notes,
            left_out=tuple(prepared.plan.left_out),
            passed=tuple(passed),
            bytes_read=prepared.header.size,
            seconds=time.monotonic() - started,
            frozen=_frozen_in(prepared),
        )
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in passed)
    if overwritten is not None:
        raise PoisonedError(
            f"no checkpoint could be read to its end, and live state is partly overwritten:{reasons}\n{_WAY_OUT}"
        )
    raise CheckpointNotFoundError(
        f"none of the checkpoints can be read:{reasons}\nNothing was changed, and nothing will be overwritten."
    )


def _prepare(
    path: Path, control: ControlPlane, place: Place, shape: RunShape, objects: RunObjects, options: Options
) -> _Prepared:
    box: list[_Prepared] = []
    allowed: list[str] = []
    control.together(
        f"check {path.name}", lambda: allowed.extend(_check_topology(path, shape, objects, options.allow_model_change))
    )
    objects.admit(path, control)
    control.together(f"check {path.name}", lambda: box.append(_check_own_files(path, place, objects, options)))
    prepared = box[0]
    return replace(prepared, model_changes=tuple(allowed), notes=(*allowed, *prepared.notes))


def _check_topology(path: Path, shape: RunShape, objects: RunObjects, allow: AbstractSet[str]) -> list[str]:
    """A line for each difference that is allowed; any other is raised."""
    manifest = parse_manifest(path / layout.MANIFEST)
    saved = RunShape(Topology.from_json(manifest.topology, source=str(path / layout.MANIFEST)), manifest.model)
    differences = compare(saved, shape)
    refused = [each for each in differences if each.field not in allow]
    if refused:
        facts, own = {each.field.partition(".")[0] for each in refused}, objects.facts().keys()
        kind = StateMismatchError if facts & own and facts <= shape.model.keys() else TopologyMismatchError
        raise kind(f"{path} is of another layout or model than this run:\n{format_differences(refused)}")
    return [
        f"{each.field} is {each.checkpoint} in the checkpoint, {each.this_run} in this run, which was allowed"
        for each in differences
    ]


def _check_own_files(path: Path, place: Place, objects: RunObjects, options: Options) -> _Prepared:
    manifest = parse_manifest(path / layout.MANIFEST)
    shard = path / f"{place.stem}.safetensors"
    if shard.name not in manifest.files:
        raise CheckpointDamagedError(
            f"{path / layout.MANIFEST} lists no {shard.name}, the file of this rank; it lists {len(manifest.files)} "
            "others"
        )
    header = read_header(shard, record=manifest.files[shard.name])
    check_identity(header, ShardIdentity(manifest.root_id, manifest.attempt, manifest.step, place.stem), shard)
    if options.verify == "first":
        verify_shard(shard, header)
    else:
        read_ahead(shard, header)
    source = path / layout.TRAINER_STATE
    state = _FRESH if options.weights_only else _read_state(path, manifest)
    keep_run = options.override_opt_param_scheduler
    try:
        plan = plan_restore(
            header.index,
            header.tensors,
            objects.describe(),
            objects.streams() if options.load_rng else None,
            objects.registered,
            weights_only=options.weights_only,
            keep_run_options=keep_run,
            set_by_schedule=frozenset() if objects.scheduler is None else SET_BY_SCHEDULE,
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(
            f"{shard}: its index is not of the documented form ({type(error).__name__}: {error})"
        ) from error
    elsewhere = _find_elsewhere(path, manifest, plan, verify_first=options.verify == "first")
    data_changes: tuple[str, ...] = ()
    if not options.weights_only:
        if problems := scheduler_mismatches(state.scheduler, objects.scheduler):
            raise StateMismatchError(f"{source}: " + "; ".join(problems))
        plan.differences += scheduler_differences(state.scheduler, objects.scheduler, keep_run_options=keep_run)
        if not options.skip_data and len(objects.positions) < len(objects.data):
            streams = ", ".join(sorted(set(objects.data) - set(objects.positions)))
            raise ConfigurationError(f"skip_data=False cannot set back the streams {streams}: leave it out")
        if options.skip_data:
            data_changes = _check_data(state, objects, options, source)
    notes = (*plan.differences, *data_changes)
    return _Prepared(header, shard, plan, state, manifest, data_changes, notes, elsewhere=elsewhere)


def _find_elsewhere(path: Path, manifest: Manifest, plan: RestorePlan, *, verify_first: bool) -> tuple[_Elsewhere, ...]:
    """Open the files of earlier checkpoints that the plan needs tensors of, and check them as this rank's own."""
    found = []
    known = {(each.step, each.attempt, each.name): each for each in manifest.references}
    for key, destinations in plan.elsewhere.items():
        if key not in known:
            raise FormatError(f"{path}: weights lie in {key[2]} of step {key[0]}, which the manifest does not refer to")
        reference = known[key]
        shard = locate(path.parent, reference, root_id=manifest.root_id)
        header = read_header(shard, record=ShardRecord(reference.size, reference.header_digest))
        coordinate = reference.name.removesuffix(layout.SHARD_SUFFIX)
        check_identity(header, ShardIdentity(manifest.root_id, reference.attempt, reference.step, coordinate), shard)
        check_form(destinations, header.tensors)
        if verify_first:
            stream_tensors(shard, header, dict.fromkeys(destinations, Target()))
        found.append(_Elsewhere(header, shard, destinations))
    return tuple(found)


def _frozen_in(prepared: _Prepared) -> dict[str, Source]:
    manifest, header = prepared.manifest, prepared.header
    own = Reference(manifest.step, manifest.attempt, prepared.shard.name, header.size, header.digest)
    return sources_in(header.index, own, manifest.references)


def _read_state(path: Path, manifest: Manifest) -> TrainerState:
    source = path / layout.TRAINER_STATE
    try:
        state = trainer_state.loads(read_trainer_state(path, manifest), source=str(source))
    except (CheckpointDamagedError, FormatError) as error:
        raise type(error)(f"{error} Its weights alone can be loaded without it: weights_only=True.") from error
    if state.global_step != manifest.step:
        raise CheckpointDamagedError(
            f"{source} is of step {state.global_step}, the manifest beside it of step {manifest.step}"
        )
    return state


def _check_data(state: TrainerState, objects: RunObjects, options: Options, source: Path) -> tuple[str, ...]:
    if missing := sorted(set(objects.positions) - set(state.data)):
        raise StateMismatchError(
            f"{source} has no position for the data {', '.join(missing)} (it has: {', '.join(state.data) or 'none'}); "
            "resume with skip_data=False to start that data from its beginning"
        )
    changes: list[str] = []
    for name, sampler in objects.positions.items():
        changes += [f"data {name}: {each}" for each in sampler.check_state(state.data[name], options.allow_data_change)]
    return tuple(changes)


def _overwrite(prepared: _Prepared, control: ControlPlane, objects: RunObjects, options: Options) -> None:
    """Phase 2. Raises CheckpointDamagedError for bytes that were not written so, PoisonedError for all else that
    fails."""
    name = prepared.shard.parent.name
    plan, verify = prepared.plan, options.verify != "none"

    def read() -> None:
        make_room = room_beside(plan.destinations.values())
        stream_tensors(prepared.shard, prepared.header, plan.targets(), verify=verify, make_room=make_room)
        for each in prepared.elsewhere:
            targets = {name: target_for(tensor) for name, tensor in each.destinations.items()}
            stream_tensors(each.shard, each.header, targets, verify=verify, make_room=make_room)

    try:
        control.together(f"read {name}", read)
        prepared.plan.complete()
        control.together(f"install {name}", lambda: _install(prepared, objects, options))
    except CheckpointDamagedError:
        raise
    except Exception as error:
        raise PoisonedError(_HALF_WAY.format(path=name, reason=error)) from error


def _install(prepared: _Prepared, objects: RunObjects, options: Options) -> None:
    if options.weights_only:
        prepared.plan.install()
        return
    restore_scheduler(
        prepared.state.scheduler, objects.scheduler, keep_run_options=options.override_opt_param_scheduler
    )
    if options.skip_data:
        for name, sampler in objects.positions.items():
            sampler.load_state_dict(prepared.state.data[name], allow_data_change=options.allow_data_change)
    # After all else: installing anything may draw random numbers.
    prepared.plan.install()
    if TRAIN in objects.data:
        objects.count(objects.data[TRAIN].consumed_samples)


def _changes(prepared: _Prepared, objects: RunObjects, options: Options) -> tuple[str, ...]:
    changes = []
    if options.weights_only:
        changes.append("weights_only")
    if prepared.data_changes or (objects.data and not options.skip_data):
        changes.append("data")
    if prepared.model_changes:
        changes.append("model")
    if options.override_opt_param_scheduler and prepared.plan.differences:
        changes.append("lr")
    if not options.load_rng:
        changes.append("rng")
    return tuple(changes)
