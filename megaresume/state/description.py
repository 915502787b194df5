"""The vocabulary in which live training objects are described to everything that captures or restores them.

`megaresume.megatron` turns megatron-core objects into these; nothing here imports it. A description points at live
tensors: it is made anew for each capture or restore and never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Chunk:
    """One box of a local parameter and where it lies in the global one.

    `offset` and `strides` (elements) address it inside the local parameter's contiguous memory; `shape` and
    `global_offset` have one number per dimension of the global shape. A SwiGLU weight has two chunks: its gate and its
    up half lie apart globally.
    """

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    global_offset: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """A local (tensor/expert parallel part of a) parameter, known by its global name.

    `replica` names the process group over which this tensor is the same on every rank ("dense": data x context
    parallel; "expert": expert data parallel).
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    replica: str
    trainable: bool

    def to_index(self) -> dict[str, Any]:
        """The entry of the shard file's logical index that says what this parameter is and where it lies."""
        return {
            "dtype": str(self.tensor.dtype).removeprefix("torch."),
            "local_shape": list(self.tensor.shape),
            "global_shape": list(self.global_shape),
            "chunks": [
                {
                    "offset": chunk.offset,
                    "shape": list(chunk.shape),
                    "strides": list(chunk.strides),
                    "global_offset": list(chunk.global_offset),
                }
                for chunk in self.chunks
            ],
            "replica": self.replica,
            "trainable": self.trainable,
        }


@dataclass(frozen=True)
class ExtraState:
    """A module's `_extra_state`: `get()` gives plain data and tensors, `set(value)` puts it back."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


@dataclass(frozen=True)
class ReplicaGroup:
    """The ranks that hold the same model tensors; `process_group` is None where this rank is alone."""

    rank: int
    size: int
    process_group: Any | None


@dataclass(frozen=True)
class OptimizerMember:
    """What one optimizer holds for one parameter here: elements `[start, end)` of the flattened local parameter.

    `key` is the tensor under which the inner optimizer keeps its state; `master` is the higher-precision copy of that
    range, None where the optimizer updates the model's own memory.
    """

    parameter: str
    start: int
    end: int
    key: torch.Tensor
    master: torch.Tensor | None


@dataclass(frozen=True)
class OptimizerGroup:
    """A parameter group: the inner optimizer's live dictionary (readers leave out its `params`) and its members."""

    options: MutableMapping[str, Any]
    members: tuple[OptimizerMember, ...]


@dataclass(frozen=True)
class Optimizer:
    """One inner (torch, Apex or TE) optimizer.

    `state_maps` are the live dictionaries keyed by `member.key`, by the prefix their slots get in the file: "" is
    `optimizer.state`, "scale." holds the scales of low-precision moments. `scaler` is the loss scaler that goes with
    it, if any.
    """

    kind: str
    groups: tuple[OptimizerGroup, ...]
    state_maps: dict[str, MutableMapping[Any, dict[str, Any]]]
    scaler: Any | None


@dataclass(frozen=True)
class Live:
    """Everything on this rank whose state is captured and restored (random numbers and registered objects apart)."""

    parameters: dict[str, Parameter]
    buffers: dict[str, torch.Tensor]
    extra_states: tuple[ExtraState, ...]
    optimizers: tuple[Optimizer, ...]
    replicas: dict[str, ReplicaGroup]
    reload_masters: Callable[[], None] = field(default=lambda: None)
    shares: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Where replicas split a parameter's higher-precision masters among them: the elements [start, end) whose master
    this rank holds. A weight is then stored, or left out as rounded from it, by whoever holds its master."""
