"""Streams: resumed through their own state per rank and worker, or refused, or started over where that was asked."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megaresume.data import ResumableDataLoader
from megaresume.errors import (
    ConfigurationError,
    DataMismatchError,
    FormatError,
    MegaresumeError,
    TrainerStateError,
    UnsupportedError,
)

# Three workers on a machine with two cores are slow, which is no matter here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Plain(IterableDataset[Any]):
    """Ids 0 to size - 1, dealt out to the workers; with a random number each, so that seeding shows."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        while self.at * workers + worker < self.size:
            self.at += 1
            yield torch.tensor([(self.at - 1) * workers + worker, torch.rand(()).item()])


class Fresh(Plain):
    """A plain stream that begins again with each pass, as most do."""

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        return super().__iter__()


class Stateful(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "nested": {"list": [self.at]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"] == {"list": [state["at"]]}
        self.at = state["at"]


def loader(dataset: Any, **changed: Any) -> ResumableDataLoader:
    arguments: dict[str, Any] = dict(
        batch_size=2, global_batch_size=4, data_parallel_rank=0, data_parallel_size=1, num_workers=0
    )
    return ResumableDataLoader(dataset, **{**arguments, **changed})


def train(what: ResumableDataLoader, steps: int) -> list[Any]:
    iterator, read = iter(what), []
    for _ in range(steps):
        read += [next(iterator).tolist() for _ in range(what.num_microbatches)]
        what.advance()
    return read


def stop(what: ResumableDataLoader) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(what.state_dict()))
    return state


@pytest.mark.parametrize(("workers", "prefetch"), [(0, {}), (1, {}), (3, {"prefetch_factor": 3})])
def test_d20_stream_with_a_state_goes_on_with_the_next_sample(workers: int, prefetch: dict[str, int]) -> None:
    arguments: dict[str, Any] = dict(num_workers=workers, **prefetch)
    whole = [batch.tolist() for batch in loader(Stateful(50), **arguments)]
    assert sorted(int(row[0]) for batch in whole for row in batch) == list(range(50))
    state = None
    read: list[Any] = []
    for steps in (5, 1, 2, 0, 3):
        resumed = loader(Stateful(50), **arguments)
        if state is not None:
            assert resumed.check_state(state) == ()
            resumed.load_state_dict(state)
        read += train(resumed, steps)
        state = stop(resumed)
    assert state is not None and state["consumed_samples"] == 44
    resumed.load_state_dict(state)
    read += [batch.tolist() for batch in resumed]
    assert read == whole
    if workers == 0:
        assert [int(row[0]) for row in read[10]] == [20, 21]


def test_d20_plain_stream_is_refused_unless_told() -> None:
    first = loader(Fresh(50))
    train(first, 5)
    state = stop(first)
    with pytest.raises(ConfigurationError, match="cannot go on after 10 micro-batches .*fast-forward.*restart"):
        loader(Fresh(50)).check_state(state)
    with pytest.raises(ConfigurationError, match="cannot go on after 10"):
        loader(Fresh(50)).load_state_dict(state)
    with pytest.raises(ConfigurationError, match="cannot go on after 10"):
        loader(Fresh(50)).resume_from_checkpoint(20)
    with pytest.raises(ConfigurationError, match="cannot go on after 10"):
        iter(first)  # also in the same process: a second pass in mid-stream would begin at 0


@pytest.mark.parametrize("workers", [0, 3])
def test_d20_plain_stream_fast_forwards(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    arguments: dict[str, Any] = dict(num_workers=workers, on_iterable="fast-forward")
    whole = [batch.tolist() for batch in loader(Fresh(50), **arguments)]
    first = loader(Fresh(50), **arguments)
    train(first, 5)
    resumed = loader(Fresh(50), **arguments)
    resumed.load_state_dict(stop(first))
    with caplog.at_level(logging.INFO, "megaresume.data"):
        assert [batch.tolist() for batch in resumed] == whole[10:]
    assert "fast-forwarded over 10 of 10 micro-batches" in caplog.text
    counted = loader(Fresh(50), **arguments)
    for _ in range(2):
        counted.resume_from_checkpoint(20)
    assert [batch.tolist() for batch in counted] == whole[10:]
    with pytest.raises(ConfigurationError, match="21 is no whole number of micro-batches"):
        loader(Fresh(50), **arguments).resume_from_checkpoint(21)
    beyond = loader(Fresh(50), **arguments)
    beyond.resume_from_checkpoint(80)
    with pytest.raises(ConfigurationError, match=r"ended after 2\d of the 40 micro-batches"):
        list(beyond)


def test_d20_plain_stream_restarts_aloud(caplog: pytest.LogCaptureFixture) -> None:
    first = loader(Fresh(50))
    whole = train(first, 5)
    resumed = loader(Fresh(50), on_iterable="restart")
    resumed.load_state_dict(stop(first))
    assert "restarts at its beginning" in caplog.text and "10 micro-batches" in caplog.text
    assert resumed.consumed_samples == 20
    assert train(resumed, 5) == whole
    assert resumed.consumed_samples == 40


def test_passes_follow_each_other_and_a_pass_thrown_away_changes_nothing() -> None:
    for dataset in (Stateful(10), Fresh(10)):
        what = loader(dataset)
        iterator = iter(what)
        next(iterator), next(iterator)
        del iterator
        passes = [[batch[:, 0].tolist() for batch in what] for _ in range(3)]
        assert passes[0] == passes[1] == passes[2] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
        assert what.epoch == 2


def test_d24_restore_behind_a_live_pass_is_refused() -> None:
    first = loader(Stateful(50))
    train(first, 3)
    state = stop(first)
    what = loader(Stateful(50), num_workers=2)
    iterator = iter(what)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="live"):
            what.load_state_dict(json.loads(json.dumps({**state, "num_workers": 2})))
    next(iterator)


def test_a_pass_that_failed_is_not_taken_for_one_that_ended() -> None:
    class Failing(Stateful):
        def __iter__(self) -> Iterator[Any]:
            for sample in super().__iter__():
                if sample[0] == 6:
                    raise OSError("lost")
                yield sample

    what = loader(Failing(50))
    iterator = iter(what)
    next(iterator), next(iterator)
    what.advance()
    next(iterator)
    with pytest.raises(OSError, match="lost"):
        next(iterator)
    with pytest.raises(ConfigurationError, match="ended with OSError: lost"):
        next(iterator)
    assert what.epoch == 0
    assert next(iter(what))[:, 0].tolist() == [4, 5]


def test_states_are_of_a_rank_and_a_cut() -> None:
    first = loader(Stateful(50), data_parallel_size=2, data_parallel_rank=1)
    train(first, 2)
    state = stop(first)
    with pytest.raises(DataMismatchError, match="data_parallel_rank: checkpoint 1, this run 0"):
        loader(Stateful(50), data_parallel_size=2).load_state_dict(state)
    with pytest.raises(DataMismatchError, match="data_parallel_size: checkpoint 2, this run 1"):
        loader(Stateful(50)).load_state_dict({**state, "data_parallel_rank": 0})
    arguments: dict[str, Any] = dict(data_parallel_size=2, data_parallel_rank=1)
    with pytest.raises(DataMismatchError, match="num_workers: checkpoint 0, this run 2"):
        loader(Stateful(50), num_workers=2, **arguments).load_state_dict(state)
    with pytest.raises(DataMismatchError, match="global_batch_size: checkpoint 4, this run 8"):
        loader(Stateful(50), global_batch_size=8, **arguments).load_state_dict(state)
    changed = loader(Stateful(50), global_batch_size=8, **arguments)
    changed.load_state_dict(state, allow_data_change={"global_batch_size"})
    assert changed.consumed_samples == 8
    assert [int(row[0]) for row in train(changed, 1)[0]] == [4, 5]


def test_a_state_that_is_not_json_is_refused_by_name() -> None:
    class Odd(Stateful):
        value: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "nested": {"list": [self.at]}, "odd": self.value}

    for value, message in ((torch.ones(1), "not of JSON values"), ((1, 2), "a tuple"), ({1: 2}, "not text")):
        dataset = Odd(50)
        dataset.value = value
        what = loader(dataset)
        train(what, 1)
        with pytest.raises(UnsupportedError, match=message):
            what.state_dict()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"kind": "sampler"}, TrainerStateError),
        ({"version": 9}, FormatError),
        ({"batches": -1}, TrainerStateError),
        ({"consumed_samples": "8"}, TrainerStateError),
        ({"last_worker": 1.0}, TrainerStateError),
        ({"workers": []}, TrainerStateError),
        ({"workers": {"0": 3}}, TrainerStateError),
        ({"workers": {}}, TrainerStateError),
        ({"num_workers": None}, TrainerStateError),
    ],
)
def test_damaged_states_are_refused(changed: dict[str, Any], error: type[MegaresumeError]) -> None:
    first = loader(Stateful(50))
    train(first, 2)
    what = loader(Stateful(50))
    with pytest.raises(error):
        what.load_state_dict({**stop(first), **changed})
    assert what.consumed_samples == 0 and train(what, 1)[0][0][0] == 0


class OwnState(DataLoader[Any]):
    """What torchdata's StatefulDataLoader is to us: a loader that tells and takes its own position."""

    begin, at = 0, 0

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__(), start=1):
            if number <= self.begin:
                continue
            self.at = number
            yield batch
        self.begin = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["at"]


def own_loaders() -> list[Any]:
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return [OwnState]
    return [OwnState, StatefulDataLoader]


@pytest.mark.parametrize("kind", own_loaders())
def test_a_loader_with_a_state_of_its_own_is_resumed_through_it(kind: Any) -> None:
    whole = [batch.tolist() for batch in loader(kind(list(range(50)), batch_size=2))]
    first = loader(kind(list(range(50)), batch_size=2))
    iterator = iter(first)
    for _ in range(3):
        next(iterator), next(iterator)
        first.advance()
    next(iterator)  # handed out, not trained
    resumed = loader(kind(list(range(50)), batch_size=2))
    resumed.load_state_dict(stop(first))
    assert [batch.tolist() for batch in resumed] == whole[6:]
    assert [batch.tolist() for batch in resumed] == whole


def test_arguments_that_cannot_serve_a_stream_are_refused() -> None:
    for arguments, message in (
        ({"max_replacements": 1}, "a stream of no indices"),
        ({"batch_size": None}, "batch_size must be an integer, got None"),
        ({"global_batch_size": 5}, "5 is not a multiple"),
        ({"on_iterable": "skip"}, "on_iterable must be None or one of restart, fast-forward, got 'skip'"),
        ({"num_workers": 1, "persistent_workers": True}, "persistent_workers"),
    ):
        with pytest.raises((ConfigurationError, TypeError), match=message):
            loader(Fresh(10), **arguments)
    with pytest.raises(ConfigurationError, match="DataLoader without state_dict"):
        loader(DataLoader(list(range(4))))
    with pytest.raises(TypeError, match="not known"):
        len(loader(Fresh(10)))


def test_random_numbers_of_a_stream_do_not_touch_the_training_step() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    dataset = Stateful(20)
    first = train(loader(dataset), 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert train(loader(copy.deepcopy(Stateful(20))), 2) == first
