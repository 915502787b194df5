"""The data settings a checkpoint is bound to, the anchors that record their changes, and the check of one against the other.

Reads state dicts as hostile: every field is checked for type and range. Pure: nothing here moves a sampler.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

from megaresume.data.checks import MAX_DATASET_SIZE
from megaresume.data.order import SHUFFLES, Order, Shuffle
from megaresume.data.position import EPOCH_TAILS, EpochTail, Position
from megaresume.data.schedule import BatchSizeSchedule
from megaresume.errors import DataMismatchError, FormatError, TrainerStateError

logger = logging.getLogger("megaresume.data")

STATE_VERSION = 1
_MAX_COUNT = 2**62  # consumed samples, epochs: what int64 arithmetic holds with room
_MAX_ANCHORS = 10_000


@dataclass(frozen=True)
class Settings:
    """All that decides which samples a global batch holds. `fingerprint` tells what the ids mean (None: not known)."""

    order: Order
    schedule: BatchSizeSchedule
    epoch_tail: EpochTail
    fingerprint: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Anchor:
    """`settings` hold from `position` on; a changed order waits for the end of an epoch that is under way there."""

    position: Position
    settings: Settings


# The fields whose change can be allowed, by the names of the sampler's own arguments.
CHANGEABLE = ("global_batch_size", "seed", "shuffle", "epoch_tail", "dataset_size", "fingerprint")


def differences(saved: Settings, current: Settings) -> dict[str, tuple[str, str]]:
    """Changeable field -> (saved value, current value), for those that differ. A fingerprint one side lacks is not compared."""
    pairs: dict[str, tuple[Any, Any]] = {
        "global_batch_size": (saved.schedule, current.schedule),
        "seed": (saved.order.seed, current.order.seed),
        "shuffle": (saved.order.shuffle, current.order.shuffle),
        "epoch_tail": (saved.epoch_tail, current.epoch_tail),
        "dataset_size": (saved.order.dataset_size, current.order.dataset_size),
    }
    found = {name: (str(a), str(b)) for name, (a, b) in pairs.items() if a != b}
    if saved.fingerprint is None or current.fingerprint is None:
        if saved.fingerprint is not current.fingerprint:
            side = "checkpoint" if saved.fingerprint is None else "run"
            logger.warning("dataset content not compared: the %s has no fingerprint of the dataset", side)
        return found
    keys = sorted(saved.fingerprint.keys() & current.fingerprint.keys())
    changed = [key for key in keys if saved.fingerprint[key] != current.fingerprint[key]]
    # A changed length is the field dataset_size's to report.
    if changed and not (changed == ["length"] and "dataset_size" in found):
        found["fingerprint"] = (
            ", ".join(f"{key}={saved.fingerprint[key]!r}" for key in changed),
            ", ".join(f"{key}={current.fingerprint[key]!r}" for key in changed),
        )
    return found


def check_changes(saved: Settings, current: Settings, allowed: Set[str]) -> tuple[str, ...]:
    """One sentence per allowed change. Raises DataMismatchError for one that is not allowed, naming both values.

    `allowed` names fields of CHANGEABLE; another name is a ValueError.
    """
    unknown = sorted(set(allowed) - set(CHANGEABLE))
    if unknown:
        raise ValueError(f"allow_data_change knows {', '.join(CHANGEABLE)}; got {', '.join(map(repr, unknown))}")
    found = differences(saved, current)
    refused = {name: values for name, values in found.items() if name not in allowed}
    if refused:
        lines = "; ".join(f"{name}: checkpoint {old}, this run {new}" for name, (old, new) in refused.items())
        names = ", ".join(repr(name) for name in refused)
        raise DataMismatchError(
            f"data settings differ from the checkpoint's: {lines}. Use the checkpoint's values, or pass "
            f"allow_data_change={{{names}}} to go on from the next unseen sample with the new ones"
        )
    if not {"shuffle", "dataset_size"} & found.keys():
        _check_layout(saved.order, current.order)
    return tuple(f"{name} changed from {old} to {new}" for name, (old, new) in found.items())


def _check_layout(saved: Order, current: Order) -> None:
    if saved.shard_width != current.shard_width:
        raise DataMismatchError(
            f"data_parallel_size: checkpoint {saved.shard_width}, this run {current.shard_width}. Megatron's sharded order "
            "gives each data-parallel rank a shard of its own, so the order depends on the width by design; keep the width, "
            "or use shuffle='feistel' from the start"
        )
    for name in ("epoch_length", "permutation_size"):
        before, now = getattr(saved, name), getattr(current, name)
        if before != now:
            raise DataMismatchError(
                f"{name}: checkpoint {before}, this run {now}. Megatron's order leaves out the samples that do not fill a "
                f"micro-batch on every rank, here another part of the {saved.dataset_size}; choose micro_batch_size and "
                f"data_parallel_size so that {saved.dataset_size} - {saved.dataset_size} % (micro x width) is "
                f"{saved.epoch_length}, or those of the checkpoint"
            )


def order_at(anchors: Sequence[Anchor], epoch: int) -> Order:
    """The order in force in `epoch`: an epoch is finished in the order it was begun in."""
    for anchor in reversed(anchors):
        if anchor.position.epoch + (1 if anchor.position.offset else 0) <= epoch:
            return anchor.settings.order
    return anchors[0].settings.order


def anchors_to_json(anchors: Sequence[Anchor]) -> list[dict[str, Any]]:
    """Anchors as JSON values."""
    return [
        {
            "consumed_samples": anchor.position.consumed,
            "epoch": anchor.position.epoch,
            "offset": anchor.position.offset,
            "settings": settings_to_json(anchor.settings),
        }
        for anchor in anchors
    ]


def settings_to_json(settings: Settings) -> dict[str, Any]:
    """Settings as JSON values."""
    order = settings.order
    return {
        "dataset_size": order.dataset_size,
        "fingerprint": None if settings.fingerprint is None else dict(settings.fingerprint),
        "seed": order.seed,
        "shuffle": order.shuffle,
        "epoch_tail": settings.epoch_tail,
        "global_batch_size": [list(stage) for stage in settings.schedule.stages],
        "epoch_length": order.epoch_length,
        "permutation_size": order.permutation_size,
        "shard_width": order.shard_width,
    }


def parse_state(state: Any) -> tuple[tuple[Anchor, ...], Position]:
    """(anchors, position) of a sampler's state dict.

    Raises FormatError for a newer version, TrainerStateError naming a field that is missing or not of its type or range.
    """
    top = _mapping(state, "sampler state")
    version = _count(top, "version", 1)
    if version > STATE_VERSION:
        raise FormatError(f"sampler state of version {version}; this release reads up to {STATE_VERSION}: update megaresume")
    listed = top.get("anchors")
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_ANCHORS:
        raise TrainerStateError("sampler state: field 'anchors' must be a list of at least one anchor")
    anchors = tuple(_parse_anchor(entry, f"anchors[{number}]") for number, entry in enumerate(listed))
    position = Position(_count(top, "consumed_samples", 0), _count(top, "epoch", 0), _count(top, "offset", 0))
    passed = [anchor.position.consumed for anchor in anchors] + [position.consumed]
    if passed != sorted(passed):
        raise TrainerStateError(f"sampler state: anchors and 'consumed_samples' must not go backwards, got {passed[-3:]}")
    if top.get("settings", settings_to_json(anchors[-1].settings)) != settings_to_json(anchors[-1].settings):
        raise TrainerStateError("sampler state: field 'settings' is not that of the last anchor")
    return anchors, position


def _parse_anchor(entry: Any, where: str) -> Anchor:
    anchor = _mapping(entry, where)
    position = Position(
        _count(anchor, "consumed_samples", 0, where), _count(anchor, "epoch", 0, where), _count(anchor, "offset", 0, where)
    )
    return Anchor(position, _parse_settings(_mapping(anchor.get("settings"), f"{where}.settings"), f"{where}.settings"))


def _parse_settings(settings: Mapping[str, Any], where: str) -> Settings:
    shuffle, tail, fingerprint = settings.get("shuffle"), settings.get("epoch_tail"), settings.get("fingerprint")
    if shuffle not in SHUFFLES:
        raise TrainerStateError(f"{where}: field 'shuffle' must be one of {', '.join(SHUFFLES)}, got {shuffle!r}")
    if tail not in EPOCH_TAILS:
        raise TrainerStateError(f"{where}: field 'epoch_tail' must be one of {', '.join(EPOCH_TAILS)}, got {tail!r}")
    seed = settings.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TrainerStateError(f"{where}: field 'seed' must be an integer, got {seed!r}")
    size = _count(settings, "dataset_size", 1, where, MAX_DATASET_SIZE)
    order = Order(
        cast(Shuffle, shuffle),
        seed,
        size,
        _count(settings, "epoch_length", 1, where, size),
        _count(settings, "permutation_size", 1, where, size),
        _count(settings, "shard_width", 0, where),
    )
    return Settings(
        order,
        _parse_schedule(settings.get("global_batch_size"), where),
        cast(EpochTail, tail),
        None if fingerprint is None else dict(_mapping(fingerprint, f"{where}.fingerprint")),
    )


def _parse_schedule(value: Any, where: str) -> BatchSizeSchedule:
    if not isinstance(value, list):
        raise TrainerStateError(f"{where}: field 'global_batch_size' must be a list of [samples, size], got {value!r}")
    try:
        return BatchSizeSchedule(tuple(tuple(stage) if isinstance(stage, list) else stage for stage in value))
    except (TypeError, ValueError) as error:
        raise TrainerStateError(f"{where}: field 'global_batch_size': {error}") from error


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TrainerStateError(f"{where} must be a mapping, got {type(value).__name__}")
    return value


def _count(fields: Mapping[str, Any], name: str, minimum: int, where: str = "sampler state", most: int = _MAX_COUNT) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= most:
        raise TrainerStateError(f"{where}: field {name!r} must be an integer from {minimum} to {most}, got {value!r}")
    return value
