"""Megatron's own orders, id for id: batches that Megatron-LM's samplers yielded, per rank (`source` in the file)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_runs import Run, ids_of

from megaresume.data import DataParallelBatchSampler
from megaresume.errors import ConfigurationError, DataMismatchError

TRACES = json.loads((Path(__file__).parent / "megatron_sampler_traces.json").read_text(encoding="utf-8"))["traces"]


def shuffle_of(trace: dict[str, Any]) -> str:
    if trace["kind"] == "sequential":
        return "sequential"
    return "megatron-sharded" if trace["data_sharding"] else "megatron"


@pytest.mark.parametrize("number", range(len(TRACES)))
def test_ids_are_those_of_the_trace(number: int) -> None:
    trace = TRACES[number]
    micro, width = trace["micro_batch_size"], trace["data_parallel_size"]
    for rank, expected in enumerate(trace["batches_per_rank"]):
        sampler = DataParallelBatchSampler(
            trace["total_samples"],
            micro_batch_size=micro,
            global_batch_size=micro * width,
            data_parallel_rank=rank,
            data_parallel_size=width,
            shuffle=shuffle_of(trace),
            epoch_tail="drop" if trace.get("drop_last", True) else "short",
            consumed_samples=trace["consumed_samples"],
        )
        assert len(sampler) == len(expected)
        batches = []
        for batch in sampler:
            (mask,) = sampler.masks  # where Megatron yields a shorter list, ours is padded and masked
            assert len(batch) == micro
            batches.append([sample for sample, counts in zip(batch, mask, strict=True) if counts])
            sampler.advance()
        assert batches == expected


@pytest.mark.parametrize("number", [n for n, trace in enumerate(TRACES) if trace["kind"] == "random"])
def test_accumulation_does_not_change_megatrons_micro_batches(number: int) -> None:
    """With "carry" global batches of several micro-batches run through Megatron's epochs as they do in Megatron."""
    trace = TRACES[number]
    micro, width = trace["micro_batch_size"], trace["data_parallel_size"]
    for rank, expected in enumerate(trace["batches_per_rank"]):
        sampler = DataParallelBatchSampler(
            trace["total_samples"],
            micro_batch_size=micro,
            global_batch_size=micro * width * 5,
            data_parallel_rank=rank,
            data_parallel_size=width,
            shuffle=shuffle_of(trace),
            consumed_samples=trace["consumed_samples"],
        )
        batches = iter(sampler)
        assert [next(batches) for _ in expected] == expected


def test_sharded_order_refuses_another_width_and_names_the_reason() -> None:
    settings: dict[str, Any] = dict(dataset_size=96, global_batch_size=24, shuffle="megatron-sharded")
    run = Run(width=4, micro=2, **settings)
    run.steps(2)
    with pytest.raises(DataMismatchError, match=r"data_parallel_size: checkpoint 4, this run 2.*depends on the width"):
        Run(width=2, micro=2, state=run.stop(), **settings)
    resumed = Run(width=4, micro=3, state=run.stop(), **settings)  # the micro-batch size may change: same shards
    rest = resumed.steps(2)
    assert [set(ids) for ids in ids_of(rest)] == [set(ids) for ids in ids_of(run.steps(2))]
    for step in rest:
        for rank, batches in enumerate(step.per_rank):
            assert all(sample // 24 == rank for batch in batches for sample in batch), "a rank left its shard"


def test_sharded_order_keeps_its_turns_in_mid_turn() -> None:
    settings: dict[str, Any] = dict(dataset_size=96, global_batch_size=24, shuffle="megatron-sharded")
    state = Run(width=4, micro=2, consumed_samples=12, **settings).stop()
    with pytest.raises(DataMismatchError, match="micro_batch_size: checkpoint 2, this run 3"):
        Run(width=4, micro=3, state=state, **settings)


def test_unsharded_order_lets_the_width_change_where_the_epoch_stays() -> None:
    settings: dict[str, Any] = dict(dataset_size=97, global_batch_size=24, shuffle="megatron")
    run = Run(width=4, micro=2, **settings)
    run.steps(3)
    state = run.stop()
    whole = run.steps(4)
    resumed = Run(width=2, micro=4, state=state, **settings).steps(4)
    assert [set(ids) for ids in ids_of(resumed)] == [set(ids) for ids in ids_of(whole)]
    with pytest.raises(DataMismatchError, match="permutation_size: checkpoint 96, this run 97"):
        Run(width=2, micro=1, state=state, **settings)
    state = Run(width=1, micro=1, **settings).stop()
    with pytest.raises(DataMismatchError, match="epoch_length: checkpoint 97, this run 96"):
        Run(width=2, micro=1, state=state, **settings)


def test_leaving_the_sharded_order_finishes_its_epoch_on_any_cut() -> None:
    settings: dict[str, Any] = dict(dataset_size=24, global_batch_size=12, epoch_tail="carry")
    run = Run(width=4, micro=1, shuffle="megatron-sharded", **settings)
    state, seen = run.stop(), run.steps(1)
    state = run.stop()
    left = Run(width=1, micro=4, shuffle=True, state=state, allow=frozenset({"shuffle"}), **settings)
    assert sorted(seen[0].ids + left.step().ids) == list(range(24))
    assert left.samplers[0].epoch == 1
    assert left.step().ids == Run(width=3, micro=2, consumed_samples=24, **settings).step().ids


def test_megatrons_orders_take_no_seed() -> None:
    with pytest.raises(ConfigurationError, match=r"seed must be 0, got 3"):
        Run(dataset_size=10, width=1, global_batch_size=2, shuffle="megatron", seed=3)
