"""Cases O18 and O19: which optimizer options may differ between checkpoint and run, and whose win."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from megaresume.state.scheduler import capture_scheduler, restore_scheduler
from tests.state.layouts import FusedAdamLike, LowPrecisionMoments, groups
from tests.state.objects import Net, moments, refusal, restore, save, streams, train

# --- O18: whose learning rate wins -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True], ids=["the checkpoint's", "the run's"])
def test_o18_one_side_wins_by_rule_and_each_difference_is_said(keep: bool, tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    train(model, optimizer, 2)
    path = save(tmp_path / "x.safetensors", model, optimizer)
    new = Net(seed=1)
    run = torch.optim.AdamW(new.parameters(), lr=5e-5, weight_decay=0.2)
    made = restore(path, new, run, keep_run_options=keep)
    side = "the run's is kept" if keep else "the checkpoint's is taken"
    assert made.differences == [
        f"parameter group 0: lr is 0.0001 in the checkpoint, 5e-05 in this run: {side}",
        f"parameter group 0: weight_decay is 0.1 in the checkpoint, 0.2 in this run: {side}",
    ]
    wanted = (5e-5, 0.2) if keep else (1e-4, 0.1)
    assert (run.param_groups[0]["lr"], run.param_groups[0]["weight_decay"]) == wanted
    assert moments(new, run) == moments(model, optimizer), "the rest of the state comes back either way"
    train(new, run, 1)
    again = save(tmp_path / "y.safetensors", new, run)
    last = Net()
    last_run = torch.optim.AdamW(last.parameters())
    restore(again, last, last_run)
    assert (last_run.param_groups[0]["lr"], last_run.param_groups[0]["weight_decay"]) == wanted, "survives a save"


def test_o18_a_rate_in_a_tensor_that_is_kept(tmp_path: Path) -> None:
    model = Net()
    path = save(tmp_path / "x.safetensors", model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25)))
    run = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    made = restore(path, model, run, keep_run_options=True)
    assert run.param_groups[0]["lr"].item() == 0.5
    assert made.differences == ["parameter group 0: lr is held in a tensor: the run's is kept"]
    restore(path, model, run)
    assert run.param_groups[0]["lr"].item() == 0.25
    message = refusal(path, model, torch.optim.AdamW(model.parameters(), lr=0.5))
    assert "option lr is held in a tensor in the checkpoint, 0.5 in this run" in message
    wide = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5, dtype=torch.float64))
    assert "option lr is held in a tensor of another dtype or shape in the checkpoint" in refusal(path, model, wide)


def test_o18_an_equal_run_has_nothing_to_say(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    train(model, optimizer, 1)
    path = save(tmp_path / "x.safetensors", model, optimizer)
    assert restore(path, model, optimizer).differences == []


def test_o18_a_rate_that_only_one_side_has_is_said(tmp_path: Path) -> None:
    model = Net()
    plain, scheduled = (torch.optim.AdamW(model.parameters(), lr=0.1) for _ in range(2))
    lr_scheduler.ExponentialLR(scheduled, gamma=0.5)
    first = save(tmp_path / "plain.safetensors", model, plain)
    second = save(tmp_path / "scheduled.safetensors", model, scheduled)
    made = restore(first, model, scheduled)
    assert made.differences == [
        "parameter group 0: initial_lr is not in the checkpoint, 0.1 in this run: the run's is kept"
    ]
    made = restore(second, model, plain)
    assert made.differences == [
        "parameter group 0: initial_lr is 0.1 in the checkpoint, not set in this run: the checkpoint's is taken"
    ]
    assert plain.param_groups[0]["initial_lr"] == 0.1


def test_o18_momentum_that_a_schedule_moves_may_differ(tmp_path: Path) -> None:
    def make() -> tuple[Net, Any, Any]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)

    model, optimizer, scheduler = make()
    train(model, optimizer, 4, scheduler=scheduler)
    path, schedule = save(tmp_path / "x.safetensors", model, optimizer, streams=streams()), capture_scheduler(scheduler)
    losses = train(model, optimizer, 4, scheduler=scheduler)
    new_model, new_optimizer, new_scheduler = make()
    restore_scheduler(schedule, new_scheduler, keep_run_options=False)
    restore(path, new_model, new_optimizer, streams=streams())
    assert train(new_model, new_optimizer, 4, scheduler=new_scheduler) == losses


# --- O19: another optimizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "current", "line"),
    [
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p, lr=0.1),
            "optimizer 0 is a SGD in the checkpoint, a AdamW in this run",
        ),
        (
            lambda p: torch.optim.Adam(p, lr=0.1),
            lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
            "optimizer 0, parameter group 0: option amsgrad is False in the checkpoint, True in this run",
        ),
        (
            lambda p: torch.optim.Adam(p, lr=0.1),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.95)),
            "option betas is (0.9, 0.999) in the checkpoint, (0.9, 0.95) in this run",
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "option momentum is 0 in the checkpoint, 0.9 in this run",
        ),
        (
            FusedAdamLike,
            LowPrecisionMoments,
            "optimizer 0 is a FusedAdamLike in the checkpoint, a LowPrecisionMoments in this run",
        ),
        (
            lambda p: torch.optim.Adam([{"params": list(p), "decoupled": True}]),
            lambda p: torch.optim.Adam(p),
            "option decoupled is True in the checkpoint, not set in this run",
        ),
        (
            lambda p: torch.optim.Adam(p, lr=0.1),
            lambda p: torch.optim.Adam([{"params": list(p), "lr": "fast"}]),
            "option lr is 0.1 in the checkpoint, 'fast' in this run",
        ),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_o19_another_class_or_other_options_are_refused_before_the_first_step(
    saved, current, line: str, keep: bool, tmp_path: Path
) -> None:
    model = Net()
    optimizer = saved(model.parameters())
    train(model, optimizer, 2)
    path = save(tmp_path / "x.safetensors", model, optimizer)
    other = Net(seed=1)
    assert line in refusal(path, other, current(other.parameters()), keep_run_options=keep)


def test_o19_state_that_the_run_has_no_room_for_is_refused(tmp_path: Path) -> None:
    """The same class by name, from another library or version."""
    model = Net()
    optimizer = LowPrecisionMoments(model.parameters())
    train(model, optimizer, 1)
    path = save(tmp_path / "x.safetensors", model, optimizer)
    roomless = LowPrecisionMoments(model.parameters())
    del roomless._scales
    message = refusal(path, model, roomless)
    assert "scale: the checkpoint holds state 'scale.' that a LowPrecisionMoments has no room for here" in message


def test_o19_numpys_numbers_mean_what_they_say(tmp_path: Path) -> None:
    model = Net()
    path = save(tmp_path / "x.safetensors", model, torch.optim.Adam(model.parameters(), lr=0.1, eps=np.float64(1e-8)))
    run = torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-8)
    restore(path, model, run)
    assert run.param_groups[0]["eps"] == 1e-8
