"""Strict JSON in both directions: what is written is read back as it was, and what is read holds nothing else.

Knows nothing of what the values mean.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

from megaresume.errors import CheckpointDamagedError, ConfigurationError
from megaresume.store import fs

JSON: TypeAlias = Any  # what `json` reads and writes; a recursive alias would only move the casts to every caller

MAX_JSON_DEPTH = 100  # objects and lists within one another: well below where recursion ends, in every reader
_MAX_DIGITS = 4_300  # of an integer: the interpreter's own limit since 3.10.7, unless somebody lifts it
_interpreters_digits = getattr(sys, "get_int_max_str_digits", lambda: 0)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def dump_json(value: JSON) -> bytes:
    """`value` as UTF-8 JSON, two spaces deep, with a final newline. Raises as `compact_json` does."""
    _check_writable(value)
    return (json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2) + "\n").encode("utf-8")


def compact_json(value: JSON, *, sort_keys: bool = False) -> str:
    """`value` as JSON on one line, without spaces; with `sort_keys`, one text for one value, fit for a digest.

    Raises `ConfigurationError` naming the place for what strict JSON does not hold: NaN and infinities, keys that are
    no strings, objects of other types (NumPy integers, tensors), half surrogate pairs, over `MAX_JSON_DEPTH` levels.
    """
    _check_writable(value)
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)


def write_json_durably(path: Path, value: JSON) -> None:
    """Put `value` at `path`, old or new but never torn. Raises as `dump_json` does, nothing written, and `OSError`."""
    fs.replace_file_durably(path, dump_json(value))


def read_json_strict(path: Path, max_bytes: int) -> JSON:
    """The JSON value in a file. Raises `CheckpointDamagedError` as `fs.read_bytes` and `parse_json` do."""
    return parse_json(fs.read_bytes(path, max_bytes=max_bytes), source=str(path))


def parse_json(data: bytes, *, source: str) -> JSON:
    """The JSON value in `data`; `source` names it in errors.

    Stricter than `json.loads`: UTF-8 only, no byte order mark, no NaN or number beyond a float's range, no key twice in
    an object, no half surrogate pair, at most `MAX_JSON_DEPTH` levels. Raises `CheckpointDamagedError` for these and
    for what is no JSON at all.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=None if 0 < _interpreters_digits() <= _MAX_DIGITS else _bounded_int,  # its own check is faster
        )
        _check_depth(value)
        if _SURROGATE_ESCAPE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (RecursionError, ValueError) as error:
        message = f"{source}: expected strict JSON, found {len(data)} bytes that are not: {error}."
        raise CheckpointDamagedError(message) from error
    return value


def _object_without_duplicates(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice[:80]!r} stands twice in one object")
    return result


def _refuse_constant(text: str) -> JSON:
    raise ValueError(f"{text} is no JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:40]} is beyond a float's range")
    return number


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _check_depth(value: JSON) -> None:
    level: list[JSON] = [[value]]
    depth = 0
    while level := [
        child
        for item in level
        for child in (item.values() if type(item) is dict else item)
        if type(child) is dict or type(child) is list
    ]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"more than {MAX_JSON_DEPTH} levels deep")


class Misplaced(Exception):
    """Why a value is not of its form; the containers around it add where it stands, from the inside out. Thousands of
    values are looked at for one that is wrong, so that nothing is put into words before."""

    def __init__(self, reason: str) -> None:
        self.reason, self.where = reason, ""

    def within(self, place: str) -> Misplaced:
        self.where = place + self.where
        return self


def _check_writable(value: JSON) -> None:
    try:
        _walk(value, 0)
    except Misplaced as error:
        raise ConfigurationError(f"value{error.where}: {error.reason}") from None


def _walk(value: JSON, depth: int) -> None:
    if isinstance(value, str):
        _check_text(value)
    elif value is None or isinstance(value, int):
        pass
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise Misplaced(f"JSON has no {value}; leave it out, or write it as a string.")
    elif not isinstance(value, (dict, list, tuple)):
        found = f"{type(value).__module__}.{type(value).__qualname__}"
        raise Misplaced(f"JSON holds no {found}; convert it to a plain number, string or list.")
    elif depth == MAX_JSON_DEPTH:
        raise Misplaced(f"more than {MAX_JSON_DEPTH} levels deep, which our readers refuse.")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise Misplaced(f"keys of a JSON object are strings, found {key!r} of type {type(key).__name__}.")
            _check_text(key)
            try:
                _walk(item, depth + 1)
            except Misplaced as error:
                raise error.within(f".{key}") from None
    else:
        for position, item in enumerate(value):
            try:
                _walk(item, depth + 1)
            except Misplaced as error:
                raise error.within(f"[{position}]") from None


def _check_text(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Misplaced(f"{text!r} holds half a surrogate pair, which is no text.") from None
