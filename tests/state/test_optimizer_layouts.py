"""Any layout of optimizer state comes back bit for bit, in the same objects and in new ones, and trains on alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megaresume.errors import StateMismatchError, UnsupportedError
from tests.state.layouts import LAYOUTS, MixedPrecision
from tests.state.objects import Net, everything, frozen, plan, restore, save, streams, train

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@every_layout
def test_restored_over_more_training(layout, tmp_path: Path) -> None:
    model = Net()
    optimizer = layout(model)
    train(model, optimizer, 4)
    before = everything(model, optimizer)
    path = save(tmp_path / "x.safetensors", model, optimizer, streams=streams())
    assert everything(model, optimizer) == before, "a save changes nothing"
    losses = train(model, optimizer, 3)
    after = everything(model, optimizer)
    assert after != before
    restore(path, model, optimizer, streams=streams())
    assert everything(model, optimizer) == before
    assert train(model, optimizer, 3) == losses
    assert everything(model, optimizer) == after


@every_layout
def test_restored_in_new_objects(layout, tmp_path: Path) -> None:
    model = Net()
    optimizer = layout(model)
    train(model, optimizer, 4)
    before = everything(model, optimizer)
    path = save(tmp_path / "x.safetensors", model, optimizer, streams=streams())
    losses = train(model, optimizer, 3)
    after = everything(model, optimizer)
    new_model = Net(seed=1)
    new_optimizer = layout(new_model)
    restore(path, new_model, new_optimizer, streams=streams())
    assert everything(new_model, new_optimizer) == before
    assert train(new_model, new_optimizer, 3) == losses
    assert everything(new_model, new_optimizer) == after


@every_layout
def test_saved_before_the_first_step(layout, tmp_path: Path) -> None:
    model = Net()
    optimizer = layout(model)
    before = everything(model, optimizer)
    path = save(tmp_path / "x.safetensors", model, optimizer, streams=streams())
    losses = train(model, optimizer, 3)
    after = everything(model, optimizer)
    restore(path, model, optimizer, streams=streams())
    assert everything(model, optimizer) == before, "state that was not there is gone again"
    assert train(model, optimizer, 3) == losses
    assert everything(model, optimizer) == after


@every_layout
def test_restored_twice_is_restored_once(layout, tmp_path: Path) -> None:
    model = Net()
    optimizer = layout(model)
    train(model, optimizer, 2)
    before = everything(model, optimizer)
    path = save(tmp_path / "x.safetensors", model, optimizer, streams=streams())
    for _ in range(3):
        restore(path, model, optimizer, streams=streams())
        assert everything(model, optimizer) == before


@every_layout
def test_saved_again_it_is_the_same_file(layout, tmp_path: Path) -> None:
    model = Net()
    optimizer = layout(model)
    train(model, optimizer, 2)
    first = save(tmp_path / "first.safetensors", model, optimizer, streams=streams())
    train(model, optimizer, 2)
    restore(first, model, optimizer, streams=streams())
    second = save(tmp_path / "second.safetensors", model, optimizer, streams=streams())
    assert second.read_bytes() == first.read_bytes()


def test_one_altered_moment_is_noticed_by_these_tests(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 4)
    path = save(tmp_path / "x.safetensors", model, optimizer, streams=streams())
    before, losses = everything(model, optimizer), train(model, optimizer, 3)
    restore(path, model, optimizer, streams=streams())
    moment = optimizer.state[model.second.weight]["exp_avg"]
    moment.view(-1).view(torch.int32)[0] += 1
    assert everything(model, optimizer) != before
    moment.view(-1).view(torch.int32)[0] += 1 << 20
    assert train(model, optimizer, 3) != losses


def test_state_is_read_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    """CUDA graphs and foreach kernels hold on to them, and a second copy may not fit."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    train(model, optimizer, 2)
    path = save(tmp_path / "x.safetensors", model, optimizer)
    moment, rate = optimizer.state[model.first.weight]["exp_avg"], optimizer.param_groups[0]["lr"]
    train(model, optimizer, 1)
    rate.mul_(0.5)
    restore(path, model, optimizer)
    assert optimizer.state[model.first.weight]["exp_avg"] is moment
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(0.01)


def test_betas_in_tensors(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        betas = (torch.tensor(0.9), torch.tensor(0.99))
        return torch.optim.AdamW(model.parameters(), lr=0.01, betas=betas)

    model = Net()
    optimizer = make(model)
    path = save(tmp_path / "x.safetensors", model, optimizer)
    before = frozen(optimizer.param_groups[0]["betas"])
    new_model = Net()
    new_optimizer = make(new_model)
    new_optimizer.param_groups[0]["betas"][0].fill_(0.5)
    made = restore(path, new_model, new_optimizer)
    assert frozen(new_optimizer.param_groups[0]["betas"]) == before
    assert made.differences == ["parameter group 0: betas is held in a tensor: the checkpoint's is taken"]


def test_masters_of_half_precision_weights(tmp_path: Path) -> None:
    run = MixedPrecision(Net())
    run.train(range(3))
    before = everything(run.model, run, run.masters)
    path = save(tmp_path / "x.safetensors", run.model, run)
    run.train(range(3, 6))
    after = everything(run.model, run, run.masters)
    restore(path, run.model, run)
    assert everything(run.model, run, run.masters) == before
    new = MixedPrecision(Net(seed=1))
    restore(path, new.model, new)
    for part in ("model", "optimizers", "others"):
        assert everything(new.model, new, new.masters)[part] == before[part]
    new.train(range(3, 6))
    for part in ("model", "optimizers", "others"):
        assert everything(new.model, new, new.masters)[part] == after[part]


def test_state_that_belongs_to_no_parameter_is_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["calls"] = {"count": 3}
    with pytest.raises(UnsupportedError, match="optimizer 0 \\(SGD\\) keeps state under 'calls'"):
        save(tmp_path / "x.safetensors", model, optimizer)
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.eye(3).to_sparse(), "sparse"),
        ({"a": object()}, "builtins.object"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named(value, words: str, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.scale] = {"strange": value}
    with pytest.raises(UnsupportedError, match=f"optim/0/strange/scale.*({words})"):
        save(tmp_path / "x.safetensors", model, optimizer)


class Quantised(torch.Tensor):
    """A subclass whose own memory is not all of it, as torchao's states are."""


def test_a_tensor_subclass_is_refused(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.scale] = {"exp_avg": torch.zeros(3).as_subclass(Quantised)}
    with pytest.raises(UnsupportedError, match="optim/0/exp_avg/scale is a Quantised"):
        save(tmp_path / "x.safetensors", model, optimizer)


def test_two_values_under_one_name_are_refused(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lr = nn.Parameter(torch.zeros(2))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    optimizer.state[model.lr] = {"group0": torch.zeros(2)}
    with pytest.raises(UnsupportedError, match="optim/0/group0/lr"):
        save(tmp_path / "x.safetensors", model, optimizer)


def test_a_slot_called_master(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.scale] = {"master": torch.tensor(2.5), "weight": torch.tensor(3.5)}
    path = save(tmp_path / "x.safetensors", model, optimizer)
    new_model = Net()
    new_optimizer = torch.optim.SGD(new_model.parameters(), lr=0.1)
    restore(path, new_model, new_optimizer)
    assert everything(new_model, new_optimizer)["optimizers"] == everything(model, optimizer)["optimizers"]


def test_masters_on_one_side_only_are_refused(tmp_path: Path) -> None:
    with_masters, without = MixedPrecision(Net()), MixedPrecision(Net(), masters=False)
    first = save(tmp_path / "with.safetensors", with_masters.model, with_masters)
    second = save(tmp_path / "without.safetensors", without.model, without)
    with pytest.raises(StateMismatchError, match="bias has a master of higher precision in the checkpoint, not in"):
        plan(first, without.model, without)
    with pytest.raises(StateMismatchError, match="bias has a master of higher precision in this run, not in the"):
        plan(second, with_masters.model, with_masters)
