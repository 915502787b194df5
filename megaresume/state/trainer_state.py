"""`trainer_state.json`: where a run stands, as one small typed value, and its bytes.

Strict both ways: every field is there and of its type, text is UTF-8, nothing that JSON cannot hold is ever written.
Knows no torch, no directory layout and no other shape of the file (`foreign_trainer_state.py` reads those). Sections
that belong to someone else (`data`, `scheduler`, `loss_scaler`, ...) are carried as JSON; their owners check them.

A float that JSON has no number for is written as `{"__float__": "nan"}`, `"inf"` or `"-inf"`, anywhere in the file,
and comes back as that float; `__float__` can therefore not be a key of the user's. Bare `NaN` and `Infinity`, as
other programs write them, are read (and said aloud), never written.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, NoReturn

from megaresume.errors import FormatError, TrainerStateError
from megaresume.topology import JSON, Topology

logger = logging.getLogger("megaresume.state.trainer_state")

SCHEMA_VERSION = 1
MAX_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_COUNT = (1 << 63) - 1
MAX_DIGITS = 4300  # Python's own limit for turning text into an integer
_FLOAT_KEY = "__float__"
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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
    document = _plain({**values, **state.unknown}, "", source)
    from_document(document, source=source)
    text = json.dumps(_mark_floats(document), ensure_ascii=False, allow_nan=False, indent=1)
    data = f"{text}\n".encode()
    if len(data) > MAX_BYTES:
        raise TrainerStateError(f"{source}: {len(data)} bytes, expected at most {MAX_BYTES}; keep `extra` small")
    return data


def loads(data: bytes, *, source: str) -> TrainerState:
    """Read what `dumps` wrote. `source` names the file in errors. Raises TrainerStateError for anything else."""
    return from_document(parse_document(data, source=source), source=source)


def read(path: str | PathLike[str]) -> TrainerState:
    """Read a `trainer_state.json`. Raises TrainerStateError, also where there is no such file."""
    return loads(read_bytes(path), source=str(path))


def read_bytes(path: str | PathLike[str], *, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file of at most `max_bytes`; TrainerStateError otherwise."""
    path = Path(path)
    try:
        if not path.exists():
            raise TrainerStateError(
                f"{path}: there is no such file, so {path.parent} is not a checkpoint to resume from; "
                "if it holds weights, load those alone (weights_only=True)"
            )
        if not path.is_file():  # a pipe would block for ever
            raise TrainerStateError(f"{path}: expected a regular file, found a directory or a device")
        with path.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except OSError as error:
        raise TrainerStateError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise TrainerStateError(f"{path}: expected at most {max_bytes} bytes, found more")
    return data


# ---- one field at a time: (value, its path in the file, the file) -> the value, or an error


def wrong_field(source: str, where: str, expected: str, found: object) -> TrainerStateError:
    kinds = {bool: "a boolean", int: "a whole number", float: "a float", str: "text", list: "a list", dict: "an object"}
    shown = "null" if found is None else json.dumps(found) if type(found) in (bool, int, float, str) else ""
    shown = f"{shown[:40]}..." if len(shown) > 40 else shown
    kind = "" if found is None else kinds.get(type(found), type(found).__qualname__)
    described = f"{shown} ({kind})" if shown and kind else shown or kind
    return TrainerStateError(f"{source}: {where or 'the whole file'}: expected {expected}, found {described}")


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


# ---- bytes <-> a document of plain values


def parse_document(data: bytes, *, source: str, max_bytes: int = MAX_BYTES) -> dict[str, JSON]:
    """The top-level object of a JSON file, floats decoded. Raises TrainerStateError with the line or byte offset.

    Refused: another encoding than UTF-8 (a byte order mark is accepted), more than `max_bytes`, nesting deeper than
    MAX_DEPTH, a key given twice, a number too large to hold, anything but an object.
    """
    if len(data) > max_bytes:
        raise TrainerStateError(f"{source}: expected at most {max_bytes} bytes, found {len(data)}")
    if not data.strip():
        raise TrainerStateError(f"{source}: expected a JSON object, found an empty file")
    text = _decode_utf8(data, source)
    bare: list[str] = []

    def constant(name: str) -> float:
        bare.append(name)
        return float(name)

    def integer(digits: str) -> int:
        if len(digits.lstrip("-")) > MAX_DIGITS:
            raise TrainerStateError(f"{source}: expected integers of at most {MAX_DIGITS} digits, found {len(digits)}")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise TrainerStateError(f"{source}: expected numbers that fit a float, found {digits[:40]}")
        return value

    def pairs(items: list[tuple[str, JSON]]) -> dict[str, JSON]:
        unique = dict(items)
        if len(unique) != len(items):
            twice = next(name for name, times in Counter(name for name, _ in items).items() if times > 1)
            raise TrainerStateError(f"{source}: {twice[:80]!a}: expected once in its object, found more than once")
        return unique

    try:
        document = json.loads(
            text, parse_constant=constant, parse_int=integer, parse_float=real, object_pairs_hook=pairs
        )
    except json.JSONDecodeError as error:
        raise TrainerStateError(
            f"{source}: line {error.lineno}, column {error.colno}: expected JSON, found something else ({error.msg}); "
            "the file is cut short or altered"
        ) from None
    except RecursionError:
        raise TrainerStateError(f"{source}: expected at most {MAX_DEPTH} levels of nesting, found more") from None
    if bare:
        logger.warning("%s holds bare %s, which is not JSON; read all the same", source, ", ".join(sorted(set(bare))))
    if type(document) is not dict:
        raise wrong_field(source, "", "an object", document)
    unmarked = _unmark_floats(document, "", source)
    assert type(unmarked) is dict
    return unmarked


def _decode_utf8(data: bytes, source: str) -> str:
    # UTF-16 and UTF-32 without a mark may pass for UTF-8, but are full of NULs, which JSON text never holds.
    offset, text = data.find(b"\0"), ""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = min(offset, error.start) if offset >= 0 else error.start
    if offset >= 0:
        raise TrainerStateError(
            f"{source}: byte {offset}: expected UTF-8 text, found the byte 0x{data[offset]:02x}; "
            "the file is damaged or in another encoding: convert it to UTF-8"
        )
    return text.removeprefix("\ufeff")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _child(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _too_deep(where: str, source: str) -> NoReturn:
    shown = where if len(where) <= 80 else f"{where[:80]}..."
    raise TrainerStateError(f"{source}: {shown}: expected at most {MAX_DEPTH} levels of nesting, found more")


def _plain(value: Any, where: str, source: str, depth: int = 0) -> Any:
    """`value` as nothing but dict, list, str, int, float, bool and None, each exactly what it was."""
    if depth > MAX_DEPTH:
        _too_deep(where, source)
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is int:
        if abs(value) >= 10**MAX_DIGITS:
            raise TrainerStateError(
                f"{source}: {where}: expected an integer of at most {MAX_DIGITS} digits, found more"
            )
        return value
    if isinstance(value, PurePath):
        value = str(value)
    if type(value) is str:
        if not _encodable(value):
            raise TrainerStateError(
                f"{source}: {where}: expected Unicode text, found {value!a}, which UTF-8 cannot hold"
            )
        return value
    if isinstance(value, Mapping):
        plain = {}
        for key, part in value.items():
            if type(key) is not str or not _encodable(key) or key == _FLOAT_KEY:
                expected = f"keys that are Unicode text other than {_FLOAT_KEY}"
                raise TrainerStateError(f"{source}: {where}: expected {expected}, found the key {key!a}")
            plain[key] = _plain(part, _child(where, key), source, depth + 1)
        return plain
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):  # a named tuple would lose its names
        return [_plain(part, f"{where}[{index}]", source, depth + 1) for index, part in enumerate(value)]
    held = _held(value)
    if held is None:
        raise wrong_field(source, where, "null, true or false, a number, text, a path, a list or an object", value)
    return held


def _held(value: Any) -> bool | int | float | None:
    """What a numpy scalar or a 0-dimensional array or tensor holds; None where that is not a number JSON can hold."""
    if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
        return None
    if getattr(getattr(value, "dtype", None), "kind", "f") not in "biuf":  # numpy's dates turn into integers
        return None
    try:
        held = value.item()
    except (RuntimeError, TypeError, ValueError):  # a tensor without storage, for one
        return None
    return held if type(held) in (bool, int, float) else None


def _mark_floats(value: JSON) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT_KEY: "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, dict):
        return {key: _mark_floats(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_mark_floats(part) for part in value]
    return value


def _unmark_floats(value: JSON, where: str, source: str, depth: int = 0) -> JSON:
    """Undo `_mark_floats`, and hold the file to the limits that `_plain` holds a writer to."""
    if depth > MAX_DEPTH:
        _too_deep(where, source)
    if isinstance(value, dict):
        if _FLOAT_KEY in value:
            name = value[_FLOAT_KEY]
            if len(value) != 1 or not isinstance(name, str) or name not in _FLOATS:
                raise wrong_field(source, where, f"{_FLOAT_KEY} alone, with one of {', '.join(_FLOATS)}", name)
            return _FLOATS[name]
        if not all(map(_encodable, value)):
            raise TrainerStateError(f"{source}: {where}: expected Unicode text as keys, found half a surrogate pair")
        return {key: _unmark_floats(part, _child(where, key), source, depth + 1) for key, part in value.items()}
    if isinstance(value, list):
        return [_unmark_floats(part, f"{where}[{index}]", source, depth + 1) for index, part in enumerate(value)]
    if isinstance(value, str) and not _encodable(value):
        raise TrainerStateError(f"{source}: {where}: expected Unicode text, found half a surrogate pair")
    return value
