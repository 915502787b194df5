"""The sampler as an object: arguments, iterators that change nothing, states that are refused or loaded whole."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from data_runs import Run
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.data import BatchSizeSchedule, DataParallelBatchSampler
from megaresume.errors import ConfigurationError, DataMismatchError, FormatError, MegaresumeError, TrainerStateError


def make(size: Any = 100, **changed: Any) -> DataParallelBatchSampler:
    arguments = dict(micro_batch_size=2, global_batch_size=8, data_parallel_rank=0, data_parallel_size=2)
    return DataParallelBatchSampler(size, **{**arguments, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"size": 0}, ValueError, "dataset_size must be at least 1, got 0"),
        ({"size": -5}, ValueError, "dataset_size must be at least 1, got -5"),
        ({"size": 10.0}, TypeError, "dataset_size must be an integer, got 10.0 of type float"),
        ({"size": True}, TypeError, "dataset_size must be an integer, got True of type bool"),
        ({"size": None}, TypeError, "dataset_size must be an integer"),
        ({"size": 2**48 + 1}, ValueError, r"at most 2\*\*48"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be at least 1, got 0"),
        ({"micro_batch_size": "2"}, TypeError, "micro_batch_size must be an integer, got '2'"),
        ({"global_batch_size": -8}, ValueError, "global_batch_size must be at least 1, got -8"),
        ({"global_batch_size": 8.5}, TypeError, "global_batch_size must be an integer, got 8.5"),
        (
            {"global_batch_size": 10},
            ValueError,
            r"10 is not a multiple .* = 4\. What would do: global_batch_size 8 or 12",
        ),
        ({"global_batch_size": 2}, ValueError, r"What would do: global_batch_size 4; .*data_parallel_size of \[1\]"),
        (
            {"global_batch_size": BatchSizeSchedule(((0, 8), (80, 6)))},
            ValueError,
            "global_batch_size 6 is not a multiple",
        ),
        ({"data_parallel_rank": 2}, ValueError, "data_parallel_rank must be from 0 to 1 .* got 2"),
        ({"data_parallel_rank": -1}, ValueError, "data_parallel_rank must be at least 0, got -1"),
        ({"data_parallel_size": 0}, ValueError, "data_parallel_size must be at least 1, got 0"),
        ({"data_parallel_rank": None}, ValueError, "both or neither, got rank None and size 2"),
        ({"consumed_samples": -1}, ValueError, "consumed_samples must be at least 0, got -1"),
        ({"consumed_samples": 1.5}, TypeError, "consumed_samples must be an integer"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        ({"epochs": 1, "consumed_samples": 101}, ValueError, "101 lies beyond the end of the stream: 1 epochs of 100"),
        ({"epochs": 1, "consumed_samples": 104, "epoch_tail": "drop"}, ValueError, "104 lies beyond the end"),
        ({"epochs": 2, "consumed_samples": 193, "epoch_tail": "drop"}, ValueError, "193 lies beyond the end"),
        ({"seed": 1.0}, TypeError, "seed must be an integer, got 1.0"),
        ({"seed": False}, TypeError, "seed must be an integer, got False"),
        ({"shuffle": "random"}, ValueError, "shuffle must be True, False or one of .* got 'random'"),
        ({"shuffle": 1}, ValueError, "shuffle must be True, False or one of .* got 1"),
        ({"epoch_tail": "keep"}, ValueError, "epoch_tail must be one of carry, drop, short, got 'keep'"),
        ({"size": 3, "shuffle": "megatron"}, ValueError, "nothing to serve: dataset_size 3 is smaller"),
    ],
)
def test_bad_arguments_name_the_value_and_what_would_do(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**changed)


def test_numpy_integers_are_integers() -> None:
    sampler = make(np.int64(100), global_batch_size=np.int32(8), seed=np.int64(3), consumed_samples=np.uint8(8))
    assert next(iter(sampler)) == next(iter(make(seed=3, consumed_samples=8)))
    json.dumps(sampler.state_dict())


def test_rank_and_size_default_to_the_running_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = types.ModuleType("megaresume.megatron.parallel")
    layout.data_parallel_coordinate = lambda: (1, 2)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megaresume.megatron.parallel", layout)
    sampler = DataParallelBatchSampler(100, micro_batch_size=2, global_batch_size=8)
    assert (sampler.data_parallel_rank, sampler.data_parallel_size) == (1, 2)


def test_the_sampler_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from megaresume.data import DataParallelBatchSampler as S\n"
        "s = S(100, micro_batch_size=2, global_batch_size=4, data_parallel_rank=0, data_parallel_size=1)\n"
        "next(iter(s)), s.advance(), s.load_state_dict(s.state_dict())\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("tail", ["carry", "drop", "short"])
def test_an_iterator_made_and_thrown_away_changes_nothing(tail: Any) -> None:
    sampler, untouched = make(20, epoch_tail=tail), make(20, epoch_tail=tail)
    for read in (0, 1, 3):
        iterator = iter(sampler)
        for _ in range(read):
            next(iterator)
    del iterator
    assert sampler.state_dict() == untouched.state_dict()
    assert next(iter(sampler)) == next(iter(untouched))
    sampler.seek(8)  # and nothing is live any more


@pytest.mark.parametrize("tail", ["drop", "short"])
@pytest.mark.parametrize("counted", [True, False])
def test_after_an_exhausted_iterator_comes_the_next_epoch(tail: Any, counted: bool) -> None:
    sampler = make(20, epoch_tail=tail, epochs=3)
    expected = Run(dataset_size=20, width=2, micro=2, global_batch_size=8, epoch_tail=tail, epochs=3)
    for _ in range(3):
        batches = []
        length = len(sampler)
        for number, batch in enumerate(sampler, start=1):
            batches.append(batch)
            if counted and number % 2 == 0:
                sampler.advance()
        if counted and len(batches) % 2:
            sampler.advance()  # the short batch: one micro-batch
        assert len(batches) == length
        steps = expected.steps(2 if tail == "drop" else 3)
        assert batches == [batch for step in steps for batch in step.per_rank[0]]
        next(iter(sampler), None)  # made and thrown away
    assert list(sampler) == []


def test_exhausted_but_never_counted_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    sampler = make(16, epoch_tail="drop")
    list(sampler)
    assert sampler.state_dict()["consumed_samples"] == 0
    assert "advance() was never called" in caplog.text


def test_endless_streams_have_no_length() -> None:
    with pytest.raises(TypeError, match="endless"):
        len(make())
    assert len(make(epochs=2)) == 50  # 200 samples, 4 to a micro-batch of both ranks
    assert len(make(10, epochs=1)) == 3  # 8 + 2, padded


def test_restore_behind_a_live_iterator_is_refused() -> None:
    sampler, ahead = make(), make(consumed_samples=40)
    state = ahead.state_dict()
    iterator = iter(sampler)
    for action in (
        lambda: sampler.load_state_dict(state),
        lambda: sampler.check_state(state),
        lambda: sampler.seek(40),
    ):
        with pytest.raises(ConfigurationError, match="iterator of this sampler is live"):
            action()
    sampler.load_state_dict(make().state_dict())  # where it stands already: nothing to change
    assert next(iterator) == next(iter(make()))
    del iterator
    sampler.load_state_dict(state)
    assert next(iter(sampler)) == next(iter(ahead))


def test_seek_is_idempotent_and_all_or_nothing() -> None:
    sampler = make(epochs=1)
    for _ in range(2):
        sampler.seek(40)
        assert sampler.consumed_samples == 40
    before = sampler.state_dict()
    with pytest.raises(ConfigurationError, match="101 lies beyond the end"):
        sampler.seek(101)
    assert sampler.state_dict() == before
    sampler.seek(0)
    assert next(iter(sampler)) == next(iter(make()))


def test_a_place_before_the_last_change_cannot_be_sought() -> None:
    sampler = make(global_batch_size=16)
    sampler.load_state_dict(make(consumed_samples=40).state_dict(), allow_data_change={"global_batch_size"})
    with pytest.raises(ConfigurationError, match="consumed_samples 8 lies before 40"):
        sampler.seek(8)


def test_check_state_says_what_would_change_and_touches_nothing() -> None:
    state = make(consumed_samples=40).state_dict()
    sampler = make(global_batch_size=16, seed=4)
    before = sampler.state_dict()
    assert sampler.check_state(state, {"global_batch_size", "seed"}) == (
        "global_batch_size changed from 8 to 16",
        "seed changed from 0 to 4",
    )
    for allowed in (frozenset(), {"seed"}):
        with pytest.raises(DataMismatchError, match="global_batch_size: checkpoint 8, this run 16"):
            sampler.check_state(state, allowed)
        with pytest.raises(DataMismatchError):
            sampler.load_state_dict(state, allow_data_change=allowed)
    assert sampler.state_dict() == before
    assert make().check_state(state) == ()


@pytest.mark.parametrize("allowed", ["seed", {"sed"}, ["seed"], {"data_parallel_size"}])
def test_unknown_permissions_are_refused(allowed: Any) -> None:
    with pytest.raises(ConfigurationError, match="allow_data_change is a set of names out of global_batch_size"):
        make().load_state_dict(make().state_dict(), allow_data_change=allowed)


def test_a_fingerprint_on_one_side_only_is_said_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    with_print, without = make(fingerprint={"name": "a"}), make()
    without.load_state_dict(with_print.state_dict())
    assert "the run has no fingerprint" in caplog.text
    with pytest.raises(DataMismatchError, match="fingerprint: checkpoint name='a', this run name='b'"):
        make(fingerprint={"name": "b"}).load_state_dict(without.state_dict())


def test_two_changes_within_one_epoch_still_finish_it_in_its_order() -> None:
    settings_: dict[str, Any] = dict(dataset_size=60, width=1, global_batch_size=10)
    run = Run(seed=1, **settings_)
    seen = run.steps(2)
    for seed in (2, 3):
        run = Run(seed=seed, state=run.stop(), allow=frozenset({"seed"}), **settings_)
        seen += run.steps(1)
    seen += run.steps(2)
    assert sorted(sum((step.ids for step in seen), [])) == list(range(60))
    assert run.step().ids == Run(seed=3, consumed_samples=60, **settings_).step().ids


def test_a_grown_dataset_joins_at_the_next_epoch() -> None:
    settings_: dict[str, Any] = dict(width=1, global_batch_size=10)
    run = Run(dataset_size=60, **settings_)
    seen = run.steps(3)
    run = Run(dataset_size=90, state=run.stop(), allow=frozenset({"dataset_size"}), **settings_)
    seen += run.steps(3)
    assert sorted(sum((step.ids for step in seen), [])) == list(range(60))
    assert sorted(sum((step.ids for step in run.steps(9)), [])) == list(range(90))


def test_a_shrunk_dataset_begins_a_new_epoch_and_says_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(dataset_size=60, width=1, global_batch_size=10)
    run.steps(2)
    allow = frozenset({"dataset_size"})
    run = Run(dataset_size=30, width=1, global_batch_size=10, state=run.stop(), allow=allow)
    assert "epoch 0 ends here, 40 of its samples are not seen" in caplog.text
    assert sorted(sum((step.ids for step in run.steps(3)), [])) == list(range(30))
    again = Run(dataset_size=30, width=1, global_batch_size=10, state=run.stop())
    assert again.step() == run.step()


GOOD = json.loads(json.dumps(make(consumed_samples=44, fingerprint={"name": "a"}).state_dict()))


def edited(edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    state = copy.deepcopy(GOOD)
    edit(state)
    return state


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (None, TrainerStateError, "sampler state must be a mapping, got NoneType"),
        ([], TrainerStateError, "must be a mapping, got list"),
        ({}, TrainerStateError, "'version'"),
        (edited(lambda s: s.update(version=2)), FormatError, "version 2; this release reads up to 1"),
        (edited(lambda s: s.update(consumed_samples=-1)), TrainerStateError, "'consumed_samples'"),
        (edited(lambda s: s.update(consumed_samples=44.0)), TrainerStateError, "'consumed_samples'"),
        (edited(lambda s: s.update(consumed_samples=True)), TrainerStateError, "'consumed_samples'"),
        (edited(lambda s: s.update(consumed_samples=2**63)), TrainerStateError, "'consumed_samples'"),
        (edited(lambda s: s.update(consumed_samples=52)), TrainerStateError, "52 consumed samples are offset 52"),
        (edited(lambda s: s.update(offset=43)), TrainerStateError, "but fields 'epoch' and 'offset' say 0 and 43"),
        (edited(lambda s: s.update(offset=101)), TrainerStateError, "'offset' 101 lies past the 100 samples"),
        (edited(lambda s: s.update(epoch=1)), TrainerStateError, "say 1 and 44"),
        (edited(lambda s: s.update(epoch=None)), TrainerStateError, "'epoch'"),
        (edited(lambda s: s.update(anchors=[])), TrainerStateError, "'anchors'"),
        (edited(lambda s: s.update(anchors={})), TrainerStateError, "'anchors'"),
        (edited(lambda s: s["anchors"].append(5)), TrainerStateError, r"anchors\[1\] must be a mapping"),
        (edited(lambda s: s["anchors"][0].pop("settings")), TrainerStateError, "'settings'"),
        (edited(lambda s: s["anchors"][0].update(consumed_samples=60)), TrainerStateError, "go backwards"),
        (edited(lambda s: s["anchors"][0]["settings"].update(shuffle="evil")), TrainerStateError, "'shuffle'"),
        (edited(lambda s: s["anchors"][0]["settings"].update(shuffle=["x"])), TrainerStateError, "'shuffle'"),
        (edited(lambda s: s["anchors"][0]["settings"].update(epoch_tail=3)), TrainerStateError, "'epoch_tail'"),
        (edited(lambda s: s["anchors"][0]["settings"].update(seed="0")), TrainerStateError, "'seed'"),
        (edited(lambda s: s["anchors"][0]["settings"].update(dataset_size=0)), TrainerStateError, "'dataset_size'"),
        (edited(lambda s: s["anchors"][0]["settings"].update(epoch_length=7)), TrainerStateError, "do not fit"),
        (edited(lambda s: s["anchors"][0]["settings"].update(permutation_size=7)), TrainerStateError, "do not fit"),
        (edited(lambda s: s["anchors"][0]["settings"].update(global_batch_size=8)), TrainerStateError, "'global_batch"),
        (edited(lambda s: s["anchors"][0]["settings"].update(global_batch_size=[[0]])), TrainerStateError, "pair"),
        (edited(lambda s: s["anchors"][0]["settings"].update(fingerprint=[])), TrainerStateError, "'fingerprint'"),
        (
            edited(lambda s: s["anchors"][0]["settings"].update(epoch_tail="drop", global_batch_size=[[0, 400]])),
            TrainerStateError,
            "larger than an epoch",
        ),
    ],
)
def test_damaged_states_are_refused_by_field_and_touch_nothing(
    state: Any, error: type[Exception], message: str
) -> None:
    sampler = make(fingerprint={"name": "a"})
    before = sampler.state_dict()
    with pytest.raises(error, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


def test_unknown_keys_of_a_state_are_passed_over() -> None:
    sampler = make(fingerprint={"name": "a"})
    sampler.load_state_dict(edited(lambda s: s.update(colour="blue")))
    assert sampler.consumed_samples == 44


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_hostile_states_are_refused_by_name_or_loaded_whole(data: st.DataObject) -> None:
    state = copy.deepcopy(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = state
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and data.draw(st.booleans()):
                place = place[key]
                continue
            place[key] = data.draw(JSON | st.integers(0, 200) | st.sampled_from(["drop", "short", "megatron"]))
            break
    sampler = make(fingerprint={"name": "a"})
    before = sampler.state_dict()
    try:
        sampler.load_state_dict(state, allow_data_change=data.draw(st.sampled_from([frozenset(), ALL])))
    except MegaresumeError:
        assert sampler.state_dict() == before
        return
    iterator = iter(sampler)
    assert all(0 <= sample < 2**48 for _ in range(60) for sample in next(iterator))
    again = make(fingerprint={"name": "a"})
    again.load_state_dict(sampler.state_dict())
    assert not math.isnan(again.consumed_samples)


ALL = frozenset({"global_batch_size", "seed", "shuffle", "epoch_tail", "dataset_size", "fingerprint"})
