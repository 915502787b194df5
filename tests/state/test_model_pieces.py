"""Replicas share the writing of the model: each element once, and after a load all of it everywhere."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megaresume.errors import StateMismatchError
from megaresume.megatron.live import describe
from megaresume.state import model as model_state
from megaresume.state.description import Live, ReplicaGroup
from megaresume.state.model import Piece, join_neighbours, split_over_replicas
from megaresume.state.rank_state import RankState, capture, plan_restore
from megaresume.state.registered import Registered
from tests.state.objects import Net, frozen, spans_of

sizes_of_parameters = st.dictionaries(
    st.text("abcdefgh.", min_size=1, max_size=5),
    st.tuples(st.integers(0, 400), st.sampled_from([1, 2, 4, 8])),
    max_size=12,
)


@given(sizes_of_parameters, st.integers(1, 40))
@example({"a": (3, 4)}, 2)
@example({"a": (1, 8), "b": (1, 1)}, 4)
@example({"a": (0, 4), "b": (0, 2)}, 3)
@example({}, 5)
@settings(max_examples=200, deadline=None)
def test_each_element_is_in_one_piece_and_the_bytes_are_balanced(sizes: dict[str, tuple[int, int]], ranks: int) -> None:
    runs = split_over_replicas(sizes, ranks)
    assert len(runs) == ranks
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for piece in itertools.chain.from_iterable(runs):
        pieces[piece.parameter].append((piece.start, piece.end))
    for name, (elements, _) in sizes.items():
        ends = [0, *(end for _, end in sorted(pieces[name]))]
        assert [start for start, _ in sorted(pieces[name])] == ends[:-1] and ends[-1] == elements, "no gap, no overlap"
        assert elements == 0 or all(start < end for start, end in pieces[name]), "no empty piece"
        assert len(pieces[name]) == 1 if elements == 0 else True
    total = sum(elements * width for elements, width in sizes.values())
    for run in runs:
        names = [piece.parameter for piece in run]
        assert len(set(names)) == len(names), "one piece of a parameter, for it is stored under the parameter's name"
        cut = [piece for piece in run if piece.end - piece.start < sizes[piece.parameter][0]]
        assert len(cut) <= 2
        written = sum((piece.end - piece.start) * sizes[piece.parameter][1] for piece in run)
        assert abs(written - total / ranks) < max([width for _, width in sizes.values()], default=0) + 1


def test_all_ranks_compute_the_same_split() -> None:
    sizes = {f"layer.{number}": (number * 7 % 40, 2) for number in range(30)}
    backwards = dict(reversed(list(sizes.items())))
    assert split_over_replicas(sizes, 8) == split_over_replicas(backwards, 8)


def test_pieces_side_by_side_in_memory_are_joined_and_others_are_not() -> None:
    places = {"a": (0, 100), "b": (0, 0), "c": (1, 110), "d": (0, 140)}
    pieces = [Piece("a", 0, 10), Piece("b", 90, 100), Piece("c", 0, 10), Piece("d", 0, 5), Piece("e", 10, 20)]
    assert join_neighbours(pieces, places) == [
        [Piece("e", 10, 20)],
        [Piece("b", 90, 100), Piece("a", 0, 10)],
        [Piece("d", 0, 5)],
        [Piece("c", 0, 10)],
    ]
    assert join_neighbours(pieces, {}) == [[piece] for piece in pieces]


def as_rank(live: Live, rank: int, size: int, group: Any = None) -> Live:
    return replace(live, replicas={"dense": ReplicaGroup(rank, size, group)})


def mixed(seed: int) -> Net:
    model = Net(seed)
    model.second.to(torch.bfloat16)
    model.scale.data = model.scale.data.double()
    return model


def shards(model: Net, size: int) -> list[RankState]:
    live = describe([model], None)
    return [capture(as_rank(live, rank, size), None, Registered({})) for rank in range(size)]


def load_piece(shard: RankState, live: Live) -> None:
    plan = plan_restore(shard.index, spans_of(shard), live, None, Registered({}), weights_only=True)
    for name, destination in plan.destinations.items():
        destination.copy_(shard.tensors[name])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_the_shards_of_all_replicas_make_up_the_model(size: int) -> None:
    model, other = mixed(0), mixed(1)
    written = [name for shard in shards(model, size) for name in shard.index["tensors"] if name.startswith("model/")]
    assert {name.removeprefix("model/") for name in written} == {name for name, _ in model.named_parameters()}
    for rank, shard in enumerate(shards(model, size)):
        load_piece(shard, as_rank(describe([other], None), rank, size))
    assert frozen(other.state_dict()) == frozen(model.state_dict())


def test_a_file_of_another_split_is_refused_and_says_what_differs() -> None:
    model = Net()
    for size, rank in [(2, 1), (3, 0)]:
        shard = shards(model, 2)[0]
        live = as_rank(describe([model], None), rank, size)
        with pytest.raises(StateMismatchError, match=r"model/first.*this rank loads.*another split over replicas"):
            plan_restore(shard.index, spans_of(shard), live, None, Registered({}))


class Threads:
    """Ranks as threads, numbered from 10: a broadcast that is done when it is waited for."""

    def __init__(self, size: int) -> None:
        self.mine = threading.local()
        self._barrier = threading.Barrier(size, timeout=30)
        self._given: list[Any] = [None] * size
        self.ranks = [10 + rank for rank in range(size)]

    def broadcast(self, tensor: torch.Tensor, src: int, group: Any, async_op: bool) -> Any:
        assert group is self and async_op

        def wait() -> None:
            self._given[self.mine.rank] = tensor
            self._barrier.wait()
            tensor.copy_(self._given[self.ranks.index(src)].clone())
            self._barrier.wait()

        return SimpleNamespace(wait=wait)

    def run(self, function: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def serve(rank: int) -> None:
            self.mine.rank = rank
            try:
                function(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(len(self._given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors


def test_replicas_complete_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3
    model, ranks = mixed(0), Threads(size)
    monkeypatch.setattr(model_state.dist, "broadcast", ranks.broadcast)
    monkeypatch.setattr(model_state.dist, "get_process_group_ranks", lambda group: group.ranks)
    others = [mixed(rank + 1) for rank in range(size)]
    lives = [as_rank(describe([other], None), rank, size, ranks) for rank, other in enumerate(others)]
    for shard, live in zip(shards(model, size), lives, strict=True):
        load_piece(shard, live)
    ranks.run(lambda rank: model_state.complete_replicas(lives[rank]))
    for other in others:
        assert frozen(other.state_dict()) == frozen(model.state_dict())
