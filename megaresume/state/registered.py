"""Objects of the user's own that live and resume with the run: tensors, generators, dicts of them, or a state_dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megaresume.errors import MegaresumeError, UnsupportedError
from megaresume.state.rng import generator_stream
from megaresume.state.tensors import same_form
from megaresume.state.tree import from_json, tensor_names, to_json


class Registered:
    """The objects of this rank by name. Each rank stores and gets back its own.

    An object is a tensor (restored in place), a `torch.Generator`, a mapping of names to such (nested as one likes), or
    has `state_dict()` and `load_state_dict()` over numbers, strings, lists, dicts and tensors. The tensors that
    `load_state_dict()` gets are on the host. Raises UnsupportedError naming anything else.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, each in objects.items():
            _check_kind(each, f"register[{name!r}]")
        self._objects = dict(objects)

    def capture(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(values as JSON, tensors by file name). Tensors are live, states of generators are copies."""
        tensors: dict[str, torch.Tensor] = {}
        values = {
            name: to_json(_state(each, f"register[{name!r}]"), f"registered/{name}", tensors)
            for name, each in self._objects.items()
        }
        return values, tensors

    def mismatches(self, saved: Mapping[str, Any], spans: Mapping[str, Any]) -> list[str]:
        """Every way in which the stored objects are not these: names, structure, dtype and shape of what is in place.

        `saved` are the values that `capture` gave; `spans[name]` has the `.dtype` and `.shape` of a stored tensor. What
        a `load_state_dict()` makes of another structure is its own affair, a module's excepted. Raises FormatError for
        values that refer to tensors which the file does not hold.
        """
        problems = [
            f"registered object {name} is in the checkpoint, not in this run"
            for name in saved
            if name not in self._objects
        ]
        problems += [
            f"registered object {name} is in this run, not in the checkpoint"
            for name in self._objects
            if name not in saved
        ]
        for name in sorted(saved.keys() & self._objects.keys()):
            names = {each: _Stored(each) for each in tensor_names(saved[name]) if each in spans}
            stored = from_json(saved[name], names)
            problems += _differences(self._objects[name], stored, spans, f"registered object {name}")
        return problems

    def restore(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the stored values in place; call it after `mismatches` was empty."""
        for name, each in self._objects.items():
            _restore(each, from_json(values[name], tensors))


class _Stored(str):
    """Stands for a stored tensor: its name in the file."""


def _check_kind(each: Any, where: str) -> None:
    if isinstance(each, Mapping):
        for key, part in each.items():
            _check_kind(part, f"{where}[{key!r}]")
    elif not isinstance(each, (torch.Tensor, torch.Generator)) and not (
        hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
    ):
        raise UnsupportedError(
            f"{where} is a {type(each).__name__}: give a tensor, a torch.Generator, a dict of such, or an object with "
            "state_dict() and load_state_dict()"
        )


def _state(each: Any, where: str) -> Any:
    _check_kind(each, where)  # again: a mapping may have grown since it was registered
    if isinstance(each, torch.Tensor):
        return each
    if isinstance(each, torch.Generator):
        return generator_stream(each).get()
    if isinstance(each, Mapping):
        return {key: _state(part, f"{where}[{key!r}]") for key, part in each.items()}
    return each.state_dict()


def _differences(each: Any, stored: Any, spans: Mapping[str, Any], where: str) -> Iterator[str]:
    if isinstance(each, (torch.Tensor, torch.Generator)):
        wanted = each if isinstance(each, torch.Tensor) else generator_stream(each).get()
        if not isinstance(stored, _Stored):
            yield f"{where} is a {type(stored).__name__} in the checkpoint, a {type(each).__name__} in this run"
        elif not same_form(wanted, stored, spans):
            span, wanted_dtype = spans[stored], str(wanted.dtype).removeprefix("torch.")
            yield (
                f"{where} is {span.dtype} {list(span.shape)} in the checkpoint, "
                f"{wanted_dtype} {list(wanted.shape)} in this run"
            )
    elif isinstance(each, (Mapping, torch.nn.Module)):
        parts = each if isinstance(each, Mapping) else each.state_dict()
        if not isinstance(stored, Mapping):
            yield f"{where} is no dict in the checkpoint, a {type(each).__name__} in this run"
            return
        yield from (f"{where}[{key!r}] is in the checkpoint, not in this run" for key in stored if key not in parts)
        for key, part in parts.items():
            if key not in stored:
                yield f"{where}[{key!r}] is in this run, not in the checkpoint"
            elif isinstance(each, Mapping) or isinstance(part, torch.Tensor):
                yield from _differences(part, stored[key], spans, f"{where}[{key!r}]")
    elif hasattr(each, "check_state"):  # it can tell by itself, as our data loaders can
        try:
            each.check_state(stored)
        except MegaresumeError as error:
            yield f"{where}: {error}"


def _restore(each: Any, value: Any) -> None:
    if isinstance(each, torch.Tensor):
        with torch.no_grad():
            each.copy_(value)
    elif isinstance(each, torch.Generator):
        generator_stream(each).set(value)
    elif isinstance(each, Mapping):
        for key, part in each.items():
            _restore(part, value[key])
    else:
        each.load_state_dict(value)
