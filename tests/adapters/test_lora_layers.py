"""LoRA on column and row parallel linears computes, and learns, what whole matrices on one rank do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule

from megaresume.errors import ConfigurationError, UnsupportedError
from megaresume.megatron import lora
from megaresume.megatron.cpu import use_cpu
from megaresume.megatron.lora import LoraConfig
from megaresume.megatron.parallel import replica_groups
from megaresume.megatron.parameters import describe_parameters
from megaresume.state.description import Parameter
from tests.ranks import Ranks

HIDDEN, FFN, SEQUENCE = 8, 12, 6


class Block(MegatronModule):
    """linear_fc1 (column parallel), an activation, linear_fc2 (row parallel)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        settings: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_, "skip_bias_add": True}
        width = FFN * 2 if config.gated_linear_unit else FFN
        self.linear_fc1 = ColumnParallelLinear(HIDDEN, width, bias=False, gather_output=False, **settings)
        self.linear_fc2 = RowParallelLinear(FFN, HIDDEN, bias=False, input_is_parallel=True, **settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(activation(self.linear_fc1(x)[0], self.config.gated_linear_unit))[0]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        sharded = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.config.gated_linear_unit:  # as megatron's MLP does
            name = f"{prefix}linear_fc1.weight"
            sharded[name] = apply_swiglu_sharded_factory(sharded[name], sharded_offsets)
        return sharded


def activation(x: torch.Tensor, gated: bool) -> torch.Tensor:
    if not gated:
        return F.gelu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def start(tp: int, *, sequence_parallel: bool, gated: bool) -> Block:
    use_cpu()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        gated_linear_unit=gated,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    block = Block(config)
    block.requires_grad_(False)
    return block


def fill(block: Block) -> dict[str, torch.Tensor]:
    """Whole tensors for the adapters, put into the block; the base's are random too."""
    generator = torch.Generator().manual_seed(5)
    parameters, _ = describe_parameters([block], replica_groups())
    wholes = {}
    for name in sorted(parameters):
        wholes[name] = torch.randn(parameters[name].global_shape, generator=generator)
        lora.put_whole(parameters[name], wholes[name])
    return wholes


def local_part(parameter: Parameter, whole: torch.Tensor) -> torch.Tensor:
    mine = dataclasses.replace(parameter, tensor=torch.empty_like(parameter.tensor))
    lora.put_whole(mine, whole)
    return mine.tensor


def compare_with_whole(tp: int, sequence_parallel: bool, gated: bool) -> dict[str, float]:
    """On a rank: the largest differences from the same computation on whole matrices."""
    block = start(tp, sequence_parallel=sequence_parallel, gated=gated)
    lora.attach([block], "other", LoraConfig(rank=2, alpha=2, targets=("linear_fc1",)))
    lora.attach([block], "x", LoraConfig(rank=3, alpha=6, targets=("linear_fc1", "linear_fc2")))
    wholes = fill(block)
    x = torch.randn(SEQUENCE, 1, HIDDEN, generator=torch.Generator().manual_seed(7))
    weight = torch.randn(SEQUENCE, 1, HIDDEN, generator=torch.Generator().manual_seed(8))

    whole = {name: tensor.clone().requires_grad_() for name, tensor in wholes.items()}
    x_whole = x.clone().requires_grad_()

    def linear(name: str, value: torch.Tensor) -> torch.Tensor:
        inner = value @ whole[f"{name}.lora_A.x.weight"].T
        return value @ whole[f"{name}.weight"].T + 2.0 * inner @ whole[f"{name}.lora_B.x.weight"].T

    expected = linear("linear_fc2", activation(linear("linear_fc1", x_whole), gated))
    (expected * weight).sum().backward()

    rank, size = dist.get_rank(), SEQUENCE // tp
    mine = slice(rank * size, (rank + 1) * size) if sequence_parallel else slice(None)
    x_mine = x[mine].clone().requires_grad_()
    with lora.active([block], "x"):
        found = block(x_mine)
        (found * weight[mine]).sum().backward()
    errors = {"output": float((found - expected[mine]).abs().max())}
    errors["input"] = float((x_mine.grad - x_whole.grad[mine]).abs().max())  # type: ignore[operator, index]
    parameters, _ = describe_parameters([block], replica_groups())
    for name, parameter in parameters.items():
        if ".x." not in name:
            assert parameter.tensor.grad is None, f"{name} got a gradient"
            continue
        gradient = parameter.tensor.grad
        assert gradient is not None
        if getattr(parameter.tensor, "sequence_parallel", False):  # as finalize_model_grads does
            dist.all_reduce(gradient)
        errors[name] = float((gradient - local_part(parameter, whole[name].grad)).abs().max())
    plain = block(x_mine)
    lora.detach([block], "x")
    lora.detach([block], "other")
    assert torch.equal(plain, block(x_mine)), "outside of active(), an adapter shows"
    assert not lora.attached([block])
    return errors


@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2 sequence parallel"]
)
def test_outputs_and_gradients_are_those_of_whole_matrices(
    ranks: Ranks, tp: int, sequence_parallel: bool, gated: bool
) -> None:
    for errors in ranks.run(compare_with_whole, tp, sequence_parallel, gated, world_size=tp):
        assert len(errors) == 6 and max(errors.values()) < 2e-3, errors


def gradients_with_dropout(tp: int) -> dict[str, list[float]]:
    block = start(tp, sequence_parallel=False, gated=False)
    lora.attach([block], "x", LoraConfig(rank=3, alpha=6, dropout=0.5, targets=("linear_fc1", "linear_fc2")))
    fill(block)
    x = torch.randn(SEQUENCE, 1, HIDDEN, generator=torch.Generator().manual_seed(7))
    with lora.active([block], "x"):
        first, second = block(x), block(x)
        assert not torch.equal(first, second), "dropout did not drop"
        second.sum().backward()
    return {name: p.grad.flatten().tolist() for name, p in block.named_parameters() if p.grad is not None}


def test_what_is_replicated_over_tensor_parallel_ranks_learns_alike_under_dropout(ranks: Ranks) -> None:
    first, second = ranks.run(gradients_with_dropout, 2, world_size=2)
    for name in ("linear_fc1.lora_A.x.weight", "linear_fc2.lora_B.x.weight"):
        assert first[name] == second[name] and any(first[name])


def initial(tp: int, others: bool) -> dict[str, Any]:
    block = start(tp, sequence_parallel=False, gated=False)
    if others:
        lora.attach([block], "y", LoraConfig(rank=2, alpha=2, targets=("linear_fc1",)))
    lora.attach([block], "x", LoraConfig(rank=3, alpha=6, targets=("linear_fc1", "linear_fc2")))
    parameters, _ = describe_parameters([block], replica_groups())
    return {
        name: (parameter.tensor.tolist(), [chunk.global_offset for chunk in parameter.chunks])
        for name, parameter in parameters.items()
        if ".x." in name
    }


def test_a_begins_the_same_in_every_topology_and_beside_any_other_adapter(ranks: Ranks) -> None:
    (alone,) = ranks.run(initial, 1, False, world_size=1)
    left, right = ranks.run(initial, 2, True, world_size=2)
    assert left["linear_fc1.lora_A.x.weight"] == right["linear_fc1.lora_A.x.weight"]
    assert left["linear_fc1.lora_A.x.weight"] == alone["linear_fc1.lora_A.x.weight"]
    name = "linear_fc2.lora_A.x.weight"
    joined = [a + b for a, b in zip(left[name][0], right[name][0], strict=True)]
    assert joined == alone[name][0]
    assert not torch.tensor(alone["linear_fc1.lora_B.x.weight"][0]).any()


def refusals() -> list[str]:
    block = start(1, sequence_parallel=False, gated=False)
    config = LoraConfig(rank=2, alpha=2, targets=("linear_fc1",))
    lora.attach([block], "forward", config)  # a name that torch's ModuleDict refuses
    told = []
    with pytest.raises(ConfigurationError) as taken:
        lora.attach([block], "forward", config)
    told.append(str(taken.value))
    block.plain = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError) as foreign:
        lora.attach([block], "z", LoraConfig(rank=2, alpha=2, targets=("plain",)))
    told.append(str(foreign.value))
    return told


def test_what_cannot_be_adapted_is_refused_by_name(ranks: Ranks) -> None:
    taken, foreign = ranks.run(refusals, world_size=1)[0]
    assert "forward is attached already" in taken
    assert "plain is a torch.nn.modules.linear.Linear" in foreign


@pytest.mark.parametrize(
    "bad", [{"rank": 0}, {"rank": True}, {"alpha": float("nan")}, {"dropout": 1.0}, {"targets": "linear_qkv"}]
)
def test_a_config_out_of_range_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(bad))):
        LoraConfig(**{"rank": 2, "alpha": 2, **bad})
