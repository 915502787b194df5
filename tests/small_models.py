"""Small real megatron-core training runs for tests: GPTModel, DDP, optimizer, scheduler and pipeline schedules.

`build(SmallModel(tp=2, pp=2, dp=2))` sets everything up from nothing, in a process that may have run another topology
before. The samples are synthetic and a function of their id alone. Knows nothing of checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from megaresume.megatron.cpu import use_cpu

VOCAB_SIZE = 128
SEQUENCE_LENGTH = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """One run: topology, model, precision and schedule. The world size is tp * pp * dp."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int | None = None
    """Virtual chunks per pipeline stage; None is no virtual pipeline."""
    ep: int = 1
    order: str = "tp-cp-ep-dp-pp"

    num_layers: int = 4
    hidden_size: int = 32
    num_attention_heads: int = 8
    moe: bool = False
    """Four experts, two per token, in every layer. With ep > 1 this needs tp 1."""
    tied: bool = True
    """Whether the output layer shares the word embeddings (first and last stage then both hold them)."""
    swiglu: bool = False
    dropout: float = 0.1

    precision: str = "bf16"
    """"fp32", "bf16" or "fp16", the last with a dynamic loss scale so big that the first steps are skipped."""
    distributed_optimizer: bool = True
    clip_grad: float = 0.5
    lr: float = 0.01
    train_steps: int = 20
    """Where the cosine decay ends; the warm-up takes the first 3 steps."""

    micro_batch_size: int = 1
    global_batch_size: int = 8
    seed: int = 1234

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


TOPOLOGIES = {
    "1x1x8": SmallModel(dp=8, global_batch_size=16),
    "2x2x2": SmallModel(tp=2, pp=2, dp=2),
    "2x2x2 fp32 swiglu untied": SmallModel(tp=2, pp=2, dp=2, precision="fp32", swiglu=True, tied=False),
    "2x2x2 plain optimizer": SmallModel(tp=2, pp=2, dp=2, distributed_optimizer=False),
    "2x2x2 fp16": SmallModel(tp=2, pp=2, dp=2, precision="fp16"),
    "4x2x1": SmallModel(tp=4, pp=2, num_layers=2, global_batch_size=4),
    "1x4x2 vpp 2": SmallModel(pp=4, dp=2, vpp=2, num_layers=8),
    "1x2x4 ep 2": SmallModel(pp=2, dp=4, ep=2, moe=True),
}
"""tp x pp x dp on 8 ranks: what every promise about all topologies is tested on. All accumulate gradients."""


class StepResult(NamedTuple):
    loss: float | None
    """Mean over the global batch; None off the last pipeline stage."""
    grad_norm: float | None
    """None where the step was skipped."""
    skipped: bool
    """Whether the optimizer skipped the step (fp16 overflow)."""


@dataclass
class Run:
    """A live run, as a training script would hold it."""

    config: SmallModel
    chunks: list[DistributedDataParallel]
    """This rank's model chunks, one per virtual pipeline stage."""
    optimizer: Any
    scheduler: OptimizerParamScheduler

    def micro_batches(self, step: int) -> list[list[int]]:
        """This rank's sample ids of the 0-based `step`, one list per micro-batch; in order, split as Megatron does."""
        size, dp_rank = self.config.micro_batch_size, parallel_state.get_data_parallel_rank()
        stride = size * self.config.dp
        first = step * self.config.global_batch_size + dp_rank * size
        return [
            list(range(begin, begin + size)) for begin in range(first, first + get_num_microbatches() * stride, stride)
        ]

    def train_step(self, batch: int | Sequence[Sequence[int]]) -> StepResult:
        """Train on one global batch: a 0-based step number, or this rank's sample ids, one list per micro-batch.

        Collective over all ranks.
        """
        micro_batches = self.micro_batches(batch) if isinstance(batch, int) else batch
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[map(_tensors, micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=SEQUENCE_LENGTH,
            micro_batch_size=self.config.micro_batch_size,
            forward_only=False,
        )
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=self.config.global_batch_size)
        return StepResult(_mean_loss(losses), None if grad_norm is None else float(grad_norm), not updated)


def build(config: SmallModel) -> Run:
    """Set up parallel state, random numbers, model, optimizer and scheduler. Collective over all ranks.

    torch.distributed must be initialised with a world of tp * pp * dp ranks; whatever an earlier call left is dropped.
    """
    use_cpu()
    _initialise_parallel_state(config)
    _seed_everything(config)
    chunks = _build_chunks(config)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr / 10,
            weight_decay=0.01,
            clip_grad=config.clip_grad,
            bf16=config.precision == "bf16",
            fp16=config.precision == "fp16",
            params_dtype=DTYPES[config.precision],
            use_distributed_optimizer=config.distributed_optimizer,
            initial_loss_scale=2.0**20,
            min_loss_scale=1.0,
            loss_scale_window=4,
            hysteresis=1,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr / 10,
        max_lr=config.lr,
        min_lr=config.lr / 10,
        lr_warmup_steps=3 * config.global_batch_size,
        lr_decay_steps=config.train_steps * config.global_batch_size,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=config.train_steps * config.global_batch_size,
        wd_incr_style="linear",
    )
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    return Run(config, chunks, optimizer, scheduler)


def train(config: SmallModel, steps: int) -> list[StepResult]:
    """Build the run and train it for `steps` steps. Collective over all ranks."""
    run = build(config)
    return [run.train_step(step) for step in range(steps)]


def sample(sample_id: int) -> np.ndarray:
    """The tokens of a sample, int64 [SEQUENCE_LENGTH + 1]: a noisy walk that a small model learns something from."""
    generator = np.random.default_rng(sample_id)
    strides = generator.integers(1, 4, size=SEQUENCE_LENGTH + 1)
    return np.asarray((generator.integers(VOCAB_SIZE) + np.cumsum(strides)) % VOCAB_SIZE)


def _initialise_parallel_state(config: SmallModel) -> None:
    parallel_state.destroy_model_parallel()
    # It holds process groups of the topology before.
    get_moe_layer_wise_logging_tracker().clear()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp,
        expert_model_parallel_size=config.ep,
        order=config.order,
        create_gloo_process_groups=False,
    )
    assert parallel_state.get_data_parallel_world_size() == config.dp
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(
        rank=torch.distributed.get_rank(),
        rampup_batch_size=None,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        data_parallel_size=config.dp,
    )


def _seed_everything(config: SmallModel) -> None:
    """As Megatron's training script does: the default streams differ by pipeline stage only."""
    seed = config.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _build_chunks(config: SmallModel) -> list[DistributedDataParallel]:
    transformer_config = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        add_bias_linear=not config.moe,  # experts with biases do not train: megatron adds to a view in place
        gated_linear_unit=config.swiglu,
        activation_func=F.silu if config.swiglu else F.gelu,
        attention_dropout=config.dropout,
        hidden_dropout=config.dropout,
        num_moe_experts=4 if config.moe else None,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.01,
        moe_router_load_balancing_type="aux_loss",
        moe_token_dispatcher_type="allgather",
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp,
        expert_model_parallel_size=config.ep,
        params_dtype=DTYPES[config.precision],
        pipeline_dtype=DTYPES[config.precision],
        bf16=config.precision == "bf16",
        fp16=config.precision == "fp16",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=config.distributed_optimizer,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    stages = config.vpp or 1
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for stage in range(stages):
        model = GPTModel(
            transformer_config,
            transformer_layer_spec=get_gpt_layer_local_spec(num_experts=transformer_config.num_moe_experts),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=SEQUENCE_LENGTH,
            pre_process=pp_rank == 0 and stage == 0,
            post_process=pp_rank == config.pp - 1 and stage == stages - 1,
            share_embeddings_and_output_weights=config.tied,
            vp_stage=None if config.vpp is None else stage,
        )
        if config.precision != "fp32":
            model = Float16Module(transformer_config, model)
        chunks.append(DistributedDataParallel(transformer_config, ddp_config, model, disable_bucketing=stage > 0))
    return chunks


def _tensors(sample_ids: Sequence[int]) -> dict[str, torch.Tensor]:
    tokens = torch.from_numpy(np.stack([sample(sample_id) for sample_id in sample_ids]))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    positions = torch.arange(SEQUENCE_LENGTH).expand_as(batch["tokens"])
    future = torch.ones(1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH, dtype=torch.bool).triu(diagonal=1)
    return model(batch["tokens"], positions, future, labels=batch["labels"]), _mean_of_tokens


def _mean_of_tokens(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = token_losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides the loss in place


def _mean_loss(losses: Sequence[dict[str, torch.Tensor]]) -> float | None:
    """The micro-batches' mean, averaged over data parallel; None off the last stage."""
    if not losses:
        return None
    loss = torch.stack([entry["loss"] for entry in losses]).mean()
    torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    return float(loss / parallel_state.get_data_parallel_world_size())
