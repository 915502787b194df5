"""Megatron's named random streams (checked with megatron-core 0.14 and 0.16.1, TE's tracker by its interface).

`get_states()` returns live tensors, so states are copied at capture. A graph-safe tracker holds generators instead.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from megaresume.state.rng import Stream, generator_stream, process_streams

_PREFIX = "tracker."


def random_streams(device: torch.device | None) -> dict[str, Stream]:
    """All streams of this rank: the process's own and, as "tracker.<name>", each named state of Megatron's tracker in
    use."""
    streams = process_streams(device)
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    if module is None or not module._CUDA_RNG_STATE_TRACKER_INITIALIZED:
        return streams
    tracker = module.get_cuda_rng_tracker()
    for name, state in tracker.get_states().items():
        streams[_PREFIX + name] = (
            generator_stream(state) if isinstance(state, torch.Generator) else _named(tracker, name)
        )
    return streams


def _named(tracker: Any, name: str) -> Stream:
    def put(state: torch.Tensor) -> None:
        # set_states replaces the whole table; the other streams go back as they are.
        tracker.set_states({**tracker.get_states(), name: state.clone()})

    return Stream(lambda: tracker.get_states()[name].cpu().clone(), put)
