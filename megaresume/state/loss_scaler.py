"""The loss scaler of an fp16 run: a handful of numbers, kept in the index with the optimizer they belong to.

Works on any scaler with `state_dict()` and a `load_state_dict()` that replaces (megatron-core's); its tensors of a few
elements stand in the index as lists, so that a scale can be read without the file's data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaresume.errors import FormatError, UnsupportedError
from megaresume.state.tensors import dtype_code, dtype_of
from megaresume.state.tree import from_json, to_json


def capture_scaler(scaler: Any | None) -> dict[str, Any] | None:
    """The scaler's state as JSON, None without a scaler. Raises UnsupportedError naming what JSON cannot hold."""
    return None if scaler is None else {key: _encode(key, value) for key, value in scaler.state_dict().items()}


def _encode(key: str, value: Any) -> dict[str, Any]:
    inside: dict[str, torch.Tensor] = {}
    if isinstance(value, torch.Tensor):
        numbers = to_json(value.tolist(), f"loss scaler {key}", inside)
        return {"tensor": numbers, "dtype": dtype_code(value.dtype, f"loss scaler {key}")}
    encoded = {"value": to_json(value, f"loss scaler {key}", inside)}
    if inside:
        raise UnsupportedError(f"loss scaler {key} holds tensors inside a {type(value).__name__}: keep them apart")
    return encoded


def scaler_mismatches(saved: Mapping[str, Any] | None, scaler: Any | None) -> list[str]:
    """Why the stored state cannot be given to this scaler; empty where it can."""
    if saved is None and scaler is None:
        return []
    if saved is None or scaler is None:
        has, lacks = ("this run", "the checkpoint") if saved is None else ("the checkpoint", "this run")
        return [f"{has} has a loss scaler, {lacks} has none (--fp16 differs?)"]
    current = scaler.state_dict()
    problems = [f"loss scaler: {key} is in the checkpoint, not in this run" for key in sorted(saved.keys() - current)]
    problems += [f"loss scaler: {key} is in this run, not in the checkpoint" for key in sorted(current.keys() - saved)]
    for key in sorted(saved.keys() & current.keys()):
        before, now = _form(_decode(key, saved[key])), _form(current[key])
        if before != now:
            problems.append(f"loss scaler: {key} is a {before} in the checkpoint, a {now} in this run")
    return problems


def decode_scaler(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What `load_state_dict` takes. Raises FormatError for values that make no tensor."""
    return {key: _decode(key, where) for key, where in saved.items()}


def _decode(key: str, where: Mapping[str, Any]) -> Any:
    if "tensor" not in where:
        return from_json(where["value"], {})
    dtype = dtype_of(where["dtype"], f"loss scaler {key}")
    try:
        return torch.tensor(from_json(where["tensor"], {}), dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"loss scaler {key}: the stored value makes no tensor: {error}") from None


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return type(value).__name__
