"""Random number streams: every one of a rank's own, captured as copies and put back exactly.

A stream is Python's, NumPy's, torch's host and device generator, a named state of Megatron's tracker, or a generator of
the user's. States are bytes on the host whatever the device of the weights. Knows no Megatron: trackers come in as
plain functions.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megaresume.errors import FormatError

logger = logging.getLogger("megaresume.state.rng")

DEVICE = "device"

_MT19937_WORDS = 624


@dataclass(frozen=True)
class Stream:
    """One stream: `get()` returns a copy of its state as a host uint8 tensor, `set(state)` puts such a state back."""

    get: Callable[[], torch.Tensor]
    set: Callable[[torch.Tensor], None]


def process_streams(device: torch.device | None) -> dict[str, Stream]:
    """This process's streams: "python", "numpy", "torch" and, where `device` is an accelerator in use, "device"."""
    streams = {
        "python": Stream(_get_python, _set_python),
        "numpy": Stream(_get_numpy, _set_numpy),
        "torch": Stream(lambda: torch.get_rng_state().clone(), torch.set_rng_state),
    }
    if device is not None and device.type == "cuda":
        streams[DEVICE] = Stream(
            lambda: torch.cuda.get_rng_state(device).cpu().clone(),
            lambda state: torch.cuda.set_rng_state(state, device),
        )
    return streams


def generator_stream(generator: torch.Generator) -> Stream:
    """The stream of a `torch.Generator` of the user's (or of a graph-safe tracker)."""
    return Stream(lambda: generator.get_state().cpu().clone(), lambda state: _set_generator(generator, state))


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _get_python() -> torch.Tensor:
    version, words, gauss = random.getstate()
    # 625 words of 32 bits, then whether a second Gaussian is pending and its 64 bits.
    tail = np.array([0.0 if gauss is None else gauss], dtype="<f8")
    header = np.array([version, gauss is not None], dtype="<u4")
    return _bytes(header, np.array(words, dtype="<u4"), tail)


def _set_python(state: torch.Tensor) -> None:
    raw = state.numpy().tobytes()
    header = np.frombuffer(raw[:8], dtype="<u4")
    words = np.frombuffer(raw[8:-8], dtype="<u4")
    gauss = float(np.frombuffer(raw[-8:], dtype="<f8")[0]) if header[1] else None
    random.setstate((int(header[0]), tuple(int(word) for word in words), gauss))


def _get_numpy() -> torch.Tensor:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    if name != "MT19937":
        raise FormatError(f"numpy's global generator is {name}; only MT19937, its default, can be stored")
    header = np.array([position, has_gauss], dtype="<u4")
    return _bytes(header, np.asarray(keys, dtype="<u4"), np.array([gauss], dtype="<f8"))


def _set_numpy(state: torch.Tensor) -> None:
    raw = state.numpy().tobytes()
    position, has_gauss = (int(word) for word in np.frombuffer(raw[:8], dtype="<u4"))
    if position > _MT19937_WORDS or has_gauss > 1:  # numpy would read past the end of its words
        raise ValueError(f"position {position} in {_MT19937_WORDS} words, {has_gauss} Gaussians pending")
    keys = np.frombuffer(raw[8:-8], dtype="<u4").astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(np.frombuffer(raw[-8:], dtype="<f8")[0])))


def _bytes(*arrays: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(array.tobytes() for array in arrays)), dtype=torch.uint8)


@dataclass
class RngPlan:
    """Where stored streams go: to the host first; `install()` sets them, after everything that may draw from them."""

    destinations: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _streams: list[tuple[Stream, str]] = field(default_factory=list)

    def install(self) -> None:
        """Set every planned stream. Raises FormatError naming the one whose generator refuses the stored state."""
        for stream, name in self._streams:
            try:
                stream.set(self.destinations[name])
            except (RuntimeError, TypeError, ValueError) as error:
                raise FormatError(f"{name}: the stored bytes are no state of this generator: {error}") from error


def rng_mismatches(saved: list[str], spans: Mapping[str, Any], streams: Mapping[str, Stream]) -> list[str]:
    """Streams that only one side has, and states of another length.

    A device stream on one side only is no mismatch: `plan_rng` says what is lost. `spans["rng/<name>"].shape` is the
    length of a stored state in bytes. Reads the streams and changes none.
    """
    remedy = "resume with load_rng=False to keep this run's fresh streams"
    problems = [
        f"random stream {name} is in the checkpoint, not in this run ({remedy})"
        for name in saved
        if name not in streams and name != DEVICE
    ]
    problems += [
        f"random stream {name} is in this run, not in the checkpoint ({remedy})"
        for name in streams
        if name not in saved and name != DEVICE
    ]
    for name in saved:
        if name not in streams:
            continue
        if f"rng/{name}" not in spans:
            raise FormatError(f"the index lists random stream {name}, but the file does not hold its state")
        wanted, found = [streams[name].get().numel()], list(spans[f"rng/{name}"].shape)
        if found != wanted:
            problems.append(
                f"random stream {name} has {found} bytes in the checkpoint, {wanted} in this run: another generator or "
                f"library version ({remedy})"
            )
    return problems


def plan_rng(saved: list[str], streams: Mapping[str, Stream]) -> RngPlan:
    """Find a place for every stored stream; touches none. Call it after `rng_mismatches` was empty."""
    plan = RngPlan()
    for name in saved:
        if name in streams:
            # On the host, whatever default device the user has set.
            plan.destinations[f"rng/{name}"] = torch.empty(streams[name].get().numel(), dtype=torch.uint8, device="cpu")
            plan._streams.append((streams[name], f"rng/{name}"))
    if DEVICE in saved and DEVICE not in streams:
        plan.left_out.append("random stream device (this process has no device)")
    if DEVICE in streams and DEVICE not in saved:
        plan.left_out.append("random stream device (not in the checkpoint; it keeps this run's fresh state)")
    for line in plan.left_out:
        logger.warning("not restored: %s", line)
    return plan
