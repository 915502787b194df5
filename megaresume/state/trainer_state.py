"""`trainer_state.json`: where a run stands, as one small typed value, and its bytes.

Strict both ways: every field is there and of its type, text is UTF-8, nothing that JSON cannot hold is ever written.
Knows no torch, no directory layout and no other shape of the file (`foreign_trainer_state.py` reads those). Sections
that belong to someone else (`data`, `scheduler`, `loss_scaler`, ...) are carried as JSON; their owners check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any

from megaresume.errors import FormatError, TrainerStateError
from megaresume.state.document import dump_document, parse_document, plain_document, read_bytes, wrong_field
from megaresume.topology import JSON, Topology

SCHEMA_VERSION = 1
MAX_COUNT = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where the run stands after `global_step` iterations. None always means: not recorded, or not in use.

    schema_version: version of this file's shape.
    global_step: iterations done, skipped ones included (an optimizer's own `step` may be smaller).
    consumed_train_samples, consumed_valid_samples, skipped_train_samples: samples over all data-parallel ranks.
    epoch: full passes over the training data that are behind the run.
    micro_batch_size, global_batch_size, gradient_accumulation_steps: in force at this step; a run that resumes with
        another split of the same global batch computes its own accumulation.
    batch_size_schedule: the ramp-up, as its owner in `megaresume/data/` writes it.
    seed: the run's seed (`--seed`); the seed of a data order stands in `data`.
    data: sampler state per named source: anchors, seed, shuffle, dataset size and fingerprint.
    topology: the parallel layout that wrote the checkpoint.
    scheduler, loss_scaler: as captured from the live objects.
    tokens: trained so far. flops: floating point operations so far. best_metric: as told by the user.
    versions: of the libraries that wrote the checkpoint, by name.
    lineage: one entry per attempt of this run, oldest first.
    finished: the run had reached its target.
    healthy: loss and gradient norm of this step were finite, or the user's word.
    extra: the user's own JSON. numpy scalars, 0-dimensional arrays and tensors, and paths are written as what they hold
        (bool, int, float, text), tuples as lists.
    unknown: fields this release does not know, kept as they were read.
    """

    schema_version: int = SCHEMA_VERSION
    global_step: int
    consumed_train_samples: int
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    epoch: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    batch_size_schedule: JSON = None
    seed: int | None = None
    data: Mapping[str, Mapping[str, JSON]] = field(default_factory=dict)
    topology: Topology | None = None
    scheduler: JSON = None
    loss_scaler: JSON = None
    tokens: int | None = None
    flops: int | float | None = None
    best_metric: int | float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    lineage: tuple[Mapping[str, JSON], ...] = ()
    finished: bool = False
    healthy: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, JSON] = field(default_factory=dict)


def dumps(state: TrainerState) -> bytes:
    """The file's bytes: strict JSON, UTF-8, LF. Call it before anything is written: it refuses what it could not read.

    Raises TrainerStateError naming the field or the key path of what JSON cannot hold (a set, a dataclass, bytes, ...).
    """
    source = "trainer_state.json to be written"
    values = {each.name: getattr(state, each.name) for each in fields(state) if each.name != "unknown"}
    if state.topology is not None:
        values["topology"] = state.topology.to_json()
    if clash := sorted(values.keys() & state.unknown.keys()):
        raise TrainerStateError(f"{source}: {clash[0]}: is a field of its own and cannot stand in `unknown`")
    document = plain_document({**values, **state.unknown}, source=source)
    from_document(document, source=source)
    return dump_document(document, source=source)


def loads(data: bytes, *, source: str) -> TrainerState:
    """Read what `dumps` wrote. `source` names the file in errors. Raises TrainerStateError for anything else."""
    return from_document(parse_document(data, source=source), source=source)


def read(path: str | PathLike[str]) -> TrainerState:
    """Read a `trainer_state.json`. Raises TrainerStateError, also where there is no such file."""
    return loads(read_bytes(path), source=str(path))


# ---- one field at a time: (value, its path in the file, the file) -> the value, or an error


Check = Callable[[JSON, str, str], Any]


def whole_number(low: int, high: int = MAX_COUNT) -> Check:
    def check(value: JSON, where: str, source: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise wrong_field(source, where, f"a whole number of at least {low}", value)
        return value

    return check


def number(value: JSON, where: str, source: str) -> int | float:
    if type(value) is not int and type(value) is not float:
        raise wrong_field(source, where, "a number", value)
    return value


def amount(value: JSON, where: str, source: str) -> int | float:
    size = number(value, where, source)
    if not 0 <= size < math.inf:
        raise wrong_field(source, where, "a finite number of at least 0", value)
    return size


def _flag(value: JSON, where: str, source: str) -> bool:
    if type(value) is not bool:
        raise wrong_field(source, where, "true or false", value)
    return value


def _text(value: JSON, where: str, source: str) -> str:
    if type(value) is not str:
        raise wrong_field(source, where, "text", value)
    return value


def _anything(value: JSON, where: str, source: str) -> JSON:
    return value


def _or_null(check: Check) -> Check:
    return lambda value, where, source: None if value is None else check(value, where, source)


def _object_of(check: Check) -> Check:
    def check_object(value: JSON, where: str, source: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_field(source, where, "an object", value)
        return {name: check(part, f"{where}.{name}", source) for name, part in value.items()}

    return check_object


_object = _object_of(_anything)


def _objects(value: JSON, where: str, source: str) -> tuple[Any, ...]:
    if type(value) is not list:
        raise wrong_field(source, where, "a list of objects", value)
    return tuple(_object(part, f"{where}[{index}]", source) for index, part in enumerate(value))


def _topology(value: JSON, where: str, source: str) -> Topology:
    try:
        return Topology.from_json(value, source=source)
    except FormatError as error:
        raise TrainerStateError(str(error)) from None


def _schema_version(value: JSON, where: str, source: str) -> int:
    version: int = whole_number(1)(value, where, source)
    if version > SCHEMA_VERSION:
        raise TrainerStateError(
            f"{source}: {where}: written in version {version}, this release reads up to version {SCHEMA_VERSION}; "
            "read it with the release that wrote it, or a newer one"
        )
    return version


_CHECKS: Mapping[str, Check] = {
    "schema_version": _schema_version,
    "global_step": whole_number(0),
    "consumed_train_samples": whole_number(0),
    "consumed_valid_samples": whole_number(0),
    "skipped_train_samples": whole_number(0),
    "epoch": _or_null(whole_number(0)),
    "micro_batch_size": _or_null(whole_number(1)),
    "global_batch_size": _or_null(whole_number(1)),
    "gradient_accumulation_steps": _or_null(whole_number(1)),
    "batch_size_schedule": _anything,
    "seed": _or_null(whole_number(-(1 << 63), (1 << 64) - 1)),  # what torch.manual_seed takes
    "data": _object_of(_object),
    "topology": _or_null(_topology),
    "scheduler": _anything,
    "loss_scaler": _anything,
    "tokens": _or_null(whole_number(0)),
    "flops": _or_null(amount),
    "best_metric": _or_null(number),
    "versions": _object_of(_text),
    "lineage": _objects,
    "finished": _flag,
    "healthy": _or_null(_flag),
    "extra": _object,
}


def from_document(document: Mapping[str, JSON], *, source: str) -> TrainerState:
    """A parsed file's fields, each checked; TrainerStateError names the first wrong field, or all that are missing."""
    if "schema_version" in document:  # first, for a newer version may well lack or retype the other fields
        _schema_version(document["schema_version"], "schema_version", source)
    if missing := [name for name in _CHECKS if name not in document]:
        raise TrainerStateError(
            f"{source}: {missing[0]}: is missing (of the fields expected, {', '.join(missing)} are)"
        )
    known = {name: check(document[name], name, source) for name, check in _CHECKS.items()}
    return TrainerState(**known, unknown={name: value for name, value in document.items() if name not in known})
