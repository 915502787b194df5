"""The state of a stream on one rank, as JSON values, and the check of a saved one against this run.

Reads states as hostile, but for the dataset's own, which only the dataset can judge. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from megaresume.data.settings import STATE_VERSION, check_allowed
from megaresume.errors import DataMismatchError, FormatError, TrainerStateError, UnsupportedError

_MAX_COUNT = 2**62


@dataclass(frozen=True)
class Layout:
    """How a stream is cut: states are those of a rank and a worker, and fit no other number of them."""

    micro_batch_size: int
    global_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int
    num_workers: int


@dataclass(frozen=True)
class StreamPosition:
    """Where a rank stands: `batches` micro-batches of pass `epoch` are trained, the last one from worker `last_worker`.

    `workers` maps a worker's number (as text) to its state after its last trained batch.
    """

    consumed: int = 0
    epoch: int = 0
    batches: int = 0
    last_worker: int = -1
    workers: dict[str, Any] = field(default_factory=dict)


def stream_state_to_json(position: StreamPosition, layout: Layout) -> dict[str, Any]:
    """A position as JSON values. Raises UnsupportedError where the dataset's own state would not survive JSON."""
    try:
        same = json.loads(json.dumps(position.workers, allow_nan=False)) == position.workers
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"the state_dict() of the stream's dataset is not of JSON values: {error}") from error
    if not same:
        raise UnsupportedError(
            "the state_dict() of the stream's dataset changes when written as JSON (a tuple, a key that is not text): "
            "let it return lists and text keys"
        )
    return {
        "version": STATE_VERSION,
        "kind": "stream",
        "consumed_samples": position.consumed,
        "epoch": position.epoch,
        "batches": position.batches,
        "last_worker": position.last_worker,
        "workers": json.loads(json.dumps(position.workers)),
        **asdict(layout),
    }


def check_stream_state(
    state: Any, layout: Layout, allowed: Set[str], *, stateful: bool, restarted: bool
) -> tuple[StreamPosition, tuple[str, ...]]:
    """(position of a saved state, a sentence for each allowed change).

    `restarted` says that the stream begins again whatever was saved, so that its cut may change. Raises
    DataMismatchError naming a setting and both values, TrainerStateError or FormatError for a state that is not one.
    """
    check_allowed(allowed)
    if not isinstance(state, Mapping) or state.get("kind") != "stream":
        raise TrainerStateError("stream state: must be a mapping with kind 'stream', as a stream's state_dict() is")
    version = _count(state, "version", minimum=1)
    if version > STATE_VERSION:
        raise FormatError(
            f"stream state of version {version}; this release reads up to {STATE_VERSION}: update megaresume"
        )
    workers = state.get("workers")
    if not isinstance(workers, Mapping) or not all(isinstance(entry, Mapping) for entry in workers.values()):
        raise TrainerStateError("stream state: field 'workers' must map worker numbers to their states")
    position = StreamPosition(
        _count(state, "consumed_samples"),
        _count(state, "epoch"),
        _count(state, "batches"),
        _count(state, "last_worker", minimum=-1),
        dict(workers),
    )
    saved = {name: _count(state, name) for name in asdict(layout)}
    differing = {name: (saved[name], now) for name, now in asdict(layout).items() if saved[name] != now}
    if restarted:
        differing = {name: values for name, values in differing.items() if name == "global_batch_size"}
    refused = {name: values for name, values in differing.items() if name not in allowed & {"global_batch_size"}}
    if refused:
        lines = "; ".join(f"{name}: checkpoint {old}, this run {new}" for name, (old, new) in refused.items())
        raise DataMismatchError(
            f"a stream goes on only as it was cut: {lines}. Use the checkpoint's values (global_batch_size may change "
            "with allow_data_change={'global_batch_size'}; each rank loads the state it saved)"
        )
    if stateful and position.batches and not workers:
        raise TrainerStateError(
            "stream state: field 'workers' is empty after trained batches: it was saved by a stream without a state"
        )
    return position, tuple(f"{name} changed from {old} to {new}" for name, (old, new) in differing.items())


def _count(fields: Mapping[str, Any], name: str, *, minimum: int = 0) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_COUNT:
        raise TrainerStateError(
            f"stream state: field {name!r} must be an integer from {minimum} to {_MAX_COUNT}, got {value!r}"
        )
    return value
