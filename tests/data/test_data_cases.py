"""What went wrong for people who resume training, case by case: the data and sampler cases that need no loader."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from data_runs import Run, ids_of

from megaresume.data import BatchSizeSchedule, DataParallelBatchSampler
from megaresume.errors import ConfigurationError, DataMismatchError


def reference(number: int, **settings: Any) -> list[Any]:
    return Run(**settings).steps(number)


def test_d01_skip_comes_before_the_split_by_rank() -> None:
    settings: dict[str, Any] = dict(
        dataset_size=100, width=4, global_batch_size=8, shuffle=False, epoch_tail="short", epochs=1
    )
    whole = reference(13, **settings)
    run = Run(**settings, consumed_samples=40)
    resumed = run.steps(8)
    assert [step.per_rank for step in resumed] == [step.per_rank for step in whole[5:]]
    seen = [sample for step in whole[:5] + resumed for sample in step.ids]
    assert sorted(seen) == list(range(100))
    assert seen[40:48] == list(range(40, 48))


@pytest.mark.parametrize("restore_first", [True, False])
def test_d02_order_does_not_follow_any_global_random_state(restore_first: bool) -> None:
    def train() -> None:
        random.random(), np.random.rand(3), torch.rand(3)

    settings: dict[str, Any] = dict(dataset_size=64, width=1, global_batch_size=4, seed=5)
    run = Run(**settings)
    ids = []
    for _ in range(5):
        ids += run.step().ids
        train()
    saved, states = run.stop(), (random.getstate(), np.random.get_state(), torch.get_rng_state())
    for seed in (7, 8):  # another process, with another random state
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        resumed = Run(**settings)
        iterators = None if restore_first else [iter(sampler) for sampler in resumed.samplers]
        random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
        del iterators
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        for sampler in resumed.samplers:
            sampler.load_state_dict(saved)
        rest = [sample for step in resumed.steps(11) for sample in step.ids]
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert sorted(ids + rest) == list(range(64))
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:], "the sampler drew from a global generator"
    assert ids + rest == [sample for step in reference(16, **settings) for sample in step.ids]


@pytest.mark.parametrize("tail", ["carry", "drop", "short"])
def test_d03_epoch_reaches_the_order_after_a_resume(tail: str) -> None:
    settings: dict[str, Any] = dict(dataset_size=80, width=2, global_batch_size=8, epoch_tail=tail, seed=3)
    whole = ids_of(reference(30, **settings))
    run = Run(**settings)
    run.steps(17)
    assert run.samplers[0].epoch == 1
    resumed = Run(**settings, state=run.stop())
    assert ids_of(resumed.steps(13)) == whole[17:]
    epochs = [sum(whole[first : first + 10], []) for first in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(80)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("tail", ["drop", "short"])
def test_d05_offset_belongs_to_its_own_epoch_only(tail: str) -> None:
    samplers = [
        DataParallelBatchSampler(
            32,
            micro_batch_size=2,
            global_batch_size=8,
            data_parallel_rank=rank,
            data_parallel_size=4,
            consumed_samples=8,
            epoch_tail=tail,  # type: ignore[arg-type]
            epochs=3,
        )
        for rank in range(4)
    ]
    for number in (24, 32, 32, 0):  # the last: all epochs are over
        lengths = [len(sampler) for sampler in samplers]
        passes = [list(sampler) for sampler in samplers]
        assert [len(batches) for batches in passes] == lengths
        assert len({sample for batches in passes for batch in batches for sample in batch}) == number
        assert sum(len(batch) for batches in passes for batch in batches) == number


@pytest.mark.parametrize("tail", ["carry", "drop", "short"])
def test_d07_checkpoint_on_the_end_of_an_epoch(tail: str) -> None:
    settings: dict[str, Any] = dict(dataset_size=48, width=2, global_batch_size=8, epoch_tail=tail, epochs=3)
    whole = ids_of(reference(18, **settings))
    run = Run(**settings)
    run.steps(6)
    state = run.stop()
    assert (state["consumed_samples"], state["epoch"], state["offset"]) == (48, 1, 0)
    resumed = Run(**settings, state=state)
    assert ids_of(resumed.steps(12)) == whole[6:]
    assert resumed.samplers[0].finished


def test_d08_consumed_beyond_the_dataset_uses_the_usable_length() -> None:
    sampler = DataParallelBatchSampler(
        50,
        micro_batch_size=4,
        global_batch_size=8,
        data_parallel_rank=0,
        data_parallel_size=2,
        shuffle=False,
        epoch_tail="drop",
        consumed_samples=112,
    )
    assert (sampler.epoch, len(sampler)) == (2, 4)
    assert list(sampler) == [[start, start + 1, start + 2, start + 3] for start in (16, 24, 32, 40)]


@pytest.mark.parametrize("tail", ["carry", "drop", "short"])
def test_d09_first_batch_after_any_checkpoint_is_the_next_one(tail: str) -> None:
    settings: dict[str, Any] = dict(dataset_size=30, width=2, global_batch_size=4, epoch_tail=tail)
    whole = ids_of(reference(20, **settings))
    run = Run(**settings)
    for step in range(1, 20):
        run.step()
        assert Run(**settings, state=run.stop()).step().ids == whole[step]


def test_d13_width_changes_and_progress_is_in_global_samples() -> None:
    settings: dict[str, Any] = dict(dataset_size=64, global_batch_size=16, micro=2)
    whole = ids_of(reference(4, width=2, **settings))
    run = Run(width=2, **settings)
    run.steps(2)
    for width in (4, 1):
        assert ids_of(Run(width=width, state=run.stop(), **settings).steps(2)) == whole[2:]
    with pytest.raises(ConfigurationError, match=r"global_batch_size 16 .* data_parallel_size 3 .*\[1, 2, 4, 8\]"):
        Run(width=3, **settings)


def test_d14_changed_batch_size_is_refused_or_goes_on_from_the_next_sample() -> None:
    settings: dict[str, Any] = dict(dataset_size=400, width=2)
    run = Run(global_batch_size=8, **settings)
    run.steps(10)
    state = run.stop()
    with pytest.raises(DataMismatchError, match="global_batch_size: checkpoint 8, this run 16"):
        Run(global_batch_size=16, state=state, **settings)
    changed = Run(global_batch_size=16, state=state, allow=frozenset({"global_batch_size"}), **settings)
    assert changed.consumed == 80
    uninterrupted = sum(ids_of(reference(25, global_batch_size=8, **settings)), [])
    assert sum(ids_of(changed.steps(5)), []) == uninterrupted[80:160]
    assert changed.consumed == 160
    # and once more: the change is recorded, the new size is now the one to compare with
    again = Run(global_batch_size=16, state=changed.stop(), **settings)
    assert again.step().ids == uninterrupted[160:176]
    sizes = [anchor["settings"]["global_batch_size"] for anchor in again.stop()["anchors"]]
    assert sizes == [[[0, 8]], [[0, 16]]]


@pytest.mark.parametrize("stop", [1, 3, 4, 6, 8, 9, 10, 15])
@pytest.mark.parametrize("tail", ["carry", "drop", "short"])
def test_d15_ramp_position_is_a_function_of_consumed_samples(stop: int, tail: str) -> None:
    ramp = BatchSizeSchedule(((0, 4), (12, 8), (36, 12), (72, 16)))  # 3 steps each
    settings: dict[str, Any] = dict(dataset_size=70, width=2, micro=2, epoch_tail=tail)
    whole = ids_of(reference(20, global_batch_size=ramp, **settings))
    if tail == "carry":
        assert [len(ids) for ids in whole[:10]] == [4, 4, 4, 8, 8, 8, 12, 12, 12, 16]
    run = Run(global_batch_size=ramp, **settings)
    run.steps(stop)
    state = run.stop()
    assert ids_of(Run(global_batch_size=ramp, state=state, **settings).steps(20 - stop)) == whole[stop:]
    other = BatchSizeSchedule(((0, 4), (12, 16)))
    with pytest.raises(DataMismatchError, match=r"global_batch_size: checkpoint \[4 from 0, 8 from 12"):
        Run(global_batch_size=other, state=state, **settings)
    allowed = Run(global_batch_size=other, state=state, allow=frozenset({"global_batch_size"}), **settings)
    assert allowed.consumed == run.consumed


@pytest.mark.parametrize("accumulation", [4, 3])
def test_d16_accumulation_counts_micro_batches_once(accumulation: int) -> None:
    settings: dict[str, Any] = dict(
        dataset_size=100, width=1, micro=1, global_batch_size=accumulation, shuffle=False, epoch_tail="carry"
    )
    run = Run(**settings)
    run.steps(30)
    state = run.stop()
    done = 30 * accumulation
    assert (state["consumed_samples"], state["epoch"], state["offset"]) == (done, done // 100, done % 100)
    resumed = Run(**settings, state=state)
    assert resumed.step().per_rank == [[[(done + number) % 100] for number in range(accumulation)]]


@pytest.mark.parametrize("batch", [4, 8])
def test_d18_short_tail_sees_every_sample_and_ranks_stay_level(batch: int) -> None:
    settings: dict[str, Any] = dict(dataset_size=30, width=4, global_batch_size=batch, epoch_tail="short")
    run = Run(**settings)
    whole = run.steps(20 * -(-30 // batch))
    assert Counter(sample for step in whole for sample in step.ids) == dict.fromkeys(range(30), 20)
    assert run.samplers[0].epoch == 20
    for step in whole:
        assert len({len(batches) for batches in step.per_rank}) == 1
        assert all(len(batch) == 1 for batches in step.per_rank for batch in batches)
        assert {sample for batches in step.per_rank for batch in batches for sample in batch} == set(step.ids)
    per_epoch = -(-30 // batch)
    for stop in (per_epoch - 1, per_epoch):  # before and after the short batch
        run = Run(**settings)
        run.steps(stop)
        resumed = Run(**settings, state=run.stop())
        assert resumed.steps(5) == whole[stop : stop + 5]


def test_d18_drop_tail_drops_another_tail_in_each_epoch() -> None:
    settings: dict[str, Any] = dict(dataset_size=30, width=4, global_batch_size=8, epoch_tail="drop")
    run = Run(**settings)
    epochs = [sum(ids_of(run.steps(3)), []) for _ in range(20)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert len({tuple(sorted(set(range(30)) - set(epoch))) for epoch in epochs}) > 10


@pytest.mark.parametrize("width", [1, 4])
def test_d19_dataset_smaller_than_a_batch(width: int) -> None:
    with pytest.raises(ConfigurationError, match=f"global_batch_size 4 .* 3 samples .* data_parallel_size {width}"):
        Run(dataset_size=3, width=width, global_batch_size=4, epoch_tail="drop")


@pytest.mark.parametrize("tail", ["carry", "drop", "short"])
def test_d19_nothing_left_of_the_last_epoch_is_a_normal_end(tail: Any) -> None:
    sampler = DataParallelBatchSampler(
        12,
        micro_batch_size=4,
        global_batch_size=4,
        data_parallel_rank=0,
        data_parallel_size=1,
        epochs=1,
        consumed_samples=12,
        epoch_tail=tail,
    )
    assert sampler.finished and len(sampler) == 0 and sampler.num_microbatches == 0 and sampler.masks == []
    assert list(sampler) == [] and list(sampler) == []
    with pytest.raises(ConfigurationError, match="all 1 epochs are trained"):
        sampler.advance()
    with pytest.raises(ConfigurationError, match="16 lies beyond the end"):
        sampler.seek(16)


@pytest.mark.parametrize(
    ("field", "changed", "values"),
    [
        ("dataset_size", {"dataset_size": 120}, "100, this run 120"),
        ("dataset_size", {"dataset_size": 80}, "100, this run 80"),
        ("seed", {"seed": 2}, "1, this run 2"),
        ("shuffle", {"shuffle": False}, "feistel, this run sequential"),
        ("epoch_tail", {"epoch_tail": "drop"}, "carry, this run drop"),
        ("fingerprint", {"fingerprint": {"name": "b"}}, "name='a', this run name='b'"),
    ],
)
def test_d22_changed_data_is_refused_or_recorded(field: str, changed: dict[str, Any], values: str) -> None:
    settings: dict[str, Any] = dict(dataset_size=100, width=2, global_batch_size=10, seed=1, fingerprint={"name": "a"})
    run = Run(**settings)
    before = sum(ids_of(run.steps(7)), [])
    state = run.stop()
    with pytest.raises(DataMismatchError, match=f"{field}: checkpoint {values}.*allow_data_change"):
        Run(**{**settings, **changed}, state=state)
    resumed = Run(**{**settings, **changed}, state=state, allow=frozenset({field}))
    rest = sum(ids_of(resumed.steps(3)), [])
    if changed != {"dataset_size": 80}:
        # the epoch under way is finished in its own order: nothing is repeated, nothing is lost
        assert sorted(before + rest) == list(range(100))
    else:
        assert max(rest) < 80 and resumed.samplers[0].epoch == 1
    anchors = resumed.stop()["anchors"]
    assert [anchor["consumed_samples"] for anchor in anchors] == [0, 70]
    assert anchors[0]["settings"][field] != anchors[1]["settings"][field]
    if field in ("seed", "shuffle", "fingerprint"):  # later epochs are those of a run that always had the new settings
        resumed.steps(10)
        assert resumed.step().ids == Run(**{**settings, **changed}, consumed_samples=200).step().ids


def test_d26_chain_of_widths_loses_nothing() -> None:
    settings: dict[str, Any] = dict(dataset_size=120, global_batch_size=12, epoch_tail="drop")
    run, seen, state = None, [], None
    for width, steps in ((4, 3), (3, 5), (4, 2)):
        run = Run(width=width, state=state, **settings)
        seen += ids_of(run.steps(steps))
        state = run.stop()
    assert seen == ids_of(reference(10, width=1, **settings))
    assert sorted(sum(seen, [])) == list(range(120))


def test_d27_replicas_of_a_data_parallel_rank_agree() -> None:
    # tp 2 x pp 2 x dp 2: eight samplers of which four each have one data-parallel coordinate
    def fleet(consumed: int) -> list[DataParallelBatchSampler]:
        return [
            DataParallelBatchSampler(
                80,
                micro_batch_size=2,
                global_batch_size=8,
                data_parallel_rank=rank % 2,
                data_parallel_size=2,
                consumed_samples=consumed,
            )
            for rank in range(8)
        ]

    def train(samplers: list[DataParallelBatchSampler]) -> list[list[list[int]]]:
        read = []
        for sampler in samplers:
            batches = iter(sampler)
            read.append([next(batches) for _ in range(5 * sampler.num_microbatches)])
            for _ in range(5):
                sampler.advance()
        return read

    for consumed in (0, 40):
        samplers = fleet(consumed)
        read = train(samplers)
        assert {sampler.consumed_samples for sampler in samplers} == {consumed + 40}
        assert all(batches == read[rank % 2] for rank, batches in enumerate(read))
        ids = [sorted(sum(batches, [])) for batches in read[:2]]
        assert not set(ids[0]) & set(ids[1])


def test_d28_validation_has_a_sampler_and_a_counter_of_its_own() -> None:
    def validation() -> DataParallelBatchSampler:
        return DataParallelBatchSampler(
            40, micro_batch_size=4, global_batch_size=4, data_parallel_rank=0, data_parallel_size=1, shuffle=False
        )

    def validate(sampler: DataParallelBatchSampler) -> list[list[int]]:
        batches = iter(sampler)
        read = [next(batches) for _ in range(2)]
        sampler.advance(), sampler.advance()
        return read

    train, valid = Run(dataset_size=100, width=1, global_batch_size=4), validation()
    whole = validation()
    curve = [validate(whole) for _ in range(3)]
    for _ in range(2):
        train.steps(5)
        validate(valid)
    resumed = validation()
    resumed.load_state_dict(valid.state_dict())
    assert (train.consumed, resumed.consumed_samples) == (40, 16)
    assert validate(resumed) == curve[2] == [[16, 17, 18, 19], [20, 21, 22, 23]]


def test_d32_short_batches_count_what_they_hold() -> None:
    settings: dict[str, Any] = dict(dataset_size=30, width=2, global_batch_size=8, epoch_tail="short", epochs=3)
    whole = reference(12, **settings)
    run, consumed = Run(**settings), []
    for step in range(12):
        resumed = Run(**settings, state=run.stop())
        assert resumed.step() == whole[step]
        run.step()
        consumed.append(run.consumed)
    assert consumed == [8, 16, 24, 30, 38, 46, 54, 60, 68, 76, 84, 90]
