"""What the tests of `state` share: a small model, saving and restoring through a real shard file, and comparing.

One process, plain modules and torch optimizers. `frozen` looks at live objects without the code under test.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from megaresume.errors import StateMismatchError
from megaresume.megatron.live import describe
from megaresume.state.rank_state import RankState, RestorePlan, capture, plan_restore
from megaresume.state.registered import Registered
from megaresume.state.rng import Stream, process_streams
from megaresume.state.tensors import dtype_code, host_bytes
from megaresume.store.shard import Entry, ShardIdentity, read_header, stream_tensors, write_shard

IDENTITY = ShardIdentity(root_id="3f2a", attempt=1, step=4, coordinate="tp00-pp00-dp00")


class Centre(nn.Module):
    """Takes off a running mean: a buffer that training moves, one that counts, and one that is not persistent."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("last", torch.zeros(size), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.last.copy_(x.mean(0))
            self.mean.lerp_(self.last, 0.1)
            self.batches += 1
        return x - self.mean


class Net(nn.Module):
    """Matrices, vectors, a parameter of one element and one of none, buffers of two dtypes, and dropout."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 6)
        self.centre = Centre(6)
        self.second = nn.Linear(6, 4, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.centre(self.first(x)).relu(), 0.2)
        return self.scale * self.second(hidden) + self.nothing.sum()


def train(model: nn.Module, optimizer: Any, steps: int, *, scheduler: Any = None) -> list[str]:
    """Losses in hex. Inputs come from torch's own stream, as dropout does, so they follow what was restored."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item().hex())
    return losses


def save(
    path: Path,
    model: nn.Module | list[nn.Module],
    optimizer: Any = None,
    *,
    streams: Mapping[str, Stream] | None = None,
    registered: Mapping[str, Any] | None = None,
) -> Path:
    """Write the state into the shard file `path`, as a save of one rank does."""
    state = capture(describe(as_list(model), optimizer), streams, Registered(registered or {}))
    entries = [
        Entry(name, dtype_code(tensor.dtype, name), tuple(tensor.shape), host_bytes(tensor))
        for name, tensor in state.tensors.items()
    ]
    write_shard(path, entries, identity=IDENTITY, index=state.index)
    return path


def plan(
    path: Path,
    model: nn.Module | list[nn.Module],
    optimizer: Any = None,
    *,
    streams: Mapping[str, Stream] | None = None,
    registered: Mapping[str, Any] | None = None,
    **options: bool,
) -> RestorePlan:
    """Phase 1 of a restore of what `save` wrote."""
    header = read_header(path)
    live = describe(as_list(model), optimizer)
    return plan_restore(header.index, header.tensors, live, streams, Registered(registered or {}), **options)


def restore(path: Path, model: nn.Module | list[nn.Module], optimizer: Any = None, **arguments: Any) -> RestorePlan:
    """Both phases."""
    made = plan(path, model, optimizer, **arguments)
    stream_tensors(path, read_header(path), made.targets())
    made.complete()
    made.install()
    return made


class Span(NamedTuple):
    """What planning looks at of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0


def spans_of(state: RankState) -> dict[str, Span]:
    return {name: Span(dtype_code(tensor.dtype, name), tuple(tensor.shape)) for name, tensor in state.tensors.items()}


def as_list(model: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return model if isinstance(model, list) else [model]


def streams() -> dict[str, Stream]:
    return process_streams(None)


def frozen(value: Any) -> Any:
    """A deep copy that `==` compares exactly: types, dtypes, shapes and bits included."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        bits = None if tensor.is_meta else tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", str(tensor.dtype), tuple(tensor.shape), str(tensor.device), bits
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return "generator", frozen(value.get_state())
    if isinstance(value, Mapping):
        return type(value).__name__, [(frozen(key), frozen(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [frozen(part) for part in value]
    if isinstance(value, (float, np.floating)):
        return type(value).__name__, float(value).hex()
    return type(value).__name__, value


def everything(model: nn.Module | list[nn.Module], optimizer: Any = None, *others: Any) -> Any:
    """All that a restore may touch: weights, buffers, optimizer state and options, and every stream of the process."""
    names = {
        parameter: f"{number}.{name}"
        for number, chunk in enumerate(as_list(model))
        for name, parameter in chunk.named_parameters()
    }
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer] if optimizer is not None else []
    return {
        "model": [frozen({**dict(c.named_parameters()), **dict(c.named_buffers())}) for c in as_list(model)],
        "optimizers": [_optimizer_state(getattr(each, "optimizer", each), names) for each in optimizers],
        "scalers": [frozen(vars(each.grad_scaler)) for each in optimizers if getattr(each, "grad_scaler", None)],
        "rng": (random.getstate(), frozen([np.random.get_state(), torch.get_rng_state()])),
        "others": frozen([each.state_dict() if hasattr(each, "state_dict") else each for each in others]),
    }


def _optimizer_state(optimizer: Any, names: Mapping[Any, str]) -> Any:
    def by_name(state: Mapping[Any, Any]) -> dict[str, Any]:
        return {names.get(key, f"tensor {index}"): _sorted(part) for index, (key, part) in enumerate(state.items())}

    def options(group: Mapping[str, Any]) -> Any:
        return _sorted({key: value for key, value in group.items() if key != "params"})

    return {
        "state": dict(sorted(by_name(optimizer.state).items())),
        "scales": dict(sorted(by_name(getattr(optimizer, "_scales", {})).items())),
        "options": [options(group) for group in optimizer.param_groups],
    }


def _sorted(part: Mapping[str, Any]) -> Any:
    return [(key, frozen(part[key])) for key in sorted(part)]


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """An optimizer's state by parameter name, options left out."""
    return {name: frozen(dict(optimizer.state[parameter])) for name, parameter in model.named_parameters()}


def refusal(path: Path, model: Any, optimizer: Any, **arguments: Any) -> str:
    """The message with which a restore is refused; checks that it touched nothing."""
    before = everything(model, optimizer)
    with pytest.raises(StateMismatchError) as caught:
        plan(path, model, optimizer, **arguments)
    assert everything(model, optimizer) == before
    return str(caught.value)


def advance_all_streams() -> None:
    """Draw from every stream of the process, so that what was restored and what was left alone can be told apart."""
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.rand(3)


def draws() -> list[str]:
    """What every stream of the process gives next, second halves of Gaussian pairs included."""
    return [
        *(random.gauss(0, 1).hex() for _ in range(3)),
        random.random().hex(),
        *(float(np.random.standard_normal()).hex() for _ in range(3)),
        *(float(each).hex() for each in torch.rand(3)),
    ]
