"""Random streams of one's own in a process that has only one of each: parked, and swapped in while they are in use.

An adapter draws from these and from nothing else, so that adapters trained in turn do not disturb each other or the
process, and so that each resumes alone. What draws does not know of it: the base's dropout, recomputed layers and
Megatron's tracker work as ever. Knows no checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch

from megaresume.errors import ConfigurationError
from megaresume.megatron.rng import random_streams
from megaresume.state.rng import DEVICE, Stream
from megaresume.topology import Coordinate


class OwnStreams:
    """One of each stream that the process has at construction, seeded as Megatron seeds a run of its own.

    Default streams differ by pipeline stage alone, the model parallel one by tensor rank too, and so on: what must be
    drawn alike on several ranks is. Changes no stream of the process.
    """

    def __init__(self, device: torch.device | None, *, seed: int, coordinate: Coordinate) -> None:
        self._device = device
        self._in_use = False
        self._parked = {
            name: _seeded(name, stream, device, seed + 100 * coordinate.pp, coordinate)
            for name, stream in random_streams(device).items()
        }

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Everything in this context draws from these streams; afterwards the process has its own back as they were."""
        if self._in_use:
            raise ConfigurationError("these random streams are in use already: an adapter is active once at a time")
        live = random_streams(self._device)
        if live.keys() != self._parked.keys():
            raise ConfigurationError(
                f"the process has other random streams ({', '.join(live)}) than when the adapter was added "
                f"({', '.join(self._parked)}): seed Megatron's tracker before adapters are added"
            )
        outside = _take(live)
        _put(live, self._parked)
        self._in_use = True
        try:
            yield
        finally:
            self._parked = _take(live)
            _put(live, outside)
            self._in_use = False

    def streams(self) -> dict[str, Stream]:
        """These streams, by the names that the process's own have; in use or parked, the state is the current one."""
        return {name: self._stream(name) for name in self._parked}

    def _stream(self, name: str) -> Stream:
        def get() -> torch.Tensor:
            return random_streams(self._device)[name].get() if self._in_use else self._parked[name].clone()

        def put(state: torch.Tensor) -> None:
            if self._in_use:
                random_streams(self._device)[name].set(state)
            else:
                self._parked[name] = state.clone()

        return Stream(get, put)


def _take(streams: dict[str, Stream]) -> dict[str, torch.Tensor]:
    return {name: stream.get() for name, stream in streams.items()}


def _put(streams: dict[str, Stream], states: dict[str, torch.Tensor]) -> None:
    for name, stream in streams.items():
        stream.set(states[name])


def _seeded(name: str, stream: Stream, device: torch.device | None, seed: int, coordinate: Coordinate) -> torch.Tensor:
    """A fresh state for the stream of this name, from the seed that Megatron would give it."""
    if name in ("python", "numpy"):
        return _reseeded(stream, lambda: random.seed(seed) if name == "python" else np.random.seed(seed % 2**32))
    offsets = {
        "torch": 0,
        DEVICE: 0,
        "tracker.data-parallel-rng": 0,
        "tracker.model-parallel-rng": 2718 + coordinate.tp,
        "tracker.expert-parallel-rng": 1024 + 100 * coordinate.ep + coordinate.etp,
    }
    own = offsets.get(name)
    if own is None:  # a state of the user's: alike on all ranks of a stage, apart from the others
        own = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    on_device = name != "torch" and device is not None and device.type == "cuda"
    generator = torch.Generator(device=device) if on_device else torch.Generator()
    return generator.manual_seed(seed + own).get_state().cpu().clone()


def _reseeded(stream: Stream, reseed: Callable[[], None]) -> torch.Tensor:
    before = stream.get()
    reseed()
    state = stream.get()
    stream.set(before)
    return state
