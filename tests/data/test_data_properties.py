"""Whatever the sizes, the tail, the width and the stops: resumed ids are the uninterrupted ones."""

from __future__ import annotations

from typing import Any

from data_runs import Run, ids_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaresume.data import BatchSizeSchedule

PROFILE = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,  # a run of the suite is repeatable; the search is widened by raising max_examples
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
BATCHES = (4, 6, 8, 12, 24)


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    tail = draw(st.sampled_from(["carry", "drop", "short"]))
    if draw(st.booleans()):
        schedule: Any = draw(st.sampled_from(BATCHES))
        largest = schedule
    else:
        begins = sorted(draw(st.sets(st.integers(1, 150), min_size=1, max_size=3)))
        sizes = [draw(st.sampled_from(BATCHES)) for _ in range(len(begins) + 1)]
        schedule = BatchSizeSchedule(tuple(zip([0, *begins], sizes, strict=True)))
        largest = max(sizes)
    return dict(
        dataset_size=draw(st.integers(largest if tail == "drop" else 1, 60)),
        global_batch_size=schedule,
        epoch_tail=tail,
        seed=draw(st.integers(-5, 5)),
        shuffle=draw(st.booleans()),
        epochs=draw(st.sampled_from([None, None, 1, 3])),
        consumed_samples=0,
    )


def cuts(draw: Any, batch: Any) -> dict[str, int]:
    """A width and micro-batch size that divide every batch size of the schedule."""
    sizes = batch.sizes if isinstance(batch, BatchSizeSchedule) else (batch,)
    return draw(
        st.sampled_from(
            [
                dict(width=width, micro=micro)
                for width in (1, 2, 3, 4, 6)
                for micro in (1, 2, 3)
                if all(size % (width * micro) == 0 for size in sizes)
            ]
        )
    )


def as_many_steps(run: Run, most: int) -> list[Any]:
    steps = []
    while len(steps) < most and not run.samplers[0].finished:
        steps.append(run.step())
    return steps


@PROFILE
@given(data=st.data(), what=runs(), gaps=st.lists(st.integers(0, 7), min_size=1, max_size=4))
def test_resumed_ids_are_the_uninterrupted_ones(data: Any, what: dict[str, Any], gaps: list[int]) -> None:
    first = cuts(data.draw, what["global_batch_size"])
    whole = as_many_steps(Run(**what, **first), sum(gaps) + 6)
    state, done, same_cut = None, 0, True
    for gap in [*gaps, 6]:  # a gap of 0: stopped again with nothing trained in between
        cut = first if data.draw(st.booleans()) else cuts(data.draw, what["global_batch_size"])
        same_cut = cut == first
        run = Run(**what, **cut, state=state)
        steps = as_many_steps(run, gap)
        expected = whole[done : done + gap]
        assert ids_of(steps) == ids_of(expected)
        if same_cut:
            assert [step.per_rank for step in steps] == [step.per_rank for step in expected]
        done += len(steps)
        state = run.stop()
        assert state["consumed_samples"] == sum(len(step.ids) for step in whole[:done])


@PROFILE
@given(data=st.data(), what=runs())
def test_every_sample_once_per_epoch(data: Any, what: dict[str, Any]) -> None:
    size, tail = what["dataset_size"], what["epoch_tail"]
    run = Run(**{**what, "epochs": 3}, **cuts(data.draw, what["global_batch_size"]))
    if tail == "carry":
        stream = sum(ids_of(as_many_steps(run, 1000)), [])
        epochs = [stream[start : start + size] for start in range(0, len(stream), size)]
    else:
        epochs = [[], [], []]
        while not run.samplers[0].finished:
            epochs[run.samplers[0].epoch] += run.step().ids
    assert len(epochs) == 3
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(size))
        if tail != "drop":
            assert len(epoch) == size
    if tail == "drop" and isinstance(what["global_batch_size"], int):
        assert {len(epoch) for epoch in epochs} == {size - size % what["global_batch_size"]}


@PROFILE
@given(data=st.data(), what=runs(), consumed=st.integers(0, 150))
def test_a_count_off_the_boundary_goes_on_from_exactly_there(data: Any, what: dict[str, Any], consumed: int) -> None:
    what = {**what, "epochs": None, "consumed_samples": consumed}
    cut = cuts(data.draw, what["global_batch_size"])
    run = Run(**what, **cut)
    assert run.consumed == consumed
    whole = run.steps(8)
    if what["epoch_tail"] != "drop":
        start, size = consumed % what["dataset_size"], what["dataset_size"]
        stream = Run(**{**what, "consumed_samples": consumed - start, "epoch_tail": "carry"}, **cut)
        ids = sum(ids_of(stream.steps(2 + size // 4 + 24)), [])
        seen = sum(ids_of(whole), [])
        shown = min(len(seen), len(ids) - start)
        assert seen[:shown] == ids[start : start + shown]
    again = Run(**{**what, "consumed_samples": 0}, **cut, state=Run(**what, **cut).stop())
    assert ids_of(again.steps(3)) == ids_of(whole[:3])
    again = Run(**{**what, "consumed_samples": 0}, **cut, state=again.stop())
    assert ids_of(again.steps(5)) == ids_of(whole[3:])


@PROFILE
@given(data=st.data(), what=runs(), stop=st.integers(0, 12))
def test_position_is_closed_form(data: Any, what: dict[str, Any], stop: int) -> None:
    """Seeking to a count from scratch and stepping there are the same, and `len()` says what is yielded."""
    cut = cuts(data.draw, what["global_batch_size"])
    run = Run(**what, **cut)
    as_many_steps(run, stop)
    sought = Run(**{**what, "consumed_samples": run.consumed}, **cut)
    assert sought.stop() == run.stop()
    for sampler in sought.samplers:
        if what["epoch_tail"] == "carry" and what["epochs"] is None:
            continue
        assert len(sampler) == len(list(iter(sampler)))


@PROFILE
@given(data=st.data(), what=runs(), stop=st.integers(0, 12))
def test_a_longer_run_never_changes_what_was_planned(data: Any, what: dict[str, Any], stop: int) -> None:
    cut = cuts(data.draw, what["global_batch_size"])
    short = Run(**{**what, "epochs": 2}, **cut)
    steps = as_many_steps(short, stop)
    longer = Run(**{**what, "epochs": 5}, **cut)
    planned = as_many_steps(longer, stop)
    last_is_cut = short.samplers[0].finished and what["epoch_tail"] == "carry"  # its last batch ends with the run
    number = len(steps) - 1 if last_is_cut else len(steps)
    assert steps[:number] == planned[:number]
    resumed = Run(**{**what, "epochs": 5}, **cut, state=short.stop())
    if not last_is_cut:
        assert resumed.step() == longer.step() if len(planned) == len(steps) else True
