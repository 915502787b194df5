"""A `trainer_state.json` as a document: bytes to plain values and back, whoever wrote it and whatever its fields mean.

A float that JSON has no number for is written as `{"__float__": "nan"}`, `"inf"` or `"-inf"`, anywhere in the file,
and comes back as that float; `__float__` can therefore not be a key of the user's. Bare `NaN` and `Infinity`, as
other programs write them, are read (and said aloud), never written.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Mapping
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, NoReturn

from megaresume.errors import TrainerStateError
from megaresume.topology import JSON

logger = logging.getLogger("megaresume.state.document")

MAX_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_DIGITS = 4300  # Python's own limit for turning text into an integer
_FLOAT_KEY = "__float__"
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


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


def wrong_field(source: str, where: str, expected: str, found: object) -> TrainerStateError:
    kinds = {bool: "a boolean", int: "a whole number", float: "a float", str: "text", list: "a list", dict: "an object"}
    shown = "null" if found is None else json.dumps(found) if type(found) in (bool, int, float, str) else ""
    shown = f"{shown[:40]}..." if len(shown) > 40 else shown
    kind = "" if found is None else kinds.get(type(found), type(found).__qualname__)
    described = f"{shown} ({kind})" if shown and kind else shown or kind
    return TrainerStateError(f"{source}: {where or 'the whole file'}: expected {expected}, found {described}")


def plain_document(values: Mapping[str, Any], *, source: str) -> dict[str, JSON]:
    """`values` as nothing but dict, list, str, int, float, bool and None, each exactly what it was.

    Raises TrainerStateError naming the key path of what JSON cannot hold (a set, a dataclass, bytes, ...).
    """
    document = _plain(values, "", source)
    assert type(document) is dict
    return document


def dump_document(document: Mapping[str, JSON], *, source: str) -> bytes:
    """The bytes of what `plain_document` gave: strict JSON, UTF-8, LF. Raises TrainerStateError for too many."""
    text = json.dumps(_mark_floats(dict(document)), ensure_ascii=False, allow_nan=False, indent=1)
    data = f"{text}\n".encode()
    if len(data) > MAX_BYTES:
        raise TrainerStateError(f"{source}: {len(data)} bytes, expected at most {MAX_BYTES}; keep `extra` small")
    return data


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
