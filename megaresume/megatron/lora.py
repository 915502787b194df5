"""LoRA on megatron-core's column and row parallel linears: several adapters, by name, on one frozen base.

    layers = attach(chunks, "german", LoraConfig(rank=8, alpha=16))     # one module per chunk, for DDP and optimizer
    with active(chunks, "german"):
        ...                                                             # forward and backward, with that adapter

An adapter's product is `B (A x)`. On a column parallel linear A is replicated and B sharded like the weight's rows; on
a row parallel one A is sharded like the weight's columns and B replicated. Names follow PEFT
(`...linear_qkv.lora_A.german.weight`) and those of the base stay what they were. Knows nothing of checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megaresume.errors import ConfigurationError, UnsupportedError
from megaresume.megatron.parallel import replica_groups
from megaresume.megatron.parameters import describe_parameters, unwrap
from megaresume.state.description import Parameter

TARGETS = ("linear_qkv", "linear_proj")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """One adapter's shape. The update is scaled by alpha / rank; `targets` are the last parts of modules' names."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: Sequence[str] = TARGETS

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ConfigurationError(f"rank: expected a whole number of at least 1, found {self.rank!r}")
        if not math.isfinite(self.alpha):
            raise ConfigurationError(f"alpha: expected a finite number, found {self.alpha!r}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigurationError(f"dropout: expected at least 0 and less than 1, found {self.dropout!r}")
        if isinstance(self.targets, str) or not self.targets:
            raise ConfigurationError(f"targets: expected names of modules, found {self.targets!r}")

    def facts(self) -> dict[str, Any]:
        """As JSON: what must be the same where the adapter is loaded."""
        return {
            "rank": self.rank,
            "alpha": float(self.alpha),
            "dropout": float(self.dropout),
            "targets": sorted(self.targets),
        }


class LoraLinear(torch.nn.Module):
    """A frozen column or row parallel linear and the adapters on it; `active` names the one whose product is added."""

    def __init__(self, base: Any, *, gated: bool) -> None:
        super().__init__()
        self.base = base
        self.lora_A = torch.nn.Module()
        self.lora_B = torch.nn.Module()
        self.configs: dict[str, LoraConfig] = {}
        self.active: str | None = None
        self._column = isinstance(base, ColumnParallelLinear)
        self._gated = gated
        self._sequence_parallel = bool(base.sequence_parallel)

    def add(self, key: str, config: LoraConfig) -> None:
        """Add an adapter: A is still to be filled, B is zero."""
        weight = self.base.weight
        rows, columns = weight.shape  # the local part's
        a, b = weight.new_empty(config.rank, columns), weight.new_zeros(rows, config.rank)
        for place, tensor, sharded, axis in (
            (self.lora_A, a, not self._column, 1),
            (self.lora_B, b, self._column, 0),
        ):
            layer = torch.nn.Module()
            layer.weight = torch.nn.Parameter(tensor)
            # Megatron's gradient norm counts a replicated parameter once by the first of these; its
            # finalize_model_grads sums what a sequence parallel region leaves partial by the second.
            set_tensor_model_parallel_attributes(layer.weight, sharded, axis if sharded else -1, 1)
            layer.weight.sequence_parallel = self._sequence_parallel and not sharded  # type: ignore[attr-defined]
            # Not add_module, which refuses the names that torch.nn.Module uses itself ("type", "forward").
            place._modules[key] = layer
        self.configs[key] = config

    def remove(self, key: str) -> None:
        """Forget an adapter."""
        del self.configs[key], self.lora_A._modules[key], self.lora_B._modules[key]

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The base's (output, bias), the active adapter's product added to the output."""
        output, bias = self.base(input_, *args, **kwargs)
        if self.active in self.configs:
            output = output + self._product(input_, self.active)
        return output, bias

    def _product(self, x: torch.Tensor, key: str) -> torch.Tensor:
        config, group = self.configs[key], self.base.tp_group
        a, b = self._matrix("lora_A", key), self._matrix("lora_B", key)
        if not self._column and not self.base.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, group=group)
        if config.dropout > 0.0 and self.training:
            # A sharded input has other elements on each tensor parallel rank, a replicated one must be dropped alike.
            sharded = not self._column or self._sequence_parallel
            with get_cuda_rng_tracker().fork() if sharded else contextlib.nullcontext():
                x = F.dropout(x, config.dropout)
        inner = F.linear(x, a)
        if self._column and self._sequence_parallel:
            # What is gathered is `rank` wide, not `hidden`.
            inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=group)
        elif self._column:
            inner = copy_to_tensor_model_parallel_region(inner, group=group)
        elif self._sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=group)
        return F.linear(inner, b) * (config.alpha / config.rank)

    def _matrix(self, name: str, key: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(self, name)._modules[key].weight
        return weight

    def backward_dw(self) -> None:
        """Megatron's split backward pass asks the base for it."""
        self.base.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The base's own entries under the names they had without adapters, and one per adapter and matrix."""
        sharded: dict[str, Any] = self.base.sharded_state_dict(prefix, sharded_offsets, metadata)
        weights = {
            f"{matrix}.{key}.weight": self._matrix(matrix, key)
            for key in self.configs
            for matrix in ("lora_A", "lora_B")
        }
        matrix, axis = ("lora_B", 0) if self._column else ("lora_A", 1)
        axes = {name: axis for name in weights if name.startswith(matrix)}
        groups = {"tp_group": self.base.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        own = make_sharded_tensors_for_checkpoint(weights, prefix, axes, sharded_offsets, **groups)
        if self._gated:
            for name in axes:
                own[prefix + name] = apply_swiglu_sharded_factory(own[prefix + name], sharded_offsets)
        return {**sharded, **own}


class AdapterLayers(torch.nn.Module):
    """One adapter's parameters in one model chunk: what DistributedDataParallel and get_megatron_optimizer are given.

    Its forward pass is the model's. The attributes are those that megatron's `finalize_model_grads` asks a chunk for.
    """

    pre_process = True
    share_embeddings_and_output_weights = False

    def __init__(self, config: Any, layers: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.layers = torch.nn.ModuleList(layers)


def attach(chunks: Sequence[torch.nn.Module], key: str, config: LoraConfig, *, seed: int = 1234) -> list[AdapterLayers]:
    """Add the adapter `key` to every linear whose name ends in one of the targets; return its layers, by chunk.

    `key` is the adapter's name as a part of a parameter's name (no dots; `adapters.encode_name` makes one). A is drawn
    as PEFT does it (uniform, Kaiming with a = sqrt(5)), from `seed` and the parameter's global name alone: the same
    numbers in every topology, whatever other adapters there are. Freezes nothing. Not collective.

    Raises ConfigurationError where the key is taken; UnsupportedError for linears that are not megatron-core's own,
    gather their output, or belong to experts.
    """
    added: list[list[LoraLinear]] = []
    for chunk in chunks:
        model = unwrap(chunk)
        _need_input_gradients(model)
        linears = [_lora_linear(model, name) for name in _targeted(model, config.targets)]
        if any(key in linear.configs for linear in linears):
            raise ConfigurationError(f"adapter {key} is attached already: detach it first, or give it another name")
        for linear in linears:
            linear.add(key, config)
        added.append(linears)
    _initialise(list(chunks), key, seed)
    return [
        AdapterLayers(
            getattr(unwrap(chunk), "config", None),
            [place._modules[key] for linear in linears for place in (linear.lora_A, linear.lora_B)],  # type: ignore[misc]
        )
        for chunk, linears in zip(chunks, added, strict=True)
    ]


def detach(chunks: Sequence[torch.nn.Module], key: str) -> None:
    """Forget the adapter `key`; the linears stay wrapped and compute what they did without it. Not collective."""
    for linear in _lora_linears(chunks):
        if key in linear.configs:
            linear.remove(key)


@contextlib.contextmanager
def active(chunks: Sequence[torch.nn.Module], key: str) -> Iterator[None]:
    """Forward passes in this context go through the adapter `key`; afterwards, through the one before."""
    linears = list(_lora_linears(chunks))
    before = [linear.active for linear in linears]
    for linear in linears:
        linear.active = key
    try:
        yield
    finally:
        for linear, was in zip(linears, before, strict=True):
            linear.active = was


def attached(chunks: Sequence[torch.nn.Module]) -> dict[str, LoraConfig]:
    """The adapters on this rank's chunks by key."""
    return {key: config for linear in _lora_linears(chunks) for key, config in linear.configs.items()}


def belongs_to(name: str, key: str) -> bool:
    """Whether the parameter of this global name is one of the adapter `key`."""
    return name.endswith((f".lora_A.{key}.weight", f".lora_B.{key}.weight"))


def put_whole(parameter: Parameter, whole: torch.Tensor) -> None:
    """Copy this rank's part of a whole (unsharded) tensor into the live parameter."""
    live = parameter.tensor.detach()
    for chunk in parameter.chunks:
        place = live.as_strided(chunk.shape, chunk.strides, live.storage_offset() + chunk.offset)
        box = tuple(slice(at, at + size) for at, size in zip(chunk.global_offset, chunk.shape, strict=True))
        place.copy_(whole[box])


def _initialise(chunks: list[torch.nn.Module], key: str, seed: int) -> None:
    parameters, _ = describe_parameters(chunks, replica_groups())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if not name.endswith(f".lora_A.{key}.weight"):
                continue
            name = f"{seed} {name.removesuffix(f'.{key}.weight')}"
            generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))
            bound = 1.0 / math.sqrt(parameter.global_shape[1])
            whole = torch.empty(parameter.global_shape, dtype=torch.float32, device="cpu")
            put_whole(parameter, whole.uniform_(-bound, bound, generator=generator))


def _targeted(model: torch.nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linears to adapt; a linear inside a LoraLinear goes by the latter's name."""
    return [
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in targets and ".lora_" not in name and not name.endswith(".base")
    ]


def _lora_linear(model: torch.nn.Module, name: str) -> LoraLinear:
    """The LoraLinear of this name, put in the place of the plain linear where it is the first adapter's."""
    module = model.get_submodule(name)
    if isinstance(module, LoraLinear):
        return module
    if type(module) not in (ColumnParallelLinear, RowParallelLinear):
        raise UnsupportedError(
            f"{name} is a {type(module).__module__}.{type(module).__name__}: LoRA is for megatron-core's "
            "ColumnParallelLinear and RowParallelLinear (get_gpt_layer_local_spec()). Adapters of another kind can be "
            "saved too: give AdapterManager.add their parameters."
        )
    if module.is_expert:
        raise UnsupportedError(f"{name} belongs to an expert: LoRA on experts is not supported yet")
    if getattr(module, "gather_output", False) or module.weight is None:
        raise UnsupportedError(f"{name} gathers its output or has no weight of its own: take it out of the targets")
    parent, _, leaf = name.rpartition(".")
    gated = leaf == "linear_fc1" and bool(getattr(module.config, "gated_linear_unit", False))
    wrapped = LoraLinear(module, gated=gated)
    setattr(model.get_submodule(parent), leaf, wrapped)
    return wrapped


def _lora_linears(chunks: Sequence[torch.nn.Module]) -> Iterator[LoraLinear]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, LoraLinear):
                yield module


def _need_input_gradients(model: torch.nn.Module) -> None:
    """Make the frozen embedding's output need a gradient.

    Else a pipeline stage without adapters has nothing to send back, and a recomputed layer (whose autograd function
    looks at its inputs alone) silently gives its adapters no gradient at all.
    """
    embedding = getattr(model, "embedding", None)
    if isinstance(embedding, torch.nn.Module) and not getattr(embedding, "_output_needs_gradients", False):
        embedding._output_needs_gradients = True  # type: ignore[assignment]
        embedding.register_forward_hook(_require_gradients)


def _require_gradients(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
