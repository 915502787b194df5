"""Resuming on the same topology gives back every bit: all state on every rank, what is drawn next, and the steps that
follow.

Real megatron-core runs on gloo ranks. Also shown by counting: what a save sends, what its files cover, what a load
opens.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megaresume import resume_from_checkpoint
from megaresume.megatron.live import describe
from megaresume.state import rank_state
from megaresume.store import fs, layout, shard
from tests import harness
from tests.harness import Loop, Outcome, assert_continues, differences, digest, go_on, start
from tests.ranks import Ranks
from tests.small_models import SmallModel

STEPS, SAVE_EVERY, CRASH_AT = 5, 2, 3

CONFIGS = {
    "1x1x8": SmallModel(dp=8),
    "2x2x2 swiglu": SmallModel(tp=2, pp=2, dp=2, swiglu=True),
    "4x2x1": SmallModel(tp=4, pp=2),
    "1x4x2 virtual pipeline": SmallModel(pp=4, dp=2, vpp=2, num_layers=8),
    "1x2x4 experts": SmallModel(pp=2, dp=4, ep=2, moe=True),
    "fp16, loss scale backed off": SmallModel(dp=2, precision="fp16"),
    "fp32, untied": SmallModel(tp=2, dp=2, precision="fp32", tied=False),
    "plain optimizer": SmallModel(tp=2, pp=2, distributed_optimizer=False),
    "plain fp32 optimizer": SmallModel(dp=2, distributed_optimizer=False, precision="fp32"),
}


def whole_cut_and_resumed(config: SmallModel, root: Path) -> dict[str, Outcome]:
    """On a rank: the uninterrupted run, the cut one, its resume on fresh objects, and one on objects that trained
    on."""
    outcomes = {"whole": harness.train(config, root / "whole", STEPS)}
    cut = start(config)
    go_on(cut, root / "cut", STEPS, crash_at=CRASH_AT, save_every=SAVE_EVERY)
    outcomes["fresh objects"] = harness.train(config, root / "cut", STEPS, save_every=SAVE_EVERY)
    # Back to the same checkpoint on objects that are three steps further: nothing of those steps may remain.
    again = {"save_every": SAVE_EVERY, "resume_from": SAVE_EVERY}
    outcomes["trained objects"] = go_on(cut, root / "cut", STEPS, **again)
    return outcomes


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_resumed_run_is_the_uninterrupted_one(ranks: Ranks, tmp_path: Path, config: SmallModel) -> None:
    outcomes = ranks.run(whole_cut_and_resumed, config, tmp_path, world_size=config.world_size)
    whole = [each["whole"] for each in outcomes]
    for kind in ("fresh objects", "trained objects"):
        resumed = [each[kind] for each in outcomes]
        assert [each.report.step for each in resumed] == [SAVE_EVERY] * config.world_size
        assert_continues(resumed, whole)
        assert [each.report.notes for each in resumed] == [()] * config.world_size, "a plain resume has nothing to say"
    if config.precision == "fp16":
        assert whole[0].steps[1].skipped, "the loss scale never backed off: this run does not show what it is for"
    events = [json.loads(line) for line in (tmp_path / "cut" / "events.jsonl").read_text().splitlines()]
    # The crash took the line of the one step after the save with it; the second resume replays three that are logged.
    verdicts = [(each["verdict"], each["compared"]) for each in events if each["event"] == "replay"]
    assert verdicts == [("nothing to compare", 0), ("equal", STEPS - SAVE_EVERY)]


def test_two_uninterrupted_runs_are_equal(ranks: Ranks, tmp_path: Path) -> None:
    """Else the comparisons of this file mean nothing."""
    config = SmallModel(tp=2, pp=2, dp=2)
    first = harness.run(ranks, config, tmp_path / "first", 3)
    second = harness.run(ranks, config, tmp_path / "second", 3)
    assert_continues(second, first)


def test_a_fresh_process_resumes(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(tp=2, dp=2)
    whole = harness.run(ranks, config, tmp_path / "whole", STEPS)
    harness.run(ranks, config, tmp_path / "cut", STEPS, crash_at=CRASH_AT, save_every=SAVE_EVERY)
    ranks.close()
    assert_continues(harness.run(ranks, config, tmp_path / "cut", STEPS, save_every=SAVE_EVERY), whole)


def save_before_the_first_step(config: SmallModel, root: Path) -> tuple[dict[str, str], dict[str, str]]:
    fresh = start(config)
    with harness.open_manager(fresh, root / "run") as manager:
        manager.resume()
        manager.save()
    before = digest(fresh)
    trained = start(config)
    go_on(trained, root / "elsewhere", 2)
    go_on(trained, root / "run", 0)
    return before, digest(trained)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_optimizer_that_never_stepped_is_restored_as_such(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    config = SmallModel(dp=2, precision=precision)
    for before, after in ranks.run(save_before_the_first_step, config, tmp_path, world_size=2):
        assert not differences(before, after)


# --- comparisons that can fail ----------------------------------------------------------------------------------------


def off_by_one_moment(loop: Loop) -> None:
    inner = loop.run.optimizer.chained_optimizers[0].optimizer
    next(iter(inner.state.values()))["exp_avg"].view(-1)[0] += 1e-6


def one_stream_off(loop: Loop) -> None:
    torch.rand(1)


def scheduler_advanced_twice(loop: Loop) -> None:
    loop.run.scheduler.step(increment=loop.run.config.global_batch_size)


def one_sample_skipped(loop: Loop) -> None:
    loop.sampler.seek(loop.sampler.consumed_samples + 1)


def masters_not_restored(loop: Loop) -> None:
    loop.run.optimizer.reload_model_params()


BROKEN = [off_by_one_moment, one_stream_off, scheduler_advanced_twice, one_sample_skipped, masters_not_restored]


def resume_and_break(config: SmallModel, root: Path, breakage: Callable[[Loop], None]) -> Outcome:
    loop = start(config)
    steps = {}
    with harness.open_manager(loop, root, resume_from=SAVE_EVERY) as manager:
        report = manager.resume()
        breakage(loop)
        for step, result in harness.train_steps(loop, manager, STEPS):
            steps[step] = result
    return Outcome(report, steps, digest(loop), manager.step, manager.should_stop)


def test_each_broken_restore_is_noticed(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(dp=2)
    whole = harness.run(ranks, config, tmp_path / "run", STEPS, save_every=SAVE_EVERY)
    assert_continues(ranks.run(resume_and_break, config, tmp_path / "run", bool, world_size=2), whole)
    for breakage in BROKEN:
        broken = ranks.run(resume_and_break, config, tmp_path / "run", breakage, world_size=2)
        with pytest.raises(AssertionError):
            assert_continues(broken, whole)


# --- weights alone ----------------------------------------------------------------------------------------------------


def masters_follow_weights(loop: Loop) -> bool:
    live = describe(loop.run.chunks, loop.run.optimizer)
    members = [m for optimizer in live.optimizers for group in optimizer.groups for m in group.members]
    assert members and all(member.master is not None for member in members)
    return all(
        torch.equal(m.master, live.parameters[m.parameter].tensor.detach().view(-1)[m.start : m.end].float())
        for m in members
    )


def restore_weights_only(config: SmallModel, root: Path) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    trained = start(config)
    go_on(trained, root, 3)
    weights = {name: value for name, value in digest(trained).items() if name.startswith("parameter/")}
    fresh = start(config)
    untouched = digest(fresh)
    assert masters_follow_weights(fresh)
    progress = resume_from_checkpoint(
        root, model=fresh.run.chunks, optimizer=fresh.run.optimizer, scheduler=fresh.run.scheduler, weights_only=True
    )
    restored = digest(fresh)
    facts = {
        "progress": (progress.global_step, progress.consumed_train_samples),
        "weights": differences(weights, {name: restored[name] for name in weights}),
        "masters": masters_follow_weights(fresh),
        "optimizer states": sum(
            len(o.state_maps[""]) for o in describe(fresh.run.chunks, fresh.run.optimizer).optimizers
        ),
    }
    kept = {
        name: value
        for name, value in untouched.items()
        if name.startswith(("rng/", "next draws", "scheduler", "sampler"))
    }
    return kept, {name: restored[name] for name in kept}, facts


def test_weights_only_takes_weights_and_refreshes_masters(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(tp=2, dp=2)
    for kept, after, facts in ranks.run(restore_weights_only, config, tmp_path / "run", world_size=4):
        assert facts == {"progress": (0, 0), "weights": [], "masters": True, "optimizer states": 0}
        assert not differences(kept, after)


# --- by counting ------------------------------------------------------------------------------------------------------

COLLECTIVES = [
    name
    for name in dir(dist)
    if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv", "batch_"))
    and callable(getattr(dist, name))
    and not isinstance(getattr(dist, name), type)
]


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    calls: list[str] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextmanager
def opened_shards() -> Iterator[list[str]]:
    names: list[str] = []
    original = fs.open_for_reading

    def noting(path: Path) -> Any:
        names.append(path.name)
        return original(path)

    fs.open_for_reading = noting
    try:
        yield names
    finally:
        fs.open_for_reading = original


def save_and_load_counted(config: SmallModel, root: Path) -> dict[str, Any]:
    loop = start(config)
    with harness.open_manager(loop, root) as manager:
        manager.resume()
        with counted_collectives() as in_a_step:
            for _ in harness.train_steps(loop, manager, 1):
                pass
            manager.poll()  # so that no status word is under way
        with counted_collectives() as in_a_save:
            manager.save()
    fresh = start(config)
    with harness.open_manager(fresh, root) as manager, opened_shards() as opened:
        manager.resume()
    return {
        "in a step": len(in_a_step),
        "in a save": in_a_save,
        "opened": sorted({n for n in opened if n.endswith(layout.SHARD_SUFFIX)}),
    }


@pytest.mark.parametrize(
    "config", [SmallModel(tp=2, pp=2, dp=2), SmallModel(pp=2, dp=4, ep=2, moe=True)], ids=["dense", "experts"]
)
def test_what_a_save_sends_and_covers_and_what_a_load_opens(ranks: Ranks, tmp_path: Path, config: SmallModel) -> None:
    counted = ranks.run(save_and_load_counted, config, tmp_path, world_size=config.world_size)
    assert all(each["in a step"] > 0 for each in counted), "the counter counts nothing"
    assert [each["in a save"] for each in counted] == [[]] * config.world_size
    files = sorted(path.name for path in (tmp_path / "step-00000001").glob("*.safetensors"))
    assert sorted(name for each in counted for name in each["opened"]) == files
    assert all(len(each["opened"]) == 1 for each in counted)
    assert_covered_once_per_replica(tmp_path / "step-00000001")


def assert_covered_once_per_replica(checkpoint: Path) -> None:
    """Weights, masters and moments of each model-parallel part: the ranks' ranges join to the whole, without gap or
    overlap."""
    ranges: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)
    sizes: dict[tuple[str, str, str], int] = {}
    for path in checkpoint.glob("*.safetensors"):
        header = shard.read_header(path)
        assert header.index["version"] == rank_state.INDEX_VERSION
        part = "-".join(axis for axis in path.stem.split("-") if not axis.startswith("dp"))
        for entry in header.index["tensors"].values():
            if entry["range"] is None:
                continue
            parameter = header.index["parameters"][entry["parameter"]]
            # Dense parameters are replicated over expert-parallel ranks, which are data-parallel ranks to them.
            place = part if parameter["replica"] == "expert" else part.split("-ep")[0]
            key = (place, entry["parameter"], entry["slot"])
            ranges[key].append(tuple(entry["range"]))
            sizes[key] = torch.Size(parameter["local_shape"]).numel()
    slots = {slot for _, _, slot in ranges}
    assert {"weight", "master", "exp_avg", "exp_avg_sq"} <= slots
    for key, parts in ranges.items():
        position = 0
        for start_at, end in sorted(parts):
            assert start_at == position, f"{key}: gap or overlap at element {position}, found [{start_at}, {end})"
            position = end
        assert position == sizes[key], f"{key}: covered up to {position} of {sizes[key]} elements"
