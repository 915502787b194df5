"""Every random stream goes on exactly where it was, and a stored state that is none is refused before it is set."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megaresume.errors import FormatError, PoisonedError, StateMismatchError
from megaresume.megatron import rng as megatron_rng
from megaresume.state.rng import Stream, generator_stream, process_streams
from tests.state.objects import Net, advance_all_streams, draws, everything, plan, restore, save, streams


def test_every_stream_goes_on_in_the_middle_of_a_pair_of_gaussians(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(1)
    random.gauss(0, 1), np.random.standard_normal()  # a second one is pending in both
    model = Net()
    assert random.getstate()[2] is not None and np.random.get_state()[3] == 1
    path = save(tmp_path / "x.safetensors", model, streams=streams())
    expected = draws()
    advance_all_streams()
    restore(path, model, streams=streams())
    assert draws() == expected


def test_every_stream_goes_on_with_no_gaussian_pending(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    model = Net()
    path = save(tmp_path / "x.safetensors", model, streams=streams())
    expected = draws()
    random.gauss(0, 1), np.random.standard_normal()
    restore(path, model, streams=streams())
    assert draws() == expected


def test_each_stream_has_its_own_state(tmp_path: Path) -> None:
    """Two streams that were swapped, or one that was left out, would go unnoticed if all had the same seed."""
    names = list(streams())
    assert names == ["python", "numpy", "torch"]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    captured = {name: stream.get() for name, stream in streams().items()}
    for name in names:
        random.seed(4), np.random.seed(4), torch.manual_seed(4)
        streams()[name].set(captured[name])
        changed = {each: not torch.equal(stream.get(), captured[each]) for each, stream in streams().items()}
        assert changed == {each: each != name for each in names}


def test_a_captured_state_is_a_copy(tmp_path: Path) -> None:
    for name, stream in {**streams(), "generator": generator_stream(torch.Generator())}.items():
        captured = stream.get()
        before = captured.clone()
        advance_all_streams()
        assert captured.dtype == torch.uint8 and captured.ndim == 1 and captured.device.type == "cpu", name
        assert torch.equal(captured, before), name


def test_a_generator(tmp_path: Path) -> None:
    generator, other = torch.Generator().manual_seed(7), torch.Generator()
    torch.randn(3, generator=generator)
    model = Net()
    path = save(tmp_path / "x.safetensors", model, streams={"data": generator_stream(generator)})
    expected = torch.randn(4, generator=generator)
    restore(path, model, streams={"data": generator_stream(other)})
    assert torch.equal(torch.randn(4, generator=other), expected)


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
@pytest.mark.parametrize("cut", [0, 1, 8, -1])
def test_a_state_of_another_length_is_refused_before_anything_is_touched(name: str, cut: int, tmp_path: Path) -> None:
    def shorter() -> torch.Tensor:
        state = streams()[name].get()
        return state[:cut] if cut >= 0 else torch.cat([state, state[:1]])

    model = Net()
    short = {**streams(), name: Stream(shorter, lambda state: None)}
    path = save(tmp_path / "x.safetensors", model, streams=short)
    advance_all_streams()
    before = everything(model)
    with pytest.raises(StateMismatchError, match=f"random stream {name} has .* bytes in the checkpoint"):
        plan(path, model, streams=streams())
    assert everything(model) == before


@pytest.mark.parametrize("name", ["python", "numpy", "torch", "generator"])
def test_bytes_that_are_no_state_are_refused_by_the_name_of_the_stream(name: str, tmp_path: Path) -> None:
    own = {**streams(), "generator": generator_stream(torch.Generator())}
    model = Net()
    noise = Stream(lambda: torch.full_like(own[name].get(), 255), lambda state: None)
    path = save(tmp_path / "x.safetensors", model, streams={**own, name: noise})
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with pytest.raises(PoisonedError, match=f"rng/{name}: the stored bytes are no state of this generator") as caught:
        restore(path, model, streams={name: own[name]} | own)
    assert isinstance(caught.value.__cause__, FormatError)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_numpys_other_generators_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(np.random, "get_state", lambda legacy: ("PCG64", [], 0, 0, 0.0))
    with pytest.raises(Exception, match="numpy's global generator is PCG64"):
        process_streams(None)["numpy"].get()


class Tracker:
    """Megatron's tracker as far as it is used: live states by name, replaced as a whole."""

    def __init__(self, **states: torch.Tensor) -> None:
        self.states = states

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


def tracker_streams(tracker: Tracker) -> dict[str, Stream]:
    return {f"tracker.{name}": megatron_rng._named(tracker, name) for name in tracker.get_states()}


def state_of(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def test_a_tracker_keeps_all_its_streams(tmp_path: Path) -> None:
    saved = Tracker(**{"model-parallel-rng": state_of(1), "expert-parallel-rng": state_of(2)})
    model = Net()
    path = save(tmp_path / "x.safetensors", model, streams=tracker_streams(saved))
    run = Tracker(**{"model-parallel-rng": state_of(3), "expert-parallel-rng": state_of(4)})
    restore(path, model, streams=tracker_streams(run))
    assert list(run.states) == list(saved.states)
    assert all(torch.equal(run.states[name], state) for name, state in saved.states.items())
    assert all(run.states[name] is not state for name, state in saved.states.items())
