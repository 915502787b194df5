"""Data positions on real ranks: counted once however many ranks read a sample, saved, and gone on from, by the manager.

The order itself is tested in tests/data; here are the counters, validation's own, ramp-up and changed settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches, reconfigure_num_microbatches_calculator
from torch.utils.data import IterableDataset

from megaresume import DataParallelBatchSampler, ResumableDataLoader, ResumeManager
from megaresume.data import BatchSizeSchedule
from megaresume.errors import DataMismatchError, StateMismatchError
from megaresume.megatron.parallel import update_microbatches
from tests.harness import open_manager, start
from tests.ranks import Ranks
from tests.small_models import Run, SmallModel, build

CONFIG = SmallModel(tp=2, pp=2, dp=2, global_batch_size=8)


@dataclass
class Setup:
    run: Run
    train: DataParallelBatchSampler
    valid: DataParallelBatchSampler
    manager: ResumeManager


def setup(config: SmallModel, root: Path, *, global_batch_size: Any = 8, seed: int = 0, **manager_args: Any) -> Setup:
    run = build(config)
    train = DataParallelBatchSampler(200, micro_batch_size=1, global_batch_size=global_batch_size, seed=seed)
    valid = DataParallelBatchSampler(40, micro_batch_size=1, global_batch_size=4, shuffle=False)
    manager = ResumeManager(
        root,
        model=run.chunks,
        optimizer=run.optimizer,
        scheduler=run.scheduler,
        data={"train": train, "valid": valid},
        **manager_args,
    )
    manager.resume()
    return Setup(run, train, valid, manager)


def train_steps(now: Setup, until: int, *, valid_every: int | None = None) -> dict[str, list[Any]]:
    """The ids this rank trained and validated on, and the micro-batches per step. Only first and last stages read."""
    reads = parallel_state.is_pipeline_first_stage() or parallel_state.is_pipeline_last_stage()
    seen: dict[str, list[Any]] = {"train": [], "valid": [], "microbatches": []}
    loader = iter(ResumableDataLoader(range(200), batch_sampler=now.train, collate_fn=list)) if reads else None
    ids = iter(now.train)
    while now.manager.step < until:
        count = now.manager.num_microbatches
        assert count == get_num_microbatches(), "megatron's own calculator is at another place"
        batches = [next(ids) for _ in range(count)]
        if loader is not None:
            assert [next(loader) for _ in range(count)] == batches
        result = now.run.train_step(batches)
        now.manager.end_step(loss=result.loss, grad_norm=result.grad_norm, skipped=result.skipped)
        seen["train"].append(batches)
        seen["microbatches"].append(count)
        if valid_every is not None and now.manager.step % valid_every == 0:
            validation = iter(now.valid)
            seen["valid"].append([next(validation) for _ in range(2 * now.valid.num_microbatches)])
            now.manager.advance("valid", batches=2)
    return seen


def whole_and_cut(config: SmallModel, root: Path) -> dict[str, Any]:
    now = setup(config, root / "whole")
    with now.manager:
        whole = train_steps(now, 6, valid_every=2)
    now = setup(config, root / "cut")
    with now.manager:
        first = train_steps(now, 5, valid_every=2)
    now = setup(config, root / "cut")
    resumed_at = (now.train.consumed_samples, now.valid.consumed_samples)
    with now.manager:
        second = train_steps(now, 6, valid_every=2)
    place = (parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank())
    return {"whole": whole, "first": first, "second": second, "resumed at": resumed_at, "place": place}


def test_d27_d28_replicas_count_once_and_validation_has_its_own_counter(ranks: Ranks, tmp_path: Path) -> None:
    seen = ranks.run(whole_and_cut, CONFIG, tmp_path, world_size=8)
    state = json.loads((tmp_path / "cut" / "step-00000005" / "trainer_state.json").read_text())
    assert (state["consumed_train_samples"], state["consumed_valid_samples"]) == (40, 16)
    for each in seen:
        assert each["resumed at"] == (40, 16)
        for source in ("train", "valid"):
            assert each["first"][source] + each["second"][source] == each["whole"][source]
        peers = [other for other in seen if other["place"][0] == each["place"][0]]
        assert len(peers) == 4
        assert all(other["whole"] == each["whole"] for other in peers)
    by_rank = {each["place"][0]: each["whole"]["train"] for each in seen}
    for step in range(6):
        ids = [sample for rank in (0, 1) for batch in by_rank[rank][step] for sample in batch]
        assert len(ids) == len(set(ids)) == 8


def ramp(config: SmallModel, root: Path) -> dict[str, Any]:
    """A ramp-up 4 -> 12 in steps of 4 over 24 samples; cut in the middle of a stage and exactly at a change."""
    schedule = BatchSizeSchedule.ramp_up(12, start=4, increment=4, samples=24)

    def start(name: str) -> Setup:
        now = setup(config, root / name, global_batch_size=schedule)
        # The small model's own calculator is constant; a run that ramps up gives megatron's the ramp too.
        reconfigure_num_microbatches_calculator(1, [4, 4, 24], 12, 1, config.dp)
        update_microbatches(now.train.consumed_samples)
        return now

    now = start("whole")
    with now.manager:
        whole = train_steps(now, 8)
    outcomes = {"whole": whole}
    for cut in (2, 3, 5):
        now = start(f"cut-{cut}")
        with now.manager:
            first = train_steps(now, cut)
        now = start(f"cut-{cut}")
        with now.manager:
            second = train_steps(now, 8)
        outcomes[f"cut {cut}"] = {key: first[key] + second[key] for key in ("train", "valid", "microbatches")}
    return outcomes


def test_d15_a_ramp_up_goes_on_where_it_was(ranks: Ranks, tmp_path: Path) -> None:
    for each in ranks.run(ramp, SmallModel(dp=2, global_batch_size=12), tmp_path, world_size=2):
        whole = each.pop("whole")
        assert len(set(whole["microbatches"])) == 3, "the ramp has three sizes"
        for cut, joined in each.items():
            assert joined == whole, cut


def changed_settings(config: SmallModel, root: Path) -> dict[str, Any]:
    now = setup(config, root)
    with now.manager:
        train_steps(now, 3)
    with pytest.raises(DataMismatchError) as refusal:
        setup(config, root, global_batch_size=4, seed=7)
    now = setup(config, root, global_batch_size=4, seed=7, allow_data_change={"global_batch_size", "seed"})
    with now.manager:
        consumed = now.train.consumed_samples
        ids = train_steps_without_calculator(now, 4)
    return {"refusal": str(refusal.value), "consumed": consumed, "ids": ids}


def train_steps_without_calculator(now: Setup, until: int) -> list[Any]:
    ids = iter(now.train)
    seen = []
    while now.manager.step < until:
        batches = [next(ids) for _ in range(now.manager.num_microbatches)]
        result = now.run.train_step(batches)
        now.manager.end_step(loss=result.loss, grad_norm=result.grad_norm)
        seen.append(batches)
    return seen


def test_d14_d22_changed_settings_are_refused_or_recorded(ranks: Ranks, tmp_path: Path) -> None:
    seen = ranks.run(changed_settings, SmallModel(dp=2, global_batch_size=8), tmp_path, world_size=2)
    assert len({each["refusal"] for each in seen}) == 1, "the same words on every rank"
    for word in ("global_batch_size", "8", "4"):
        assert word in seen[0]["refusal"]
    assert [each["consumed"] for each in seen] == [24, 24]
    attempt = json.loads((tmp_path / "attempts" / "000002.json").read_text())
    assert attempt["changes"] == ["data"]
    state = json.loads((tmp_path / "step-00000004" / "trainer_state.json").read_text())
    assert state["consumed_train_samples"] == 28
    assert [anchor["consumed_samples"] for anchor in state["data"]["train"]["anchors"]] == [0, 24]


class Stream(IterableDataset):
    """A stream with a state: this data-parallel rank's share of the numbers from 0 on."""

    def __init__(self, rank: int, width: int) -> None:
        self.rank, self.width, self.position = rank, width, 0

    def __iter__(self) -> Iterator[int]:
        while True:
            number = self.position * self.width + self.rank
            self.position += 1
            yield number

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train_on_a_stream(config: SmallModel, root: Path, until: int, num_workers: int = 0) -> list[list[int]]:
    run = build(config)
    stream = Stream(parallel_state.get_data_parallel_rank(), config.dp)
    loader = ResumableDataLoader(
        stream, batch_size=1, global_batch_size=config.global_batch_size, collate_fn=list, num_workers=num_workers
    )
    seen = []
    with ResumeManager(
        root, model=run.chunks, optimizer=run.optimizer, scheduler=run.scheduler, data={"train": loader}
    ) as manager:
        manager.resume()
        batches = iter(loader)
        while manager.step < until:
            ids = [next(batches) for _ in range(manager.num_microbatches)]
            result = run.train_step(ids)
            manager.end_step(loss=result.loss, grad_norm=result.grad_norm)
            seen.append(ids)
    return seen


def test_d20_every_rank_gets_its_own_stream_back(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(tp=2, dp=2)
    whole = ranks.run(train_on_a_stream, config, tmp_path / "whole", 4, world_size=4)
    first = ranks.run(train_on_a_stream, config, tmp_path / "cut", 2, world_size=4)
    second = ranks.run(train_on_a_stream, config, tmp_path / "cut", 4, world_size=4)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert whole[0] == whole[1] != whole[2] == whole[3], "tensor-parallel peers read the same, data-parallel ranks not"
    with pytest.raises(StateMismatchError, match="num_workers"):
        ranks.run(train_on_a_stream, config, tmp_path / "cut", 6, 1, world_size=4)


def samples_by_step(config: SmallModel, root: Path, until: int) -> list[list[list[int]]]:
    loop = start(config)
    seen = []
    with open_manager(loop, root) as manager:
        manager.resume()
        batches = iter(loop.sampler)
        while manager.step < until:
            step = [next(batches) for _ in range(manager.num_microbatches)]
            result = loop.run.train_step(step)
            manager.end_step(loss=result.loss, grad_norm=result.grad_norm)
            seen.append(step)
    return seen


def test_s05_another_micro_batch_of_the_same_global_batch_sees_the_same_samples(ranks: Ranks, tmp_path: Path) -> None:
    four_times_one, once_four = (SmallModel(micro_batch_size=size, global_batch_size=4) for size in (1, 4))
    (whole,) = ranks.run(samples_by_step, four_times_one, tmp_path / "whole", 6, world_size=1)
    ranks.run(samples_by_step, four_times_one, tmp_path / "cut", 3, world_size=1)
    (resumed,) = ranks.run(samples_by_step, once_four, tmp_path / "cut", 6, world_size=1)
    assert [len(step) for step in whole] == [4] * 6 and [len(step) for step in resumed] == [1] * 3
    assert [sorted(sum(step, [])) for step in resumed] == [sorted(sum(step, [])) for step in whole[3:]]
