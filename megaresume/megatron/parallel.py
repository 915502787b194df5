"""Where this rank stands: megatron-core's `parallel_state` (checked with 0.14 and 0.16.1) as a Topology, a Coordinate
and replica groups.

Without `parallel_state` every rank is a data-parallel one, without torch.distributed there is one rank.
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from megaresume.state.description import ReplicaGroup
from megaresume.topology import DEFAULT_ORDER, Coordinate, Topology, coordinate_of_rank


def global_rank() -> int:
    """This rank's number in the world, 0 without torch.distributed."""
    return int(dist.get_rank()) if _distributed() else 0


def world_size() -> int:
    """The number of ranks, 1 without torch.distributed."""
    return int(dist.get_world_size()) if _distributed() else 1


def data_parallel_coordinate() -> tuple[int, int]:
    """(rank, size) in data parallelism, context parallelism not counted."""
    state = _parallel_state()
    if state is None:
        return global_rank(), world_size()
    return int(state.get_data_parallel_rank()), int(state.get_data_parallel_world_size())


def reports_loss() -> bool:
    """Whether the loss is counted from this rank: tensor rank 0 of the last pipeline stage (of every data and context
    rank)."""
    state = _parallel_state()
    if state is None:
        return True
    last_stage = state.get_pipeline_model_parallel_rank() == state.get_pipeline_model_parallel_world_size() - 1
    return bool(last_stage and state.get_tensor_model_parallel_rank() == 0)


def read_topology(extra: dict[str, int] | None = None) -> Topology:
    """The sizes and rank order of this run; `extra` are axes the user declares. Not collective."""
    state = _parallel_state()
    if state is None:
        return Topology(tp=1, pp=1, dp=world_size(), extra=extra or {})
    return Topology(
        tp=state.get_tensor_model_parallel_world_size(),
        pp=state.get_pipeline_model_parallel_world_size(),
        dp=state.get_data_parallel_world_size(),
        cp=state.get_context_parallel_world_size(),
        ep=state.get_expert_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_world_size(),
        vpp=state.get_virtual_pipeline_model_parallel_world_size() or 1,
        order=_rank_order(state),
        extra=extra or {},
    )


def read_coordinate(topology: Topology) -> Coordinate:
    """This rank's position on each axis, as megatron-core has it."""
    state = _parallel_state()
    if state is None:
        return coordinate_of_rank(global_rank(), topology)
    return Coordinate(
        tp=state.get_tensor_model_parallel_rank(),
        pp=state.get_pipeline_model_parallel_rank(),
        dp=state.get_data_parallel_rank(),
        cp=state.get_context_parallel_rank(),
        ep=state.get_expert_model_parallel_rank(),
        etp=state.get_expert_tensor_parallel_rank(),
    )


def replica_groups() -> dict[str, ReplicaGroup]:
    """The groups over which model tensors are equal: "dense" (data x context parallel) and "expert" (expert data
    parallel)."""
    state = _parallel_state()
    if state is None:
        world = dist.group.WORLD if _distributed() else None
        return {"dense": _replica_group(world)}
    groups = {"dense": _replica_group(state.get_data_parallel_group(with_context_parallel=True))}
    # Where their grid is the dense one, experts have the dense replicas.
    expert_grid = (state.get_expert_model_parallel_world_size(), state.get_expert_tensor_parallel_world_size())
    if expert_grid != (1, state.get_tensor_model_parallel_world_size()):
        groups["expert"] = _replica_group(state.get_expert_data_parallel_group())
    return groups


def update_microbatches(consumed_train_samples: int) -> None:
    """Move megatron-core's global micro-batch calculator, where the run has one, to this number of consumed samples."""
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    if calculator is not None and calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None:
        calculator.update_num_microbatches(consumed_train_samples, consistency_check=False)


def _replica_group(group: Any | None) -> ReplicaGroup:
    if group is None:
        return ReplicaGroup(0, 1, None)
    return ReplicaGroup(dist.get_rank(group), dist.get_world_size(group), group)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _parallel_state() -> Any | None:
    # A run that never imported megatron-core has no parallel state; importing it here to find that out would cost it 8
    # s.
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and _distributed() and state.model_parallel_is_initialized() else None


def _rank_order(state: Any) -> str:
    """megatron-core does not keep the order it was given; the distance between neighbours in each group tells it."""
    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "ep": state.get_expert_model_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
    }
    strides = {}
    for axis, group in groups.items():
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            strides[axis] = ranks[1] - ranks[0]
    default = DEFAULT_ORDER.split("-")
    # cp and ep live in two grids and may share a stride; among equals, and for axes of size 1, the default order
    # stands.
    by_stride = sorted(strides, key=lambda axis: (strides[axis], default.index(axis)))
    order = iter(by_stride)
    return "-".join(next(order) if axis in strides else axis for axis in default)
