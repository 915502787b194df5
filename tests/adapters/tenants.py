"""Adapters on a small frozen base, trained in turn through AdapterManager: what the tests of adapters share.

    tenants = [Tenant("a", LoraConfig(rank=4, alpha=8)), Tenant("b", LoraConfig(rank=8, alpha=8), steps=3)]
    with opened(SmallModel(tp=2, dp=2), tenants, root) as live:                # on a rank, collective
        live.adapters.resume_all()
        losses = train(live)

The base's weights are a function of the parameters' global names: the same model in every topology.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megaresume import DataParallelBatchSampler
from megaresume.adapters import AdapterManager, LoraConfig
from megaresume.adapters.naming import encode_name
from megaresume.megatron import lora
from megaresume.megatron.parallel import replica_groups
from megaresume.megatron.parameters import describe_parameters
from megaresume.store.shard import read_header, verify_shard
from tests.small_models import DTYPES, Run, SmallModel, StepResult, build


class Crash(Exception):
    """Leaves a manager as a dying process does: nothing is saved, nothing collective happens."""


@dataclass(frozen=True)
class Tenant:
    """One adapter and how it is trained."""

    name: str
    config: LoraConfig
    steps: int = 4
    save_every: int | None = None
    global_batch_size: int = 4
    dataset_size: int = 37
    lr: float = 0.01
    distributed_optimizer: bool = True
    seed: int = 1234


@dataclass
class _Training:
    run: Run
    layers: list[DistributedDataParallel]
    sampler: DataParallelBatchSampler
    batches: Iterator[list[int]] | None = None
    """Made at the first step: a sampler is restored before anybody reads from it."""


@dataclass
class Live:
    """What a training script holds on one rank."""

    config: SmallModel
    chunks: list[torch.nn.Module]
    tenants: list[Tenant]
    adapters: AdapterManager
    training: dict[str, _Training]


def build_base(config: SmallModel) -> list[Any]:
    """The frozen base's chunks on this rank."""
    chunks = build(config).chunks
    for chunk in chunks:
        chunk.requires_grad_(False)
    parameters, _ = describe_parameters(list(chunks), replica_groups())
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:15], 16))
        whole = torch.randn(parameter.global_shape, generator=generator) * 0.1
        lora.put_whole(parameter, whole + 1 if "norm.weight" in name else whole)
    return list(chunks)


def attach(chunks: list[Any], config: SmallModel, tenant: Tenant) -> _Training:
    """Put the adapter into the model, with an optimizer, a schedule and a sampler of its own."""
    layers = lora.attach(chunks, encode_name(tenant.name), tenant.config)
    return training_of(chunks, config, tenant, layers)


def training_of(chunks: list[Any], config: SmallModel, tenant: Tenant, layers: Sequence[torch.nn.Module]) -> _Training:
    """What trains these modules' parameters, one module per chunk."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=tenant.distributed_optimizer, grad_reduce_in_fp32=True
    )
    wrapped = [DistributedDataParallel(chunks[0].config, ddp_config, each) for each in layers]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=tenant.lr,
            min_lr=tenant.lr / 10,
            weight_decay=0.01,
            clip_grad=0.5,
            bf16=config.precision == "bf16",
            params_dtype=DTYPES[config.precision],
            use_distributed_optimizer=tenant.distributed_optimizer,
        ),
        wrapped,
        use_gloo_process_groups=False,
    )
    samples = tenant.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=tenant.lr,
        min_lr=tenant.lr / 10,
        lr_warmup_steps=samples,
        lr_decay_steps=10 * samples,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=10 * samples,
        wd_incr_style="linear",
    )
    sampler = DataParallelBatchSampler(
        tenant.dataset_size, micro_batch_size=1, global_batch_size=samples, seed=tenant.seed
    )
    run = Run(replace(config, global_batch_size=samples), chunks, optimizer, scheduler)
    return _Training(run, wrapped, sampler)


@contextmanager
def opened(
    config: SmallModel, tenants: Sequence[Tenant], root: Path, *, chunks: list[Any] | None = None, **settings: Any
) -> Iterator[Live]:
    """Base, adapters and their manager, nothing resumed yet. `settings` are `AdapterManager.add`'s, for every one."""
    chunks = build_base(config) if chunks is None else chunks
    training = {tenant.name: attach(chunks, config, tenant) for tenant in tenants}
    with AdapterManager(root, model=chunks, base="the-base") as adapters:
        for tenant in tenants:
            add(adapters, tenant, training[tenant.name], **settings)
        yield Live(config, chunks, list(tenants), adapters, training)


def add(adapters: AdapterManager, tenant: Tenant, training: _Training, **settings: Any) -> None:
    adapters.add(
        tenant.name,
        tenant.config,
        optimizer=training.run.optimizer,
        scheduler=training.run.scheduler,
        data={"train": training.sampler},
        save_every=tenant.save_every,
        seed=tenant.seed,
        **settings,
    )


def train_step(live: Live, name: str) -> StepResult:
    """One step of one adapter, counted."""
    training = live.training[name]
    live.chunks[0].config.finalize_model_grads_func = partial(_finalize, training.layers)
    live.chunks[0].config.grad_scale_func = training.run.optimizer.scale_loss
    with live.adapters.active(name) as manager:
        for layers in training.layers:
            layers.zero_grad_buffer()
        training.batches = training.batches or iter(training.sampler)
        result = training.run.train_step([next(training.batches) for _ in range(manager.num_microbatches)])
    live.adapters.end_step(name, loss=result.loss, grad_norm=result.grad_norm, skipped=result.skipped)
    return result


def _finalize(layers: list[Any], base: Any, *args: Any, **kwargs: Any) -> None:
    finalize_model_grads(layers, *args, **kwargs)


def train(live: Live, *, crash_after: int | None = None) -> dict[tuple[str, int], StepResult]:
    """Train every adapter to its last step, in turn; (name, step) -> result. Raises Crash after so many steps."""
    results: dict[tuple[str, int], StepResult] = {}
    while unfinished := [t for t in live.tenants if live.adapters[t.name].step < t.steps]:
        for tenant in unfinished:
            result = train_step(live, tenant.name)
            results[tenant.name, live.adapters[tenant.name].step] = result
            if len(results) == crash_after:
                raise Crash
            if live.adapters.should_stop:
                return results
    return results


def life(
    config: SmallModel, tenants: Sequence[Tenant], root: Path, crash_after: int | None = None, **settings: Any
) -> dict[tuple[str, int], StepResult]:
    """On a rank: build, resume, train to the end (or die), save."""
    results: dict[tuple[str, int], StepResult] = {}
    try:
        with opened(config, tenants, root, **settings) as live:
            live.adapters.resume_all()
            results.update(train(live, crash_after=crash_after))
    except Crash:
        pass
    return results


def adapter_root(root: Path, name: str) -> Path:
    return root / "adapters" / encode_name(name)


def contents(checkpoint: Path) -> dict[str, tuple[Any, Any, bytes]]:
    """File name -> (tensors, index, data) of a committed checkpoint, digests checked."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        header = read_header(path)
        verify_shard(path, header)
        found[path.name] = (header.tensors, header.index, path.read_bytes()[header.data_start :])
    return found


def assert_same_checkpoint(first: Path, second: Path) -> None:
    ours, theirs = contents(first), contents(second)
    assert ours and ours.keys() == theirs.keys()
    for name in ours:
        (tensors, index, data), (_, other_index, other_data) = ours[name], theirs[name]
        assert index == other_index, f"{name}: other tensors, options or counts"
        differing = [
            t for t, span in tensors.items() if data[span.begin : span.end] != other_data[span.begin : span.end]
        ]
        assert not differing, f"{name}: {differing} differ"
