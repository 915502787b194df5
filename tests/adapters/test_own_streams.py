"""Random streams of an adapter's own: they go on from one use to the next, and the process notices nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from megaresume.errors import ConfigurationError
from megaresume.megatron.own_streams import OwnStreams
from megaresume.megatron.rng import random_streams
from megaresume.topology import Coordinate
from tests.ranks import Ranks

ORIGIN = Coordinate(tp=0, pp=0, dp=0, cp=0, ep=0, etp=0)


def draw() -> dict[str, Any]:
    """A number of each stream of this process."""
    drawn = {"python": random.random(), "numpy": float(np.random.rand()), "torch": float(torch.rand(()))}
    streams = random_streams(None)
    if any(name.startswith("tracker.") for name in streams):
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        for name in get_cuda_rng_tracker().get_states():
            with get_cuda_rng_tracker().fork(name):
                drawn[f"tracker.{name}"] = float(torch.rand(()))
    return drawn


def each_differs(*draws: dict[str, Any]) -> bool:
    return all(len({each[name] for each in draws}) == len(draws) for name in draws[0])


def uses(coordinate: Coordinate) -> dict[str, Any]:
    before = {name: stream.get().tolist() for name, stream in random_streams(None).items()}
    first, second = (OwnStreams(None, seed=seed, coordinate=coordinate) for seed in (1, 2))
    drawn = []
    for own in (first, second, first, second):
        with own.in_use():
            drawn.append(draw())
    alone = OwnStreams(None, seed=1, coordinate=coordinate)
    with alone.in_use():
        again = [draw(), draw()]
    # Put back while parked, and while in use.
    saved = {name: stream.get() for name, stream in alone.streams().items()}
    with alone.in_use():
        third = draw()
    for name, stream in alone.streams().items():
        stream.set(saved[name])
    with alone.in_use():
        restored = draw()
        for name, stream in alone.streams().items():
            stream.set(saved[name])
        restored_in_use = draw()
    return {
        "goes on": each_differs(*drawn),
        "as alone": [drawn[0], drawn[2]] == again,
        "restored": third == restored == restored_in_use,
        "process": before == {name: stream.get().tolist() for name, stream in random_streams(None).items()},
        "first": drawn[0],
    }


EXPECTED = {"goes on": True, "as alone": True, "restored": True, "process": True}


def with_megatrons_tracker() -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megaresume.megatron.cpu import use_cpu
    from megaresume.megatron.parallel import read_coordinate, read_topology

    use_cpu()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    return uses(read_coordinate(read_topology()))


def test_streams_are_parked_and_go_on(ranks: Ranks) -> None:
    found = ranks.run(with_megatrons_tracker, world_size=2)
    for each in found:
        assert {name: each[name] for name in EXPECTED} == EXPECTED
    left, right = (each["first"] for each in found)
    differing = {name for name in left if left[name] != right[name]}
    # On the CPU the tracker's expert stream follows the expert tensor rank, which is the tensor rank here.
    assert differing == {"tracker.model-parallel-rng", "tracker.expert-parallel-rng"}, "tensor ranks must draw alike"


def test_stages_draw_apart() -> None:
    first, second = (
        OwnStreams(None, seed=1, coordinate=Coordinate(tp=0, pp=pp, dp=0, cp=0, ep=0, etp=0)) for pp in (0, 1)
    )
    with first.in_use():
        one = (random.random(), torch.rand(2).tolist())
    with second.in_use():
        assert (random.random(), torch.rand(2).tolist()) != one


def test_an_adapter_is_active_once_at_a_time() -> None:
    own = OwnStreams(None, seed=1, coordinate=ORIGIN)
    with own.in_use():
        with pytest.raises(ConfigurationError, match="in use already"), own.in_use():
            pass
    with pytest.raises(RuntimeError, match="boom"), own.in_use():
        raise RuntimeError("boom")
    with own.in_use():
        pass
