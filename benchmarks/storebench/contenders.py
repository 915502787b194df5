"""megaresume and its peers, each as a way to save this rank's state into a directory and to load it back.

All save the same state and have all of it on every rank after a load: the rank's masters, moments and random streams,
and its weights whole, which data-parallel ranks hold in common (megatron-core's own format: what its state dict holds
of the same run). Peers run in the best settings that we found; `settings` says which.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.storebench.measuring import fsync_share
from megaresume import ResumeManager
from megaresume.restoring import Options, restore_first_valid
from megaresume.state.description import Live
from megaresume.store import layout
from tests.small_models import Run

Tensors = Mapping[str, torch.Tensor]
WEIGHT = "model/"


def state_of(live: Live, captured: Tensors) -> dict[str, torch.Tensor]:
    """What peers save and load on this rank: what we do, but each weight whole instead of this replica's part of it."""
    weights = {f"{WEIGHT}{name}": parameter.tensor.detach() for name, parameter in live.parameters.items()}
    return weights | {name: tensor for name, tensor in captured.items() if not name.startswith(WEIGHT)}


@dataclass(frozen=True)
class Saving:
    """A save that has blocked as long as it had to: `wait()` until it is durable."""

    done: Callable[[], bool]
    wait: Callable[[], None]


@dataclass(frozen=True)
class Contender:
    """`save(path)` and `load(path)` are called on all ranks; `path` is a directory that does not exist yet."""

    name: str
    settings: str
    save: Callable[[Path], Saving]
    load: Callable[[Path], None] | None
    where: Callable[[Path], Path] = lambda path: path
    asynchronous: bool = False
    ours: bool = False
    needs_stand_in: bool = False
    """Whether it asks for a CUDA device even on a machine that has none."""


def _done(path: Path) -> Saving:
    """For savers that return when all is written; the harness makes it durable, which they leave undone."""
    return Saving(lambda: True, lambda: fsync_share(path))


def torch_save(tensors: Tensors) -> Contender:
    def file(path: Path) -> Path:
        return path / f"{dist.get_rank()}.pt"

    def save(path: Path) -> Saving:
        path.mkdir(parents=True, exist_ok=True)
        torch.serialization.set_crc32_options(False)
        torch.save(dict(tensors), file(path))
        return _done(path)

    def load(path: Path) -> None:
        found = torch.load(file(path), weights_only=True, mmap=True)
        for name, tensor in tensors.items():
            tensor.copy_(found[name])

    return Contender("torch.save", "a file per rank, crc32 off; load with mmap, then copy", save, load)


def safetensors_file(tensors: Tensors) -> Contender:
    def file(path: Path) -> Path:
        return path / f"{dist.get_rank()}.safetensors"

    def save(path: Path) -> Saving:
        path.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file(path))
        return _done(path)

    def load(path: Path) -> None:
        with safetensors.safe_open(file(path), "pt") as found:
            for name, tensor in tensors.items():
                tensor.copy_(found.get_tensor(name))

    return Contender("safetensors", "a file per rank, save_file; safe_open, then copy", save, load)


def _for_dcp(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Names that are one rank's own but for the weights', which replicas share: DCP then writes them once."""
    own, shared = dist.get_rank(), f"tp{parallel_state.get_tensor_model_parallel_rank()}"
    return {f"{shared if name.startswith(WEIGHT) else own}/{name}": tensor for name, tensor in tensors.items()}


def _dcp_load(tensors: Tensors) -> Callable[[Path], None]:
    return lambda path: dcp.load(_for_dcp(tensors), storage_reader=FileSystemReader(path))


def dcp_sync(tensors: Tensors, threads: int) -> Contender:
    def save(path: Path) -> Saving:
        dcp.save(_for_dcp(tensors), storage_writer=FileSystemWriter(path, thread_count=threads))
        return _done(path)

    return Contender(
        "DCP", f"{threads} threads, one file per thread; weights once for all replicas", save, _dcp_load(tensors)
    )


def dcp_async(tensors: Tensors, kind: AsyncCheckpointerType, threads: int) -> Contender:
    """The stager is kept, so that its buffers are used again."""
    in_process = kind is AsyncCheckpointerType.PROCESS
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=in_process,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)
    group = dist.new_group(backend="gloo")

    def save(path: Path) -> Saving:
        future: Any = dcp.async_save(
            _for_dcp(tensors),
            storage_writer=FileSystemWriter(path, thread_count=threads),
            process_group=group,
            async_checkpointer_type=kind,
            async_stager=stager,
        )
        future = getattr(future, "upload_completion", future)

        def wait() -> None:
            future.result()
            fsync_share(path)

        return Saving(future.done, wait)

    settings = f"{kind.value}, {threads} threads, buffers of the stager kept{', shared memory' * in_process}"
    return Contender(f"DCP async {kind.value}", settings, save, None, asynchronous=True)


def torch_dist(run: Run, sharding: str) -> Contender:
    metadata = {"distrib_optim_sharding_type": sharding, "dp_cp_group": parallel_state.get_data_parallel_group()}
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"), parallel_state.get_data_parallel_group(), True
    )

    def state(loading: bool) -> dict[str, Any]:
        model = run.chunks[0].sharded_state_dict()
        optimizer = run.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(metadata))
        return {"model": model, "optimizer": optimizer}

    def save(path: Path) -> Saving:
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state(False), str(path), strategy, content_metadata=dict(metadata))
        return _done(path)

    def load(path: Path) -> None:
        found = dist_checkpointing.load(state(True), str(path))
        run.chunks[0].load_state_dict(found["model"], strict=False)  # without TE it misses extra states of its own
        run.optimizer.load_state_dict(found["optimizer"])

    return Contender(
        f"torch_dist {sharding}", "fully parallel save over data parallelism", save, load, needs_stand_in=True
    )


def megaresume(run: Run, root: Path, *, verify: str = "load") -> list[Contender]:
    """As `end_step` saves (behind the training), as `save()` does, and loading with digests on and off."""
    manager = ResumeManager(root, model=run.chunks, optimizer=run.optimizer, stop_signals=(), save_every=1 << 60)
    manager.resume()
    manager._saver.prepare()

    def where(_: Path) -> Path:
        return root / layout.step_directory(manager.step)

    def behind(_: Path) -> Saving:
        manager.step += 1
        manager._saver.begin(manager.step, manager._target(), manager._collect)

        def wait() -> None:
            error = manager._saver.finish()
            if error is not None:
                raise error

        return Saving(lambda: not manager._saver.writing, wait)

    def waited_for(_: Path) -> Saving:
        manager.step += 1
        manager.save()
        return Saving(lambda: True, lambda: None)

    def load(verify: str) -> Callable[[Path], None]:
        def restore(_: Path) -> None:
            restore_first_valid(
                [where(root)],
                control=manager._control,
                place=manager._place,
                shape=manager._shape,
                objects=manager._objects,
                options=Options(verify=verify),
                fall_back=False,
            )

        return restore

    return [
        Contender(
            "megaresume", "as end_step saves; load verified", behind, load("load"), where, asynchronous=True, ours=True
        ),
        Contender("megaresume, waited for", "save(); load not verified", waited_for, load("none"), where, ours=True),
    ]


def all_contenders(run: Run, tensors: Tensors, directory: Path) -> list[Contender]:
    threads = max(1, (os.cpu_count() or 1) // dist.get_world_size())
    return [
        *megaresume(run, directory / "megaresume"),
        torch_save(tensors),
        safetensors_file(tensors),
        dcp_sync(tensors, max(threads, 2)),
        dcp_async(tensors, AsyncCheckpointerType.THREAD, threads),
        dcp_async(tensors, AsyncCheckpointerType.PROCESS, threads),
        torch_dist(run, "dp_reshardable"),
        torch_dist(run, "fully_reshardable"),
    ]
