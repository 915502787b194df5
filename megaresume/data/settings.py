"""The data settings a checkpoint is bound to, the anchors that record their changes, and the check of a change.

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
from megaresume.errors import ConfigurationError, DataMismatchError, FormatError, TrainerStateError

logger = logging.getLogger("megaresume.data")

STATE_VERSION = 1
_MAX_COUNT = 2**62  # of consumed samples and epochs: int64 with room
_MAX_ANCHORS = 10_000

# The settings whose change can be allowed, by the names of the sampler's own arguments.
CHANGEABLE = ("global_batch_size", "seed", "shuffle", "epoch_tail", "dataset_size", "fingerprint")


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


def order_at(anchors: Sequence[Anchor], epoch: int) -> Order:
    """The order in force in `epoch`: an epoch is finished in the order it was begun in."""
    for anchor in reversed(anchors):
        if anchor.position.epoch + (1 if anchor.position.offset else 0) <= epoch:
            return anchor.settings.order
    return anchors[0].settings.order


def check_changes(saved: Settings, current: Settings, allowed: Set[str], *, offset: int) -> tuple[str, ...]:
    """One sentence per allowed change, made at `offset` of an epoch.

    `allowed` names fields of CHANGEABLE; another name is a ConfigurationError. Raises DataMismatchError, naming both
    values, for a change that is not allowed.
    """
    check_allowed(allowed)
    found = _differences(saved, current)
    refused = {name: values for name, values in found.items() if name not in allowed}
    if refused:
        lines = "; ".join(f"{name}: checkpoint {old}, this run {new}" for name, (old, new) in refused.items())
        names = ", ".join(repr(name) for name in refused)
        raise DataMismatchError(
            f"data settings differ from the checkpoint's: {lines}. Use the checkpoint's values, or pass "
            f"allow_data_change={{{names}}} to go on from the next unseen sample with the new ones"
        )
    if not {"shuffle", "dataset_size"} & found.keys():
        _check_layout(saved.order, current.order, offset)
    return tuple(f"{name} changed from {old} to {new}" for name, (old, new) in found.items())


def check_allowed(allowed: Set[str]) -> None:
    """Raise ConfigurationError unless `allowed` is a set of names out of CHANGEABLE."""
    if not isinstance(allowed, Set) or not allowed <= set(CHANGEABLE):
        raise ConfigurationError(f"allow_data_change is a set of names out of {', '.join(CHANGEABLE)}; got {allowed!r}")


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
        "shard_turn": order.shard_turn,
    }


def position_to_json(position: Position) -> dict[str, int]:
    """A position as JSON values."""
    return {"consumed_samples": position.consumed, "epoch": position.epoch, "offset": position.offset}


def anchors_to_json(anchors: Sequence[Anchor]) -> list[dict[str, Any]]:
    """Anchors as JSON values."""
    return [{**position_to_json(anchor.position), "settings": settings_to_json(anchor.settings)} for anchor in anchors]


def parse_state(state: Any) -> tuple[tuple[Anchor, ...], Position]:
    """(anchors, position) of a sampler's state dict; keys it does not know are passed over.

    Raises FormatError for a newer version, TrainerStateError naming a field that is missing, or not of its type or
    range.
    """
    top = _mapping(state, "sampler state")
    version = _count(top, "version", "sampler state", minimum=1)
    if version > STATE_VERSION:
        raise FormatError(
            f"sampler state of version {version}; this release reads up to {STATE_VERSION}: update megaresume"
        )
    listed = top.get("anchors")
    if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_ANCHORS:
        raise TrainerStateError(f"sampler state: field 'anchors' must be a list of 1 to {_MAX_ANCHORS} anchors")
    anchors = tuple(_parse_anchor(entry, f"sampler state: anchors[{number}]") for number, entry in enumerate(listed))
    position = _parse_position(top, "sampler state")
    places = [(place.consumed, place.epoch) for place in (*(anchor.position for anchor in anchors), position)]
    if places != sorted(places):
        raise TrainerStateError("sampler state: 'anchors' and 'consumed_samples' must not go backwards")
    for anchor in anchors:
        _check_offset(anchors, anchor.position)
    _check_offset(anchors, position)
    return anchors, position


def _differences(saved: Settings, current: Settings) -> dict[str, tuple[str, str]]:
    pairs: dict[str, tuple[Any, Any]] = {
        "global_batch_size": (saved.schedule, current.schedule),
        "seed": (saved.order.seed, current.order.seed),
        "shuffle": (saved.order.shuffle, current.order.shuffle),
        "epoch_tail": (saved.epoch_tail, current.epoch_tail),
        "dataset_size": (saved.order.dataset_size, current.order.dataset_size),
    }
    found = {name: (str(old), str(new)) for name, (old, new) in pairs.items() if old != new}
    old_print, new_print = saved.fingerprint, current.fingerprint
    if old_print is None or new_print is None:
        if old_print is not new_print:
            side = "checkpoint" if old_print is None else "run"
            logger.warning("content of the dataset not compared: the %s has no fingerprint of it", side)
        return found
    # "length" is left to the field dataset_size; a key that only one side has cannot be compared.
    keys = [key for key in old_print if key in new_print and key != "length" and old_print[key] != new_print[key]]
    if keys:
        found["fingerprint"] = (
            ", ".join(f"{key}={old_print[key]!r}" for key in keys),
            ", ".join(f"{key}={new_print[key]!r}" for key in keys),
        )
    return found


def _check_layout(saved: Order, current: Order, offset: int) -> None:
    if saved.shard_width != current.shard_width:
        raise DataMismatchError(
            f"data_parallel_size: checkpoint {saved.shard_width}, this run {current.shard_width}. Megatron's sharded "
            "order gives each data-parallel rank a shard of its own, so the order depends on the width by design; keep "
            "the width, or train with shuffle='feistel' or 'megatron' from the start"
        )
    for name in ("epoch_length", "permutation_size"):
        before, now = getattr(saved, name), getattr(current, name)
        if before != now:
            raise DataMismatchError(
                f"{name}: checkpoint {before}, this run {now}. Megatron's order leaves out samples that do not fill a "
                "micro-batch on every rank, and with this micro_batch_size and data_parallel_size those are others of "
                f"the {saved.dataset_size}; keep the checkpoint's, or choose them so that {name} stays {before}"
            )
    blocks = (saved.shard_turn * saved.shard_width, current.shard_turn * current.shard_width)
    if saved.shard_turn != current.shard_turn and any(offset % block for block in blocks):
        raise DataMismatchError(
            f"micro_batch_size: checkpoint {saved.shard_turn}, this run {current.shard_turn}. Training stands at "
            f"offset {offset}, in mid-turn of Megatron's sharded order ({blocks[0]} ids, now {blocks[1]}): "
            "keep the checkpoint's micro-batch size until a batch ends on both"
        )


def _parse_anchor(entry: Any, where: str) -> Anchor:
    anchor = _mapping(entry, where)
    settings = _parse_settings(_mapping(anchor.get("settings"), f"{where}: field 'settings'"), where)
    return Anchor(_parse_position(anchor, where), settings)


def _parse_position(fields: Mapping[str, Any], where: str) -> Position:
    return Position(*(_count(fields, name, where) for name in ("consumed_samples", "epoch", "offset")))


def _parse_settings(settings: Mapping[str, Any], where: str) -> Settings:
    shuffle = _one_of(settings, "shuffle", SHUFFLES, where)
    tail = _one_of(settings, "epoch_tail", EPOCH_TAILS, where)
    seed = settings.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TrainerStateError(f"{where}: field 'seed' must be an integer, got {seed!r}")
    size = _count(settings, "dataset_size", where, minimum=1, maximum=MAX_DATASET_SIZE)
    order = Order(
        cast(Shuffle, shuffle),
        seed,
        size,
        _count(settings, "epoch_length", where, minimum=1, maximum=size),
        _count(settings, "permutation_size", where, minimum=1, maximum=size),
        _count(settings, "shard_width", where),
        _count(settings, "shard_turn", where),
    )
    _check_order(order, where)
    schedule = _parse_schedule(settings.get("global_batch_size"), where)
    if tail == "drop" and schedule.sizes[-1] > order.epoch_length:
        raise TrainerStateError(
            f"{where}: field 'global_batch_size' {schedule} is larger than an epoch of {order.epoch_length} samples"
        )
    fingerprint = settings.get("fingerprint")
    if fingerprint is not None:
        fingerprint = dict(_mapping(fingerprint, f"{where}: field 'fingerprint'"))
    return Settings(order, schedule, cast(EpochTail, tail), fingerprint)


def _check_order(order: Order, where: str) -> None:
    # Any other combination would index past a permutation, later and far from here.
    sound = {
        "megatron": order.epoch_length <= order.permutation_size and order.shard_width == 0,
        "megatron-sharded": order.permutation_size * order.shard_width == order.epoch_length
        and order.shard_turn > 0
        and order.permutation_size % order.shard_turn == 0,
    }.get(order.shuffle, order.epoch_length == order.permutation_size == order.dataset_size)
    if not sound:
        raise TrainerStateError(
            f"{where}: fields 'epoch_length' {order.epoch_length}, 'permutation_size' {order.permutation_size}, "
            f"'shard_width' {order.shard_width}, 'shard_turn' {order.shard_turn} do not fit shuffle {order.shuffle!r}"
        )


def _parse_schedule(value: Any, where: str) -> BatchSizeSchedule:
    if not isinstance(value, list):
        raise TrainerStateError(f"{where}: field 'global_batch_size' must be a list of [samples, size], got {value!r}")
    try:
        return BatchSizeSchedule(tuple(value))
    except (TypeError, ValueError) as error:
        raise TrainerStateError(f"{where}: field 'global_batch_size': {error}") from error


def _check_offset(anchors: Sequence[Anchor], position: Position) -> None:
    length = order_at(anchors, position.epoch).epoch_length
    if position.offset > length:
        raise TrainerStateError(
            f"sampler state: field 'offset' {position.offset} lies past the {length} samples of epoch {position.epoch}"
        )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TrainerStateError(f"{where} must be a mapping, got {type(value).__name__}")
    return value


def _one_of(fields: Mapping[str, Any], name: str, known: Sequence[str], where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or value not in known:
        raise TrainerStateError(f"{where}: field {name!r} must be one of {', '.join(known)}, got {value!r}")
    return value


def _count(fields: Mapping[str, Any], name: str, where: str, *, minimum: int = 0, maximum: int = _MAX_COUNT) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise TrainerStateError(
            f"{where}: field {name!r} must be an integer from {minimum} to {maximum}, got {value!r}"
        )
    return value
