"""megatron-core optimizers -> descriptions of their inner optimizers (checked with megatron-core 0.14 and 0.16.1).

Which range of which parameter a rank owns stands in `DistributedOptimizer._get_model_param_range_map`; it never enters
a file by bucket or position. What holds state we do not know how to take is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megaresume.errors import UnsupportedError
from megaresume.state.description import Optimizer, OptimizerGroup, OptimizerMember, Parameter

_REFUSED = {
    "LayerWiseDistributedOptimizer": "layer-wise (Muon) optimizers",
    "HybridDeviceOptimizer": "optimizers offloaded to the CPU",
    "FSDPDistributedOptimizer": "Megatron-FSDP",
}


def describe_optimizers(optimizer: Any | None, parameters: Mapping[str, Parameter]) -> tuple[Optimizer, ...]:
    """The inner optimizers of `optimizer` (Megatron's, chained or not, a list of them, or torch's own) in their order;
    stubs left out."""
    names = {id(parameter.tensor): parameter.name for parameter in parameters.values()}
    return tuple(_describe(leaf, names) for leaf in _leaves(optimizer))


def before_each_step(optimizer: Any | None, function: Callable[..., None]) -> list[Any] | None:
    """Have `function` called before each step of every inner optimizer, until the handles returned are removed.

    None, and nothing is registered, where one of them is no `torch.optim.Optimizer` and so has no such hook.
    """
    inner = [leaf if isinstance(leaf, torch.optim.Optimizer) else leaf.optimizer for leaf in _leaves(optimizer)]
    if not all(isinstance(each, torch.optim.Optimizer) for each in inner):
        return None
    return [each.register_step_pre_hook(function) for each in inner]


def mastered_shares(optimizer: Any | None, parameters: Mapping[str, Parameter]) -> dict[str, tuple[int, int]]:
    """For each parameter whose fp32 masters the distributed optimizers split among replicas: the elements [start, end)
    whose master this rank holds, an empty range where the others hold all."""
    names = {id(parameter.tensor): parameter.name for parameter in parameters.values()}
    shares: dict[str, tuple[int, int]] = {}
    for leaf in _leaves(optimizer):
        if not hasattr(leaf, "gbuf_ranges") or _keeps_masters_itself(leaf):
            continue
        for buffer in leaf.buffers:
            if buffer.param_dtype in (torch.bfloat16, torch.float16):
                shares.update({names[id(parameter)]: (0, 0) for parameter in buffer.params if id(parameter) in names})
        for group in leaf.model_float16_groups:
            for parameter in group:
                part = leaf._get_model_param_range_map(parameter)["param"]
                shares[names[id(parameter)]] = (int(part.start), int(part.end))
    return shares


def _keeps_masters_itself(leaf: Any) -> bool:
    """Whether this is a precision-aware optimizer, whose masters are state like any other."""
    config = leaf.config
    return bool(
        getattr(
            config,
            "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
            getattr(config, "use_precision_aware_optimizer", False),
        )
    )


def _leaves(optimizer: Any | None) -> Iterator[Any]:
    if optimizer is None or getattr(optimizer, "is_stub_optimizer", False):
        return
    if isinstance(optimizer, (list, tuple)):
        for part in optimizer:
            yield from _leaves(part)
    elif hasattr(optimizer, "chained_optimizers"):
        _refuse(optimizer)
        for part in optimizer.chained_optimizers:
            yield from _leaves(part)
    else:
        yield optimizer


def _refuse(*objects: Any) -> None:
    for each in objects:
        for kind in type(each).__mro__:
            if kind.__name__ in _REFUSED:
                raise UnsupportedError(f"{kind.__name__}: {_REFUSED[kind.__name__]} are not supported yet")


def _describe(leaf: Any, names: Mapping[int, str]) -> Optimizer:
    inner = leaf if isinstance(leaf, torch.optim.Optimizer) else leaf.optimizer
    _refuse(leaf, inner)
    if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
        raise UnsupportedError("Megatron-FSDP is not supported yet: run with --use-distributed-optimizer instead")
    if getattr(getattr(leaf, "ddp_config", None), "num_distributed_optimizer_instances", 1) > 1:
        raise UnsupportedError("num_distributed_optimizer_instances > 1 is not supported yet: run with one instance")
    owners = _owners(leaf, inner)
    groups = tuple(
        OptimizerGroup(group, tuple(_member(key, owners, names) for key in group["params"]))
        for group in inner.param_groups
    )
    state_maps = {"": inner.state}
    scales = getattr(inner, "_scales", None)  # where TE's FusedAdam keeps the scales of low-precision moments
    if isinstance(scales, dict):
        state_maps["scale."] = scales
    return Optimizer(type(inner).__name__, groups, state_maps, getattr(leaf, "grad_scaler", None))


def _member(
    key: torch.Tensor,
    owners: Mapping[int, tuple[torch.Tensor, int, int, torch.Tensor | None]],
    names: Mapping[int, str],
) -> OptimizerMember:
    parameter, start, end, master = owners[id(key)]
    if id(parameter) not in names:
        raise UnsupportedError(
            f"the optimizer trains a tensor of shape {tuple(parameter.shape)} that is no parameter of the model given: "
            "pass every model chunk"
        )
    return OptimizerMember(names[id(parameter)], start, end, key, master)


def _owners(leaf: Any, inner: Any) -> dict[int, tuple[torch.Tensor, int, int, torch.Tensor | None]]:
    """id(tensor the inner optimizer trains) -> (model parameter, first element, end, its master or None)."""
    owners: dict[int, tuple[torch.Tensor, int, int, torch.Tensor | None]] = {}
    if hasattr(leaf, "gbuf_ranges"):  # DistributedOptimizer
        for model_group, shard_group in _zip_groups(leaf.model_fp32_groups, leaf.shard_fp32_groups):
            owners.update(_ranges(leaf, model_group, shard_group, masters=False))
        for model_group, shard_group, main_group in _zip_groups(
            leaf.model_float16_groups, leaf.shard_float16_groups, leaf.shard_fp32_from_float16_groups
        ):
            # A precision-aware optimizer keeps its masters itself, as state of the low-precision shard.
            separate = all(main is not None for main in main_group)
            owners.update(_ranges(leaf, model_group, main_group if separate else shard_group, masters=separate))
        return owners
    if hasattr(leaf, "fp32_from_float16_groups"):  # Float16OptimizerWithFloat16Params
        for model_group, main_group in _zip_groups(leaf.float16_groups, leaf.fp32_from_float16_groups):
            owners.update(
                {id(main): (model, 0, model.numel(), main) for model, main in zip(model_group, main_group, strict=True)}
            )
    for group in inner.param_groups:
        for parameter in group["params"]:
            owners.setdefault(id(parameter), (parameter, 0, parameter.numel(), None))
    return owners


def _zip_groups(*groups: Any) -> Iterator[tuple[Any, ...]]:
    return zip(*groups, strict=True)


def _ranges(
    leaf: Any, model_group: list[torch.Tensor], key_group: list[torch.Tensor], *, masters: bool
) -> dict[int, tuple[torch.Tensor, int, int, torch.Tensor | None]]:
    owners = {}
    for model, key in zip(model_group, key_group, strict=True):
        part = leaf._get_model_param_range_map(model)["param"]
        owners[id(key)] = (model, int(part.start), int(part.end), key if masters else None)
    return owners
