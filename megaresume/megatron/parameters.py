"""Model chunks -> parameters, buffers and extra states under global names (checked with megatron-core 0.14 and 0.16.1).

A local parameter's place in the global one is what its `sharded_state_dict` says, factories (SwiGLU and the like)
built: their parts are views of the parameter, so address and strides say which local elements lie where. A plain
`nn.Module` is its own global self.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Container, Iterator
from typing import Any

import torch

from megaresume.errors import UnsupportedError
from megaresume.state.description import Chunk, ExtraState, Parameter

# Without it megatron-core makes the layer number a dimension of the tensor, and names are no longer unique.
_METADATA = {"non_homogeneous_layers": True}


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel and Float16Module."""
    while isinstance(getattr(chunk, "module", None), torch.nn.Module):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def synchronise(chunks: list[torch.nn.Module]) -> None:
    """Finish a parameter all-gather that is still to overlap with the next forward pass, so that weights are whole to
    read."""
    for chunk in chunks:
        config = getattr(chunk, "ddp_config", None)
        if config is not None and getattr(config, "overlap_param_gather", False):
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def describe_parameters(
    chunks: list[torch.nn.Module], replicas: Container[str]
) -> tuple[dict[str, Parameter], dict[str, torch.Tensor]]:
    """(parameters by global name, buffers by rank-local name) of this rank's model chunks. Not collective.

    `replicas` holds "expert" where experts have replica groups of their own. Raises UnsupportedError naming a parameter
    whose place in the global model cannot be told.
    """
    parameters: dict[str, Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(chunks):
        module = unwrap(chunk)
        for parameter in _chunk_parameters(module, "expert" in replicas):
            name = parameter.name
            if name in parameters:
                if parameters[name].tensor is parameter.tensor:
                    continue
                raise UnsupportedError(
                    f"two different parameters of this rank are both named {name}: their state cannot be told apart"
                )
            parameters[name] = parameter
        for name, buffer in module.named_buffers():
            if buffer is not None:
                buffers[f"chunk{number}.{name}"] = _contiguous(buffer, name)
    return parameters, buffers


def describe_extra_states(chunks: list[torch.nn.Module]) -> tuple[ExtraState, ...]:
    """The `_extra_state` of every module that has one (Transformer Engine's, mostly)."""
    return tuple(
        ExtraState(f"chunk{number}.{name}", functools.partial(_extra_state, module, name), module.set_extra_state)
        for number, chunk in enumerate(chunks)
        for name, module in unwrap(chunk).named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    )


def _extra_state(module: torch.nn.Module, name: str) -> Any:
    state = module.get_extra_state()
    if not type(module).__module__.startswith("transformer_engine"):
        return state
    # Without fp8 it is None or an empty tensor. With fp8 it is a pickle, which TE unpickles when it is set: we would
    # hand it bytes from a file.
    if state is None or (isinstance(state, torch.Tensor) and state.numel() == 0):
        return state
    raise UnsupportedError(
        f"{name}: Transformer Engine's fp8 state (scales and amax history) is not supported yet; run without "
        "--fp8-format"
    )


def _chunk_parameters(module: torch.nn.Module, expert_replicas: bool) -> Iterator[Parameter]:
    local = {id(parameter): (name, parameter) for name, parameter in module.named_parameters()}
    if not hasattr(module, "sharded_state_dict"):
        yield from (_whole(name, parameter) for name, parameter in local.values())
        return
    with torch.no_grad():
        sharded = module.sharded_state_dict(metadata=dict(_METADATA))  # type: ignore[operator]
        parts = _PartsByAddress(local)
        for value in sharded.values():
            parts.add(value)
    for name, parameter in local.values():
        yield parts.describe(name, parameter, expert_replicas)


class _PartsByAddress:
    """Finds the parameter each sharded tensor is a view of: names in a sharded state dict are not those of the
    module."""

    def __init__(self, local: dict[int, tuple[str, torch.nn.Parameter]]) -> None:
        holders = sorted((parameter.data_ptr(), key) for key, (_, parameter) in local.items() if parameter.numel())
        self._starts = [start for start, _ in holders]
        self._keys = [key for _, key in holders]
        self._local = local
        self._found: dict[int, list[tuple[str, Any]]] = {key: [] for key in local}

    def add(self, value: Any) -> None:
        if hasattr(value, "build_fn"):  # a ShardedTensorFactory; its parts go by its own name
            for part in _flatten(value.build()):
                self._assign(value.key, part)
        elif hasattr(value, "global_offset") and isinstance(getattr(value, "data", None), torch.Tensor):
            self._assign(value.key, value)

    def _assign(self, name: str, part: Any) -> None:
        if part.data.numel() == 0:
            return
        place = bisect.bisect_right(self._starts, part.data.data_ptr()) - 1
        if place < 0:
            return
        key = self._keys[place]
        parameter = self._local[key][1]
        if part.data.data_ptr() < parameter.data_ptr() + parameter.numel() * parameter.element_size():
            self._found[key].append((name, part))

    def describe(self, local_name: str, parameter: torch.nn.Parameter, expert_replicas: bool) -> Parameter:
        found = self._found[id(parameter)]
        if sum(part.data.numel() for _, part in found) != parameter.numel() or not found:
            raise UnsupportedError(
                f"parameter {local_name}: the model's sharded_state_dict() covers "
                f"{sum(part.data.numel() for _, part in found)} of its {parameter.numel()} elements, so its place in "
                "the global model is unknown; give its module a sharded_state_dict() that covers it"
            )
        names = {name for name, _ in found}
        if len(names) > 1:
            raise UnsupportedError(f"parameter {local_name} lies in several global tensors: {', '.join(sorted(names))}")
        # megatron-core marks expert parameters, whose gradients are reduced over another group, with allreduce = False.
        expert = expert_replicas and not getattr(parameter, "allreduce", True)
        chunks = tuple(
            Chunk(
                offset=(part.data.data_ptr() - parameter.data_ptr()) // parameter.element_size(),
                shape=(*(1 for _ in range(part.prepend_axis_num)), *part.data.shape),
                strides=(*(0 for _ in range(part.prepend_axis_num)), *part.data.stride()),
                global_offset=tuple(part.global_offset),
            )
            for _, part in found
        )
        return Parameter(
            name=names.pop() + _expert_suffix(found),
            tensor=_contiguous(parameter, local_name),
            global_shape=tuple(found[0][1].global_shape),
            chunks=chunks,
            replica="expert" if expert else "dense",
            trainable=parameter.requires_grad,
        )


def _expert_suffix(found: list[tuple[str, Any]]) -> str:
    """Experts of one layer share a global tensor with the expert number as a leading dimension; it tells their
    parameters apart."""
    leading = sorted({tuple(part.global_offset[: part.prepend_axis_num]) for _, part in found})
    if leading == [()]:
        return ""
    first, last = (",".join(map(str, place)) for place in (leading[0], leading[-1]))
    return f"[{first}]" if first == last else f"[{first}..{last}]"


def _flatten(built: Any) -> Iterator[Any]:
    if isinstance(built, dict):
        built = list(built.values())
    if isinstance(built, (list, tuple)):
        for part in built:
            yield from _flatten(part)
    else:
        yield built


def _whole(name: str, parameter: torch.nn.Parameter) -> Parameter:
    tensor = _contiguous(parameter, name)
    shape = tuple(tensor.shape)
    chunk = Chunk(0, shape, tuple(tensor.stride()), tuple(0 for _ in shape))
    return Parameter(name, tensor, shape, (chunk,), "dense", parameter.requires_grad)


def _contiguous(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if type(tensor.data) is not torch.Tensor:
        raise UnsupportedError(
            f"{name} is a {type(tensor.data).__name__}: quantised and distributed (fp8, DTensor) tensors are not "
            "supported yet"
        )
    if not tensor.is_contiguous():
        raise UnsupportedError(
            f"{name} is not contiguous in memory (strides {tensor.stride()}); call .contiguous() when it is built"
        )
    return tensor
