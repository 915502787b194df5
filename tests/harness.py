"""A training loop through ResumeManager on the small models, and a digest of all state: what tests of resuming share.

    def test_it(ranks, tmp_path):
        config = SmallModel(tp=2)
        whole = run(ranks, config, tmp_path / "whole", 6)                                # one Outcome per rank
        run(ranks, config, tmp_path / "cut", 6, crash_at=4, save_every=2)
        resumed = run(ranks, config, tmp_path / "cut", 6, save_every=2)
        assert_continues(resumed, whole)

On a rank, `start(config)` builds the live objects, `go_on(loop, ...)` trains them through a new manager, `digest(loop)`
says what they hold. Knows nothing of what a test expects.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megaresume import DataParallelBatchSampler, ResumeManager
from megaresume.manager import ResumeReport
from megaresume.megatron.live import describe
from megaresume.megatron.rng import random_streams
from megaresume.state.rank_state import capture
from megaresume.state.registered import Registered
from megaresume.state.scheduler import capture_scheduler
from megaresume.state.tensors import host_bytes
from tests.ranks import Ranks
from tests.small_models import Run, SmallModel, StepResult, build

DATASET_SIZE = 100
"""Samples per epoch: no multiple of a global batch, so that a dozen steps cross an epoch's end inside one."""


class Crash(Exception):
    """Leaves the `with` block of a manager as a dying run does: nothing is saved, nothing collective happens."""


@dataclass
class Loop:
    """What a training script holds on one rank."""

    run: Run
    sampler: DataParallelBatchSampler


@dataclass(frozen=True)
class Outcome:
    """What a rank saw and holds at the end."""

    report: ResumeReport
    steps: dict[int, StepResult]
    """Loss, gradient norm and whether it was skipped, by step, counted from 1 as `manager.step` does."""
    state: dict[str, str]
    """`digest` at the end."""
    step: int
    """`manager.step` at the end."""
    stopped: bool
    """`manager.should_stop`."""


def start(config: SmallModel, *, shuffle: bool = True) -> Loop:
    """Build model, optimizer, scheduler and sampler from nothing. Collective over all ranks."""
    run = build(config)
    sampler = DataParallelBatchSampler(
        DATASET_SIZE,
        micro_batch_size=config.micro_batch_size,
        global_batch_size=config.global_batch_size,
        shuffle=shuffle,
        seed=config.seed,
    )
    return Loop(run, sampler)


def open_manager(loop: Loop, root: Path, **manager_args: Any) -> ResumeManager:
    """A manager of the loop's objects."""
    return ResumeManager(
        root,
        model=loop.run.chunks,
        optimizer=loop.run.optimizer,
        scheduler=loop.run.scheduler,
        data={"train": loop.sampler},
        **manager_args,
    )


def train_steps(loop: Loop, manager: ResumeManager, until: int) -> Iterator[tuple[int, StepResult]]:
    """Train through a resumed manager up to step `until` or a stop, and give each step after its `end_step`."""
    batches = iter(loop.sampler)
    while manager.step < until:
        result = loop.run.train_step([next(batches) for _ in range(manager.num_microbatches)])
        manager.end_step(loss=result.loss, grad_norm=result.grad_norm, skipped=result.skipped)
        yield manager.step, result
        if manager.should_stop:
            return


def go_on(loop: Loop, root: Path, steps: int, *, crash_at: int | None = None, **manager_args: Any) -> Outcome:
    """Resume on the loop's objects and train up to step `steps`; die wordlessly after step `crash_at`. Collective."""
    results: dict[int, StepResult] = {}
    manager = open_manager(loop, root, **manager_args)
    report: ResumeReport | None = None
    try:
        with manager:
            report = manager.resume()
            for step, result in train_steps(loop, manager, steps):
                results[step] = result
                if step == crash_at:
                    raise Crash
    except Crash:
        pass
    assert report is not None
    return Outcome(report, results, digest(loop), manager.step, manager.should_stop)


def train(config: SmallModel, root: Path, steps: int, **manager_args: Any) -> Outcome:
    """Build a run from nothing, resume what `root` holds and train up to step `steps`. Collective over all ranks."""
    return go_on(start(config), root, steps, **manager_args)


def run(pool: Ranks, config: SmallModel, root: Path, steps: int, **manager_args: Any) -> list[Outcome]:
    """`train` on the ranks of a pool; one outcome per rank. Takes `crash_at` and all arguments of the manager."""
    return pool.run(_train, config, root, steps, manager_args, world_size=config.world_size)


def _train(config: SmallModel, root: Path, steps: int, manager_args: dict[str, Any]) -> Outcome:
    return train(config, root, steps, **manager_args)


def digest(loop: Loop) -> dict[str, str]:
    """Name -> digest of everything on this rank that decides how training goes on. Changes nothing.

    All parameters and buffers in full, the tensors and the index that a save would write (masters, moments, options,
    loss scale), scheduler, sampler, micro-batches, the state of every random stream and what it draws next.
    """
    live = describe(loop.run.chunks, loop.run.optimizer)
    streams = random_streams(None)
    captured = capture(live, streams, Registered({}))
    tensors = {f"parameter/{name}": parameter.tensor for name, parameter in live.parameters.items()}
    parts = {name: _digest_of(tensor) for name, tensor in {**tensors, **captured.tensors}.items()}
    values = {
        "index": captured.index,
        "scheduler": capture_scheduler(loop.run.scheduler),
        "learning rates": [group["lr"] for group in loop.run.optimizer.param_groups],
        "sampler": loop.sampler.state_dict(),
        "micro-batches": get_num_microbatches(),
    }
    parts |= {name: _text_digest(json.dumps(value, sort_keys=True)) for name, value in values.items()}
    before = {name: stream.get() for name, stream in streams.items()}
    parts |= {f"next draws/{name}": _text_digest(repr(drawn)) for name, drawn in _draws()}
    for name, state in before.items():
        streams[name].set(state)
    return parts


def _draws() -> Iterator[tuple[str, list[float]]]:
    yield "python", [random.random() for _ in range(4)]
    yield "numpy", np.random.random(4).tolist()
    yield "torch", torch.rand(4).tolist()
    tracker = get_cuda_rng_tracker()
    for name in tracker.get_states():
        with tracker.fork(name):
            yield f"tracker.{name}", torch.rand(4).tolist()


def _digest_of(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(host_bytes(tensor)).hexdigest()}"


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """The names under which two digests differ; empty where all state is equal in every bit."""
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def assert_continues(resumed: Sequence[Outcome], whole: Sequence[Outcome]) -> None:
    """Every rank of a resumed run trained the steps of the uninterrupted one, bit for bit, and holds what it holds."""
    for rank, (ours, reference) in enumerate(zip(resumed, whole, strict=True)):
        assert ours.steps, f"rank {rank} trained no step after the resume: nothing was compared"
        expected = {step: reference.steps[step] for step in ours.steps}
        assert ours.steps == expected, f"rank {rank}: other losses or gradient norms than the uninterrupted run"
        assert ours.step == reference.step, f"rank {rank} ended at another step"
        differing = differences(ours.state, reference.state)
        assert not differing, f"rank {rank}: state differs from the uninterrupted run in {differing}"


def tree(root: Path) -> dict[str, str]:
    """Path below `root` -> digest of every file there, "directory" for directories."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        for path in sorted(root.rglob("*"))
    }
