"""Cases R: what went wrong with random numbers for people who resumed training, as far as one process shows it."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from megaresume.errors import StateMismatchError
from megaresume.state.rng import Stream, generator_stream
from tests.state.objects import Net, advance_all_streams, draws, everything, plan, restore, save, streams, train
from tests.state.test_rng import Tracker, state_of, tracker_streams


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_r05_random_states_are_read_on_the_host_whatever_the_default_device(device: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    own = {**streams(), "generator": generator_stream(generator)}
    model = Net()
    with torch.device(device):
        path = save(tmp_path / "x.safetensors", model, streams=own, registered={"again": generator})
    expected = [draws(), torch.rand(2, generator=generator).tolist()]
    advance_all_streams()
    with torch.device(device):
        made = restore(path, model, streams=own, registered={"again": generator})
    stored = {name: tensor for name, tensor in made.destinations.items() if name.startswith(("rng/", "registered/"))}
    assert len(stored) == 5
    assert {(tensor.device.type, tensor.dtype) for tensor in stored.values()} == {("cpu", torch.uint8)}
    assert [draws(), torch.rand(2, generator=generator).tolist()] == expected


def device_stream(generator: torch.Generator) -> dict[str, Stream]:
    return {"device": generator_stream(generator)}


def test_r06_a_process_without_a_device_says_so_and_gets_its_other_streams(tmp_path: Path, caplog) -> None:
    device = torch.Generator().manual_seed(5)
    model = Net()
    path = save(tmp_path / "x.safetensors", model, streams={**streams(), **device_stream(device)})
    expected = draws()
    advance_all_streams()
    with caplog.at_level(logging.WARNING):
        made = restore(path, model, streams=streams())
    assert draws() == expected
    assert made.left_out == ["random stream device (this process has no device)"]
    assert [record.getMessage() for record in caplog.records] == [f"not restored: {made.left_out[0]}"]


def test_r06_a_device_that_is_not_in_the_checkpoint_keeps_its_stream_and_that_is_said(tmp_path: Path, caplog) -> None:
    model = Net()
    path = save(tmp_path / "x.safetensors", model, streams=streams())
    expected = draws()
    device = torch.Generator().manual_seed(5)
    fresh = device.get_state()
    with caplog.at_level(logging.WARNING):
        made = restore(path, model, streams={**streams(), **device_stream(device)})
    assert draws() == expected
    assert torch.equal(device.get_state(), fresh)
    assert "random stream device (not in the checkpoint; it keeps this run's fresh state)" in made.left_out
    assert "not restored: random stream device" in caplog.text


def test_r06_a_device_gets_its_own_state(tmp_path: Path) -> None:
    model, device, other = Net(), torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    path = save(tmp_path / "x.safetensors", model, streams=device_stream(device))
    restore(path, model, streams=device_stream(other))
    assert torch.equal(other.get_state(), device.get_state())


def test_r07_a_state_that_cannot_be_given_back_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    """The bytes themselves are under the file's digests; here the file is whole, and a state is another library's."""
    model = Net()
    longer = Stream(lambda: torch.zeros(5, dtype=torch.uint8), lambda state: None)
    path = save(tmp_path / "x.safetensors", model, streams={**streams(), "torch": longer})
    before = everything(model)
    with pytest.raises(StateMismatchError) as caught:
        plan(path, model, streams=streams())
    own = streams()["torch"].get().numel()
    assert f"random stream torch has [5] bytes in the checkpoint, [{own}] in this run" in str(caught.value)
    assert "load_rng=False" in str(caught.value)
    assert everything(model) == before
    made = restore(path, model, streams=None)
    assert made.left_out == ["random numbers (not asked for)"]
    assert everything(model) == before


def refuse(*args: Any) -> NoReturn:
    raise AssertionError("a random stream was read or set")


def test_r08_saving_and_loading_random_numbers_are_switched_apart(tmp_path: Path, monkeypatch) -> None:
    random.seed(1)
    model = Net()
    with_rng = save(tmp_path / "with.safetensors", model, streams=streams())
    expected = draws()
    with monkeypatch.context() as patched:
        for owner, name in [(random, "getstate"), (torch, "get_rng_state"), (torch.cuda, "get_rng_state")]:
            patched.setattr(owner, name, refuse)
        without_rng = save(tmp_path / "without.safetensors", model, streams=None)
    # Saved without, loaded with: said to be absent by choice, and this run's streams go on.
    advance_all_streams()
    before = everything(model)
    made = restore(without_rng, model, streams=streams())
    assert made.left_out == ["random numbers (not in the checkpoint, by its writer's choice)"]
    assert everything(model) == before
    # Saved with, not loaded: nothing is read or set.
    with monkeypatch.context() as patched:
        for owner, name in [(random, "setstate"), (torch, "set_rng_state")]:
            patched.setattr(owner, name, refuse)
        made = restore(with_rng, model, streams=None)
    assert made.left_out == ["random numbers (not asked for)"]
    assert everything(model) == before
    # Saved with, loaded by a run that itself saves none: loading is not its saving.
    assert restore(with_rng, model, streams=streams()).left_out == []
    assert draws() == expected


@pytest.mark.parametrize(
    ("saved", "current", "line"),
    [
        (["default", "mp"], ["default", "mp", "cp"], "tracker.cp is in this run, not in the checkpoint"),
        (["default", "mp", "cp"], ["default", "mp"], "tracker.cp is in the checkpoint, not in this run"),
    ],
)
def test_r09_a_stream_that_only_one_side_has_is_refused_by_name(saved, current, line: str, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    writer = Tracker(**{name: state_of(seed) for seed, name in enumerate(saved)})
    run = Tracker(**{name: state_of(seed + 10) for seed, name in enumerate(current)})
    path = save(tmp_path / "x.safetensors", model, optimizer, streams={**streams(), **tracker_streams(writer)})
    train(model, optimizer, 1)
    before = everything(model, optimizer, run.states)
    with pytest.raises(StateMismatchError, match=f"random stream {line}.*load_rng=False"):
        plan(path, model, optimizer, streams={**streams(), **tracker_streams(run)})
    assert everything(model, optimizer, run.states) == before, "none is deleted, none is set"
    # The way out that the message names.
    made = restore(path, model, optimizer, streams=None)
    assert made.left_out == ["random numbers (not asked for)"]
    assert everything(model, optimizer, run.states)["others"] == before["others"]
