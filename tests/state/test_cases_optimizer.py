"""Cases O: what went wrong with optimizers for people who resumed training, as far as one process shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from megaresume.megatron.live import describe
from megaresume.state.rank_state import capture, plan_restore
from megaresume.state.registered import Registered
from megaresume.state.scheduler import capture_scheduler, restore_scheduler, scheduler_mismatches
from tests.state.layouts import FusedAdamLike, LowPrecisionMoments, MixedPrecision, groups
from tests.state.objects import Net, everything, frozen, moments, refusal, restore, save, spans_of, streams, train
from tests.state.test_scheduler import megatron

# --- O01, O02: which parameter a state belongs to --------------------------------------------------------------------


class Twins(nn.Module):
    """Two layers of the same shape, defined in either order."""

    def __init__(self, order: str = "ab") -> None:
        super().__init__()
        for name in order:
            torch.manual_seed(ord(name))
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


@pytest.mark.parametrize(
    "parameters",
    [lambda model: model.parameters(), lambda model: reversed(list(model.parameters()))],
    ids=["layers swapped", "layers swapped and group reversed"],
)
def test_o01_moments_follow_names_not_positions(parameters: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    model = Twins("ab")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    assert len(set(map(str, moments(model, optimizer).values()))) == 4
    path = save(tmp_path / "x.safetensors", model, optimizer, streams=streams())
    expected = moments(model, optimizer)
    losses = train(model, optimizer, 3)
    other = Twins("ba")
    other_optimizer = torch.optim.Adam(parameters(other), lr=0.01)
    restore(path, other, other_optimizer, streams=streams())
    assert moments(other, other_optimizer) == expected
    assert train(other, other_optimizer, 3) == losses


def decay_groups(model: Net, *, moved: str | None = None, extra: bool = False) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    vectors = {name for name, parameter in named.items() if parameter.ndim <= 1} ^ ({moved} if moved else set())
    made = [
        {"params": [each for name, each in named.items() if name not in vectors], "weight_decay": 0.1},
        {"params": [each for name, each in named.items() if name in vectors], "weight_decay": 0.0},
    ]
    return [*made, {"params": [made[1]["params"].pop()]}] if extra else made


def test_o02_other_groups_are_refused_with_the_names_of_the_parameters(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(decay_groups(model))
    train(model, optimizer, 1)
    path = save(tmp_path / "x.safetensors", model, optimizer)

    moved = Net()
    message = refusal(path, moved, torch.optim.AdamW(decay_groups(moved, moved="first.bias")))
    assert "optimizer 0: first.bias moved from parameter group 1 to 0" in message
    assert "second" not in message

    more = Net()
    message = refusal(path, more, torch.optim.AdamW(decay_groups(more, extra=True)))
    assert "optimizer 0 has 2 parameter groups in the checkpoint, 3 in this run" in message
    assert "optimizer 0: first.bias moved from parameter group 1 to 2" in message

    fewer = Net()
    message = refusal(path, fewer, torch.optim.AdamW(decay_groups(fewer)[:1]))
    assert "optimizer 0: scale is trained in the checkpoint, not in this run" in message
    assert "optimizer 0: first.bias is trained in the checkpoint, not in this run" in message

    path = save(tmp_path / "y.safetensors", fewer, torch.optim.AdamW(decay_groups(fewer)[:1]))
    message = refusal(path, model, optimizer)
    assert "optimizer 0: scale is trained in this run, not in the checkpoint" in message


# --- O05, O10: masters and loss scale --------------------------------------------------------------------------------


def test_o05_masters_are_restored_not_rebuilt_from_the_weights(tmp_path: Path) -> None:
    whole = MixedPrecision(Net())
    whole.train(range(10))
    cut = MixedPrecision(Net())
    cut.train(range(5))
    assert any(
        not torch.equal(master, weight.float())
        for master, weight in zip(cut.masters, cut.float16_groups[0], strict=True)
    ), "updates too small for bf16: masters hold more than the weights"
    path = save(tmp_path / "x.safetensors", cut.model, cut)
    resumed = MixedPrecision(Net(seed=1))
    restore(path, resumed.model, resumed)
    resumed.train(range(5, 10))
    assert frozen(resumed.masters) == frozen(whole.masters)
    assert everything(resumed.model, resumed)["model"] == everything(whole.model, whole)["model"]


class Scaler:
    """megatron-core's dynamic loss scaler, as far as its state goes."""

    def __init__(self, scale: float = 2.0**32, growth_tracker: int = 0, **more: Any) -> None:
        self._scale = torch.tensor([scale])
        self.others = {"growth_tracker": growth_tracker, "hysteresis_tracker": 2, **more}

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._scale, **self.others}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scale = state.pop("scale")
        self.others = state


@pytest.mark.parametrize("scale", [256.0, 1.0, 3.0000001, float("inf")])
def test_o10_the_loss_scale_is_exact(scale: float, tmp_path: Path) -> None:
    run = MixedPrecision(Net(), grad_scaler=Scaler(scale, 17, found_inf=torch.tensor(0.5)))
    path = save(tmp_path / "x.safetensors", run.model, run)
    new = MixedPrecision(Net(), grad_scaler=Scaler(found_inf=torch.tensor(0.0)))
    for _ in range(2):
        restore(path, new.model, new)
        assert frozen(vars(new.grad_scaler)) == frozen(vars(run.grad_scaler))
        new.grad_scaler.others["growth_tracker"] += 5


def test_o10_a_loss_scaler_that_is_missing_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with_scaler = MixedPrecision(Net(), grad_scaler=Scaler(256.0, 17))
    without = MixedPrecision(Net())
    first = save(tmp_path / "with.safetensors", with_scaler.model, with_scaler)
    second = save(tmp_path / "without.safetensors", without.model, without)
    assert "this run has a loss scaler, the checkpoint has none (--fp16 differs?)" in refusal(
        second, with_scaler.model, with_scaler
    )
    assert "the checkpoint has a loss scaler, this run has none (--fp16 differs?)" in refusal(
        first, without.model, without
    )
    other = MixedPrecision(Net(), grad_scaler=Scaler(growth_tracker=torch.tensor(3), interval=1))
    message = refusal(first, other.model, other)
    assert "loss scaler: interval is in this run, not in the checkpoint" in message
    assert "growth_tracker is a int in the checkpoint, a int64 tensor of shape [] in this run" in message


# --- O06, O08, O09: where the schedule stands ------------------------------------------------------------------------


def train_megatron(model: nn.Module, optimizer: Any, scheduler: Any, steps: int) -> list[str]:
    seen = []
    for _ in range(steps):
        train(model, optimizer, 1)
        scheduler.step(increment=8)
        seen.append(optimizer.param_groups[0]["lr"].hex())
    return seen


def test_o06_the_position_of_the_schedule_is_that_of_the_checkpoint_however_often_it_is_resumed(tmp_path: Path) -> None:
    model = Net()
    optimizer = FusedAdamLike(groups(model))
    scheduler = megatron(optimizer)
    train_megatron(model, optimizer, scheduler, 10)
    path, schedule = save(tmp_path / "0.safetensors", model, optimizer), capture_scheduler(scheduler)
    expected = train_megatron(model, optimizer, scheduler, 6)
    for number in range(1, 4):
        model = Net(seed=number)
        optimizer = FusedAdamLike(groups(model))
        scheduler = megatron(optimizer)
        restore_scheduler(schedule, scheduler, keep_run_options=False)
        restore(path, model, optimizer)
        assert scheduler.num_steps == 80
        assert capture_scheduler(scheduler) == schedule
        path = save(tmp_path / f"{number}.safetensors", model, optimizer)  # at once, without training
        assert path.read_bytes() == (tmp_path / "0.safetensors").read_bytes()
    assert train_megatron(model, optimizer, scheduler, 6) == expected


@pytest.mark.parametrize("drop", [4, 5], ids=["a drop at the checkpoint's step", "a drop at the next"])
@pytest.mark.parametrize("before_scheduler", [False, True], ids=["after scheduler.step", "before scheduler.step"])
def test_o08_no_step_gets_the_rate_of_another(drop: int, before_scheduler: bool, tmp_path: Path) -> None:
    """A save between the two steps holds both sides as they are, so it goes on between them."""

    def make(seed: int) -> tuple[Net, Any, Any]:
        model = Net(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, lr_scheduler.MultiStepLR(optimizer, milestones=[drop], gamma=0.1)

    def go_on(optimizer: Any, scheduler: Any, steps: int, *, inside: bool = False) -> list[float]:
        seen = []
        for number in range(steps):
            if number > 0 or not inside:
                seen.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
            scheduler.step()
        return seen

    model, optimizer, scheduler = make(0)
    expected = go_on(optimizer, scheduler, 8)
    model, optimizer, scheduler = make(0)
    seen = go_on(optimizer, scheduler, 4)
    if before_scheduler:
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
    path, schedule = save(tmp_path / "x.safetensors", model, optimizer), capture_scheduler(scheduler)
    model, optimizer, scheduler = make(1)
    restore_scheduler(schedule, scheduler, keep_run_options=False)
    restore(path, model, optimizer)
    seen += go_on(optimizer, scheduler, 4, inside=before_scheduler)
    assert seen == expected


def test_o09_a_checkpoint_without_the_schedule_is_refused() -> None:
    scheduler = megatron(FusedAdamLike(groups(Net())))
    assert scheduler_mismatches(None, scheduler) == [
        "the checkpoint has no scheduler state, this run has a scheduler: it would start its warm-up again"
    ]


def test_o09_the_initial_rate_is_the_checkpoints_not_the_decayed_one(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    train(model, optimizer, 4, scheduler=scheduler)
    path, schedule = save(tmp_path / "x.safetensors", model, optimizer), capture_scheduler(scheduler)
    train(model, optimizer, 1, scheduler=scheduler)
    expected = optimizer.param_groups[0]["lr"]
    new_model = Net()
    new_optimizer = torch.optim.AdamW(new_model.parameters(), lr=optimizer.param_groups[0]["lr"])
    new_scheduler = lr_scheduler.LambdaLR(new_optimizer, lambda epoch: 1 / (1 + epoch))
    restore_scheduler(schedule, new_scheduler, keep_run_options=False)
    restore(path, new_model, new_optimizer)
    assert new_optimizer.param_groups[0]["initial_lr"] == 0.1
    train(new_model, new_optimizer, 1, scheduler=new_scheduler)
    assert new_optimizer.param_groups[0]["lr"] == expected


# --- O12: state for some parameters only -----------------------------------------------------------------------------


class Partly(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in ("trained", "unused", "then_frozen"):
            setattr(self, name, nn.Linear(4, 4, bias=False))
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.use = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.then_frozen(self.trained(x))
        return self.unused(hidden) if self.use else hidden


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        lambda model: FusedAdamLike(model.parameters()),
        lambda model: LowPrecisionMoments(model.parameters()),
    ],
    ids=["AdamW", "SGD with momentum", "step per group", "fp16 moments with scales"],
)
def test_o12_exactly_the_saved_set_of_states_is_restored(make, tmp_path: Path) -> None:
    model = Partly()
    optimizer = make(model)
    train(model, optimizer, 2)
    model.then_frozen.requires_grad_(False)
    train(model, optimizer, 1)
    before = everything(model, optimizer)
    assert [name for name, parameter in model.named_parameters() if parameter in optimizer.state] == [
        "trained.weight",
        "then_frozen.weight",
    ]
    path = save(tmp_path / "x.safetensors", model, optimizer, streams=streams())
    model.use = True
    losses, after = train(model, optimizer, 3), everything(model, optimizer)

    new = Partly(seed=1)
    new.then_frozen.requires_grad_(False)
    new_optimizer = make(new)
    for run, its_optimizer in [(new, new_optimizer), (model, optimizer)]:
        restore(path, run, its_optimizer, streams=streams())
        assert everything(run, its_optimizer) == before, "no invented zeros, no lost state"
        run.use = True
        assert train(run, its_optimizer, 3) == losses
        assert everything(run, its_optimizer) == after


# --- O15: several models and optimizers ------------------------------------------------------------------------------


class Second(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.experts = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x)


def pair(seed: int = 0) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    chunks = [Net(seed), Second(seed)]
    return chunks, [torch.optim.AdamW(chunks[0].parameters()), torch.optim.SGD(chunks[1].parameters(), 0.1, 0.9)]


def test_o15_all_chunks_and_all_optimizers_come_back(tmp_path: Path) -> None:
    chunks, optimizers = pair()
    for chunk, optimizer in zip(chunks, optimizers, strict=True):
        train(chunk, optimizer, 3)
    before = everything(chunks, optimizers)
    path = save(tmp_path / "x.safetensors", chunks, optimizers, streams=streams())
    new_chunks, new_optimizers = pair(seed=1)
    restore(path, new_chunks, new_optimizers, streams=streams())
    assert everything(new_chunks, new_optimizers) == before


@pytest.mark.parametrize("count", [0, 1, 3])
def test_o15_another_number_of_optimizers_is_refused_with_both_numbers(count: int, tmp_path: Path) -> None:
    chunks, optimizers = pair()
    path = save(tmp_path / "x.safetensors", chunks, optimizers)
    run = [*optimizers, torch.optim.SGD(chunks[1].parameters(), lr=0.1)][:count]
    message = refusal(path, chunks, run)
    assert f"the checkpoint holds 2 optimizers on this rank, this run has {count}" in message


def test_o15_another_number_of_chunks_is_refused_by_name(tmp_path: Path) -> None:
    chunks, _ = pair()
    path = save(tmp_path / "x.safetensors", chunks)
    assert "parameter experts.weight is in the checkpoint, not in this model" in refusal(path, chunks[:1], None)


# --- O16: where a state lives ----------------------------------------------------------------------------------------


def test_o16_each_state_keeps_its_kind_dtype_and_place() -> None:
    """The meta device stands for an accelerator."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    train(model, optimizer, 1)
    extra = {"count": 3, "low": torch.zeros(6, 4).bfloat16(), "past": [torch.zeros(2), torch.tensor(1.5)]}
    optimizer.state[model.first.weight].update(extra)
    state = capture(describe([model], optimizer), None, Registered({}))

    with torch.device("meta"):
        far = Net()
        far_optimizer = torch.optim.AdamW(far.parameters(), lr=torch.tensor(0.01, device="cpu"))
        made = plan_restore(state.index, spans_of(state), describe([far], far_optimizer), None, Registered({}))
    for name, slots in [("first.weight", far.first.weight), ("scale", far.scale)]:
        found = {slot: made.destinations[f"optim/0/{slot}/{name}"] for slot in ("step", "exp_avg", "exp_avg_sq")}
        assert found["step"].device.type == "cpu" and found["step"].ndim == 0
        assert found["exp_avg"].device.type == "meta" or name == "scale", slots
    assert made.destinations["optim/0/low/first.weight"].device.type == "meta"
    assert made.destinations["optim/0/low/first.weight"].dtype == torch.bfloat16
    assert made.destinations["optim/0/past/first.weight/0"].device.type == "meta"
    assert made.destinations["optim/0/past/first.weight/1"].device.type == "cpu"
    assert made.destinations["optim/0/group0/lr"] is far_optimizer.param_groups[0]["lr"]
    made.install()
    restored = far_optimizer.state[far.first.weight]
    assert type(restored["count"]) is int and restored["count"] == 3
    assert type(restored["past"]) is list and restored["exp_avg"].device.type == "meta"


def test_o16_what_is_on_the_host_beside_parameters_on_a_device_is_so_again() -> None:
    with torch.device("meta"):
        far = Net()
    optimizer = torch.optim.SGD(far.parameters(), lr=0.1)
    optimizer.state[far.first.weight] = {
        "on the host": torch.zeros(3),
        "counted on the device": torch.zeros((), device="meta"),
        "step": torch.zeros(()),
    }
    index = capture(describe([far], optimizer), None, Registered({})).index
    stored = index["optimizers"][0]["groups"][0]["members"]
    slots = next(member["state"][""] for member in stored if member["parameter"] == "first.weight")
    assert {slot: where["place"] for slot, where in slots.items()} == {
        "on the host": "host",
        "counted on the device": "parameter",
        "step": "host",
    }


def test_o16_a_step_is_a_number_though_its_parameter_has_one_element_too() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    entries = capture(describe([model], optimizer), None, Registered({})).index["tensors"]
    assert entries["optim/0/exp_avg/scale"]["range"] == [0, 1]
    assert entries["optim/0/exp_avg/first.bias"]["range"] == [0, 6]
    assert entries["optim/0/step/first.bias"]["range"] is None


def test_o16_plain_values_are_stored_no_objects(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    path = save(tmp_path / "x.safetensors", model, optimizer)
    assert b"pickle" not in path.read_bytes() and b"torch.optim" not in path.read_bytes()


# --- O17 -------------------------------------------------------------------------------------------------------------


def test_o17_the_first_forward_pass_runs_on_the_restored_weights(tmp_path: Path) -> None:
    model, x = Net(), torch.randn(5, 4)
    with torch.no_grad():
        model.first.weight.mul_(10)
    path = save(tmp_path / "x.safetensors", model, streams=streams())
    expected = model(x)
    other = Net(seed=1)
    restore(path, other, streams=streams())
    assert torch.equal(other(x), expected)
