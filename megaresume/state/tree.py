"""Small Python state (option dictionaries, scheduler state, registered objects) as JSON that comes back as it was.

JSON knows no tuples, no integer keys, no NaN and no tensors; a resumed `betas` that became a list, or a milestone table
whose keys became strings, changes a run. A value that JSON cannot hold becomes `{"~": kind, "v": ...}`; tensors are put
aside under their path and only named here. Nothing is ever evaluated on the way back. Knows nothing of what the state
is for.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from megaresume.errors import FormatError, UnsupportedError

MAX_DEPTH = 32

_TAG = "~"
_FLOATS = ("nan", "inf", "-inf")
_SEQUENCES: dict[type, str] = {tuple: "tuple", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
_SCALARS: dict[type, str] = {
    kind: f"numpy.{kind.__name__}" for kind in (*_INTEGERS, np.float16, np.float32, np.float64)
} | {np.bool_: "numpy.bool"}
_MAKE: dict[str, Callable[[Any], Any]] = {kind: make for make, kind in (_SEQUENCES | _MAPPINGS | _SCALARS).items()}


def to_json(value: Any, path: str, tensors: MutableMapping[str, torch.Tensor], _depth: int = 0) -> Any:
    """Encode `value`; tensors inside it are added to `tensors` under `path/...` and referred to by that name.

    Raises UnsupportedError naming the path and type of anything that is neither data nor a tensor, or that lies deeper
    than `MAX_DEPTH` containers.
    """
    kind = type(value)
    if _depth > MAX_DEPTH:
        raise UnsupportedError(f"{path} lies deeper than {MAX_DEPTH} containers: flatten it, or break its cycle")
    if value is None or kind in (bool, str, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
    if isinstance(value, torch.Tensor):
        name = _free(path, tensors)
        tensors[name] = value
        return {_TAG: "tensor", "v": name}
    if kind is list or kind in _SEQUENCES:
        items = [to_json(item, f"{path}/{i}", tensors, _depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {_TAG: _SEQUENCES[kind], "v": items}
    if kind is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: to_json(item, f"{path}/{key}", tensors, _depth + 1) for key, item in value.items()}
    if kind in _MAPPINGS:
        pairs = [
            [_key(key, path, _depth + 1), to_json(item, f"{path}/{key}", tensors, _depth + 1)]
            for key, item in value.items()
        ]
        return {_TAG: _MAPPINGS[kind], "v": pairs}
    if kind in _SCALARS:
        return {_TAG: _SCALARS[kind], "v": to_json(value.item(), path, tensors)}
    raise UnsupportedError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: only numbers, strings, None, lists, tuples, dicts and "
        "tensors can be stored. Keep it out of the state, or turn it into such values."
    )


def _free(path: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """`path`, or a name made of it: keys that hold a slash can make two paths alike."""
    while path in tensors:
        path += "~"
    return path


def _key(key: Any, path: str, depth: int) -> Any:
    inside: dict[str, torch.Tensor] = {}
    encoded = to_json(key, f"{path}/key", inside, depth)
    if inside:
        raise UnsupportedError(f"{path} has a tensor as a key, which is known by its identity alone: use a name")
    return encoded


def from_json(node: Any, tensors: Mapping[str, Any], _depth: int = 0) -> Any:
    """Decode what `to_json` wrote, taking each tensor (or what stands for it) from `tensors` by name.

    Raises FormatError for a tag, a nesting or a tensor name it does not know; the bytes may come from anywhere.
    """
    if _depth > MAX_DEPTH:
        raise FormatError(f"stored state is nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, list):
        return [from_json(item, tensors, _depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if _TAG not in node:
        return {key: from_json(item, tensors, _depth + 1) for key, item in node.items()}
    kind, stored = node[_TAG], node.get("v")
    if not isinstance(kind, str):
        raise FormatError(f"stored state has a tag that is no string: {str(kind)[:80]}")
    if kind == "float" and stored in _FLOATS:
        return float(stored)
    if kind == "tensor" and isinstance(stored, str):
        if stored not in tensors:
            raise FormatError(f"stored state refers to tensor {stored!r}, which the file does not hold")
        return tensors[stored]
    if kind in _SEQUENCES.values() and isinstance(stored, list):
        return _make(kind, [from_json(item, tensors, _depth + 1) for item in stored])
    if kind in _MAPPINGS.values() and isinstance(stored, list):
        return _make(kind, dict(_pairs(kind, stored, tensors, _depth + 1)))
    if kind in _SCALARS.values():
        scalar = from_json(stored, {}, _depth + 1)
        if type(scalar) in (bool, int, float):
            return _make(kind, scalar)
    raise FormatError(f"stored state has an unknown tag {kind[:80]!r}, or one with a value that does not fit it")


def _pairs(kind: str, stored: list[Any], tensors: Mapping[str, Any], depth: int) -> Iterator[tuple[Any, Any]]:
    for pair in stored:
        if not isinstance(pair, list) or len(pair) != 2:
            raise FormatError(f"stored state has a {kind} with something in it that is no pair of key and value")
        key = from_json(pair[0], {}, depth)  # a key holds no tensor, so it is given none to find
        try:
            hash(key)
        except TypeError:
            raise FormatError(f"stored state has a {kind} with a {type(key).__name__} as a key") from None
        yield key, from_json(pair[1], tensors, depth)


def _make(kind: str, parts: Any) -> Any:
    try:
        return _MAKE[kind](parts)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"stored state has a {kind} that cannot be made: {error}") from None


def kind_of(value: Any) -> str:
    """ "number" for any of them (a flag is none), else the name of the type: what may stand in for what."""
    numbers = (int, float, np.integer, np.floating)
    return "number" if isinstance(value, numbers) and not isinstance(value, bool) else type(value).__name__


def tensor_names(node: Any) -> Iterator[str]:
    """The names of the tensors that an encoded value refers to, in its order."""
    if isinstance(node, list):
        for item in node:
            yield from tensor_names(item)
    elif isinstance(node, dict):
        if node.get(_TAG) == "tensor":
            yield str(node.get("v"))
        else:
            for item in node.values():
                yield from tensor_names(item)
