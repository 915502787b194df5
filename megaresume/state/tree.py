"""Small Python state (option dictionaries, scheduler state, registered objects) as JSON that comes back with the same types.

JSON knows no tuples, no integer keys, no NaN and no tensors; a resumed `betas` that became a list, or a milestone table whose keys
became strings, changes a run. A value JSON cannot hold becomes `{"~": kind, "v": ...}`; tensors are put aside under their path and
only named here. Nothing is ever evaluated on the way back. Knows nothing of what the state is for.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from megaresume.errors import FormatError, UnsupportedError

_TAG = "~"
_MAX_DEPTH = 32


def to_json(value: Any, path: str, tensors: MutableMapping[str, torch.Tensor]) -> Any:
    """Encode `value`; tensors inside it are added to `tensors` under `path/...` and referred to by that name.

    Raises UnsupportedError naming the path and type of anything that is neither data nor a tensor.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return to_json(value.item(), path, tensors)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "v": repr(float(value))}
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {_TAG: "tensor", "v": path}
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{path}/{i}", tensors) for i, item in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple", "v": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: to_json(item, f"{path}/{key}", tensors) for key, item in value.items()}
        pairs = [
            [to_json(key, f"{path}/key", tensors), to_json(item, f"{path}/{key}", tensors)]
            for key, item in value.items()
        ]
        return {_TAG: "dict", "v": pairs}
    raise UnsupportedError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}: only numbers, strings, None, lists, tuples, "
        "dicts and tensors can be stored. Keep it out of the state, or turn it into such values."
    )


def from_json(node: Any, tensors: Mapping[str, torch.Tensor], _depth: int = 0) -> Any:
    """Decode what `to_json` wrote, taking tensors from `tensors` by name.

    Raises FormatError for a tag, a nesting or a tensor name it does not know; the bytes may come from anywhere.
    """
    if _depth > _MAX_DEPTH:
        raise FormatError(f"stored state is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(node, list):
        return [from_json(item, tensors, _depth + 1) for item in node]
    if not isinstance(node, dict):
        return node
    if _TAG not in node:
        return {key: from_json(item, tensors, _depth + 1) for key, item in node.items()}
    kind, stored = node[_TAG], node.get("v")
    if kind == "float" and stored in ("nan", "inf", "-inf"):
        return float(stored)
    if kind == "tuple" and isinstance(stored, list):
        return tuple(from_json(item, tensors, _depth + 1) for item in stored)
    if (
        kind == "dict"
        and isinstance(stored, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in stored)
    ):
        return OrderedDict(
            (from_json(key, tensors, _depth + 1), from_json(item, tensors, _depth + 1)) for key, item in stored
        )
    if kind == "tensor" and isinstance(stored, str):
        if stored not in tensors:
            raise FormatError(f"stored state refers to tensor {stored!r}, which the file does not hold")
        return tensors[stored]
    raise FormatError(f"stored state has an unknown tag {kind!r}")
