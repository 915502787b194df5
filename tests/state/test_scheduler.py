"""Learning-rate schedules: megatron-core's and torch's go on where they stood, and loading twice changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim import lr_scheduler

from megaresume.errors import FormatError, StateMismatchError, UnsupportedError
from megaresume.state import trainer_state
from megaresume.state.scheduler import (
    capture_scheduler,
    restore_scheduler,
    scheduler_differences,
    scheduler_mismatches,
)
from megaresume.state.trainer_state import TrainerState
from tests.state.objects import frozen

TOTAL = 24


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": [weights[0]]}, {"params": [weights[1]], "lr": 0.1}], lr=lr, momentum=0.9)


def megatron(trained: Any, **changes: Any) -> OptimizerParamScheduler:
    for group in trained.param_groups:
        group.setdefault("wd_mult", 1.0)
    settings = {
        "init_lr": 0.0,
        "max_lr": 1.0,
        "min_lr": 0.1,
        "lr_warmup_steps": 16,
        "lr_decay_steps": 160,
        "lr_decay_style": "cosine",
        "start_wd": 0.0,
        "end_wd": 0.1,
        "wd_incr_steps": 100,
        "wd_incr_style": "linear",
    }
    return OptimizerParamScheduler(trained, **{**settings, **changes})


class Decay:
    """A callable object: its state goes along, where a function has none."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, epoch: int) -> float:
        return self.factor**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "megatron, cosine": megatron,
    "megatron, WSD": lambda o: megatron(
        o, lr_decay_style="WSD", wsd_decay_steps=60, lr_wsd_decay_style="minus_sqrt", init_lr=0.01
    ),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 7, 7, 9], gamma=0.3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20, eta_min=0.01),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda epoch: 1 / (1 + epoch), Decay(0.9)]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4, T_mult=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[1.0, 0.5], total_steps=TOTAL + 1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=5), lr_scheduler.ExponentialLR(o, gamma=0.8)],
        milestones=[5],
    ),
}
every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


def rates(trained: Any) -> list[Any]:
    names = ("lr", "weight_decay", "momentum")
    return [
        [group[name].hex() for name in names if isinstance(group.get(name), float)] for group in trained.param_groups
    ]


def go(scheduler: Any, trained: Any, steps: int) -> list[Any]:
    seen = []
    for _ in range(steps):
        trained.step()
        scheduler.step(increment=8) if isinstance(scheduler, OptimizerParamScheduler) else scheduler.step()
        seen.append(rates(trained))
    return seen


def copy_options(source: Any, target: Any) -> None:
    """What restoring the optimizer does to its options, learning rates among them."""
    for before, after in zip(source, target.param_groups, strict=True):
        after.update(copy.deepcopy(before))


def options(trained: Any) -> list[dict[str, Any]]:
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in trained.param_groups
    ]


def through_file(saved: Any) -> Any:
    """What comes back of it from a trainer_state.json."""
    state = TrainerState(global_step=1, consumed_train_samples=8, scheduler=saved)
    return trainer_state.loads(trainer_state.dumps(state), source="test").scheduler


@every_scheduler
@pytest.mark.parametrize("at", [0, 1, 3, 7, 12])
def test_it_goes_on_where_it_stood_in_new_objects_and_over_more_steps(make, at: int) -> None:
    trained = optimizer()
    scheduler = make(trained)
    go(scheduler, trained, at)
    saved, saved_options, now = through_file(capture_scheduler(scheduler)), options(trained), rates(trained)
    expected = go(scheduler, trained, TOTAL - at)
    new_trained = optimizer()
    for run, its_optimizer in [(make(new_trained), new_trained), (scheduler, trained)]:
        for _ in range(3):
            assert scheduler_mismatches(saved, run) == []
            restore_scheduler(saved, run, keep_run_options=False)
            copy_options(saved_options, its_optimizer)
            assert capture_scheduler(run) == saved
            assert rates(its_optimizer) == now
        assert go(run, its_optimizer, TOTAL - at) == expected


@every_scheduler
def test_planning_touches_nothing_and_sees_no_difference_in_mere_position(make) -> None:
    trained = optimizer()
    scheduler = make(trained)
    go(scheduler, trained, 5)
    saved = capture_scheduler(scheduler)
    go(scheduler, trained, 2)
    before = capture_scheduler(scheduler), rates(trained)
    assert scheduler_mismatches(saved, scheduler) == []
    assert scheduler_differences(saved, scheduler, keep_run_options=False) == []
    assert (capture_scheduler(scheduler), rates(trained)) == before


def test_values_keep_their_types() -> None:
    """A milestone table whose keys became text, or a Counter that became a dict, breaks later."""
    scheduler = SCHEDULERS["MultiStepLR"](optimizer())
    before = frozen(scheduler.state_dict())
    restore_scheduler(through_file(capture_scheduler(scheduler)), scheduler, keep_run_options=False)
    assert frozen(scheduler.state_dict()) == before
    assert sorted(scheduler.milestones.elements()) == [3, 7, 7, 9]


def test_megatrons_own_loading_doubles_the_position() -> None:
    """The trap that `restore_scheduler` is there for; if this fails, megatron-core has changed."""
    trained = optimizer()
    scheduler = megatron(trained)
    go(scheduler, trained, 5)
    scheduler.load_state_dict(scheduler.state_dict())
    assert scheduler.num_steps == 80


def test_the_settings_of_the_run_or_the_checkpoint_win_and_that_is_said() -> None:
    trained = optimizer()
    scheduler = megatron(trained)
    go(scheduler, trained, 5)
    saved, saved_options = capture_scheduler(scheduler), options(trained)
    changes = {"max_lr": 2.0, "init_lr": 0.5, "end_wd": 0.3}

    run_optimizer = optimizer()
    run = megatron(run_optimizer, **changes)
    lines = scheduler_differences(saved, run, keep_run_options=False)
    assert sorted(lines) == [
        "scheduler: end_wd is 0.1 in the checkpoint, 0.3 in this run: the checkpoint's is taken",
        "scheduler: init_lr is 0.0 in the checkpoint, 0.5 in this run: the checkpoint's is taken",
        "scheduler: max_lr is 1.0 in the checkpoint, 2.0 in this run: the checkpoint's is taken",
    ]
    restore_scheduler(saved, run, keep_run_options=False)
    copy_options(saved_options, run_optimizer)
    assert go(run, run_optimizer, 5) == go(scheduler, trained, 5)

    kept_optimizer, wanted_optimizer = optimizer(), optimizer()
    kept, wanted = megatron(kept_optimizer, **changes), megatron(wanted_optimizer, **changes)
    lines = scheduler_differences(saved, kept, keep_run_options=True)
    assert len(lines) == 3 and all(line.endswith("in this run: the run's is kept") for line in lines)
    go(wanted, wanted_optimizer, 5)
    restore_scheduler(saved, kept, keep_run_options=True)
    assert rates(kept_optimizer) == rates(wanted_optimizer), "recomputed from the position and the run's settings"
    assert go(kept, kept_optimizer, 5) == go(wanted, wanted_optimizer, 5)


def test_a_scheduler_that_cannot_keep_the_runs_settings_refuses_when_it_is_asked_not_when_it_is_restored() -> None:
    scheduler = SCHEDULERS["CosineAnnealingLR"](optimizer())
    saved = capture_scheduler(scheduler)
    with pytest.raises(StateMismatchError, match="CosineAnnealingLR cannot keep the run's settings"):
        scheduler_differences(saved, scheduler, keep_run_options=True)


def test_schedulers_of_another_kind_or_on_one_side_only() -> None:
    cosine, steps = SCHEDULERS["CosineAnnealingLR"](optimizer()), SCHEDULERS["MultiStepLR"](optimizer())
    saved = capture_scheduler(cosine)
    assert scheduler_mismatches(saved, steps) == [
        "the scheduler is a CosineAnnealingLR in the checkpoint, a MultiStepLR in this run"
    ]
    assert "this run has no scheduler" in scheduler_mismatches(saved, None)[0]
    assert "it would start its warm-up again" in scheduler_mismatches(None, cosine)[0]
    assert scheduler_mismatches(None, None) == []
    assert capture_scheduler(None) is None
    restore_scheduler(None, None, keep_run_options=False)


def test_another_number_of_parameter_groups() -> None:
    saved = capture_scheduler(SCHEDULERS["CosineAnnealingLR"](optimizer()))
    one_group = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    problems = scheduler_mismatches(saved, SCHEDULERS["CosineAnnealingLR"](one_group))
    assert "scheduler: base_lrs is [0.5, 0.1] in the checkpoint, of 1 parameter groups in this run" in problems


def test_a_setting_only_one_side_knows_is_left_out_and_that_is_said() -> None:
    """Another version of torch has other ones."""
    scheduler = SCHEDULERS["CosineAnnealingLR"](optimizer())
    saved = capture_scheduler(scheduler)
    saved["state"]["verbose"] = False
    del saved["state"]["eta_min"]
    assert scheduler_mismatches(saved, scheduler) == []
    assert scheduler_differences(saved, scheduler, keep_run_options=False) == [
        "scheduler: verbose is in the checkpoint, unknown to this run's CosineAnnealingLR: left out",
        "scheduler: eta_min is not in the checkpoint: the run's 0.01 is kept",
    ]
    restore_scheduler(saved, scheduler, keep_run_options=False)
    assert not hasattr(scheduler, "verbose")


WRONG = {"text": "", "flag": True, "list": [], "object": {"a": 1}, "a bad tag": {"~": "tuple", "v": 3}}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize(
    ("make", "key"),
    [
        *((megatron, key) for key in ("max_lr", "num_steps", "wd_incr_steps", "init_lr")),
        *((SCHEDULERS["MultiStepLR"], key) for key in ("milestones", "gamma", "base_lrs", "last_epoch", "_last_lr")),
        (SCHEDULERS["LambdaLR"], "lr_lambdas"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(make, key: str, wrong: Any) -> None:
    trained = optimizer()
    scheduler = make(trained)
    go(scheduler, trained, 2)
    saved = capture_scheduler(scheduler)
    before = frozen(scheduler.state_dict())
    saved["state"][key] = wrong
    with pytest.raises((StateMismatchError, FormatError), match=f"scheduler: {key}|stored state has a"):
        if problems := scheduler_mismatches(saved, scheduler):
            raise StateMismatchError(problems[0])
    assert frozen(scheduler.state_dict()) == before


@pytest.mark.parametrize("wrong", [None, {"~": "float", "v": "nan"}, {"~": "float", "v": "inf"}], ids=str)
@pytest.mark.parametrize(("make", "key"), [(megatron, "num_steps"), (SCHEDULERS["MultiStepLR"], "last_epoch")])
def test_a_position_that_is_none_is_refused(make, key: str, wrong: Any) -> None:
    scheduler = make(optimizer())
    saved = capture_scheduler(scheduler)
    saved["state"][key] = wrong
    assert f"scheduler: {key}, where the schedule stood, is" in scheduler_mismatches(saved, scheduler)[0]
    del saved["state"][key]
    assert f"scheduler: {key}, where the schedule stood, is None" in scheduler_mismatches(saved, scheduler)[0]


@pytest.mark.parametrize("make", [megatron, SCHEDULERS["MultiStepLR"]], ids=["megatron", "MultiStepLR"])
def test_no_attribute_is_set_that_is_no_state(make) -> None:
    trained = optimizer()
    scheduler = make(trained)
    saved = capture_scheduler(scheduler)
    before = vars(scheduler).keys()
    saved["state"] |= {"step": 3, "__class__": "x", "optimizer": None}
    restore_scheduler(saved, scheduler, keep_run_options=False)
    assert vars(scheduler).keys() == before and scheduler.optimizer is trained and callable(scheduler.step)


@pytest.mark.parametrize("saved", [3, [], "text", {}, {"kind": "MultiStepLR"}, {"kind": 1, "state": {}}, {"state": {}}])
def test_what_is_no_schedule_is_refused_by_name(saved: Any) -> None:
    with pytest.raises(FormatError, match="scheduler: expected"):
        scheduler_mismatches(saved, SCHEDULERS["MultiStepLR"](optimizer()))


def test_tensors_in_a_schedule_are_refused_at_the_save() -> None:
    trained = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    with pytest.raises(UnsupportedError, match="scheduler/base_lrs/0"):
        capture_scheduler(lr_scheduler.CosineAnnealingLR(trained, T_max=5))
