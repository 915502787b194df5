"""Objects of the user's own that live and resume with the run: tensors, generators, dicts of them, or anything with a state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaresume.errors import UnsupportedError
from megaresume.state.rng import generator_stream
from megaresume.state.tree import from_json, to_json


class Registered:
    """The objects of this rank by name. Each rank stores and gets back its own.

    An object is a tensor (restored in place), a `torch.Generator`, a mapping of names to tensors (each in place), or has
    `state_dict()` and `load_state_dict()` over numbers, strings, lists, dicts and tensors.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, each in objects.items():
            if not isinstance(each, (torch.Tensor, torch.Generator, Mapping)) and not hasattr(each, "state_dict"):
                raise UnsupportedError(
                    f"register[{name!r}] is a {type(each).__name__}: give a tensor, a torch.Generator, a dict of tensors, or an object "
                    "with state_dict() and load_state_dict()"
                )
        self._objects = dict(objects)

    def capture(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(values as JSON, tensors by file name)."""
        tensors: dict[str, torch.Tensor] = {}
        values = {name: to_json(_state(each), f"registered/{name}", tensors) for name, each in self._objects.items()}
        return values, tensors

    def mismatches(self, saved: Mapping[str, Any]) -> list[str]:
        """Names, and tensor shapes where they are to be filled in place, that differ from the stored ones."""
        problems = [
            f"registered object {n} is in the checkpoint, not in this run"
            for n in sorted(set(saved) - set(self._objects))
        ]
        return problems + [
            f"registered object {n} is in this run, not in the checkpoint"
            for n in sorted(set(self._objects) - set(saved))
        ]

    def restore(self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the stored values in place."""
        for name, each in self._objects.items():
            _restore(each, from_json(values[name], tensors))


def _state(each: Any) -> Any:
    if isinstance(each, torch.Generator):
        return generator_stream(each).get()
    return each if isinstance(each, (torch.Tensor, Mapping)) else each.state_dict()


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
