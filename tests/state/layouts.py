"""Small optimizers, each keeping its state in another way: the layouts that a run may come with.

Each trains (the update is a plausible one, no more); what counts is where it keeps what. Knows nothing of megaresume.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class FusedAdamLike(torch.optim.Optimizer):
    """Apex's and Transformer Engine's: moments per parameter, `step` per group, set by the first step."""

    def __init__(self, groups: Any, lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                _adam(parameter, state["exp_avg"], state["exp_avg_sq"], group, group["step"])


class LowPrecisionMoments(torch.optim.Optimizer):
    """Transformer Engine's with fp16 moments: their scales stand in a map of their own, `_scales`."""

    def __init__(self, groups: Any, lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1})
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self._scales:
                    self.state[parameter] = {
                        name: torch.zeros_like(parameter, dtype=torch.float16) for name in ("exp_avg", "exp_avg_sq")
                    }
                    self._scales[parameter] = {name: torch.ones(1) for name in ("exp_avg", "exp_avg_sq")}
                state, scales = self.state[parameter], self._scales[parameter]
                moments = {name: (state[name].float() * scales[name]).view_as(parameter) for name in state}
                _adam(parameter, moments["exp_avg"], moments["exp_avg_sq"], group, group["step"])
                for name, moment in moments.items():
                    scales[name] = moment.abs().max().reshape(1) / 1000 + 1e-12 if moment.numel() else scales[name]
                    state[name] = (moment / scales[name]).view_as(parameter).half()


class EightBit(torch.optim.Optimizer):
    """bitsandbytes': quantised moments, a scale per block, a table shared by all parameters, `step` a Python number."""

    BLOCK = 8

    def __init__(self, groups: Any, lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr})
        self.table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    blocks = -(-parameter.numel() // self.BLOCK)
                    state["step"] = 0
                    state["state1"] = torch.full_like(parameter, 128, dtype=torch.uint8)
                    state["qmap1"] = self.table
                    state["absmax1"] = torch.zeros(blocks)
                state["step"] += 1
                scales = state["absmax1"].repeat_interleave(self.BLOCK)[: parameter.numel()].view_as(parameter)
                moment = 0.9 * self.table[state["state1"].int()] * scales + parameter.grad
                flat = nn.functional.pad(moment.view(-1), (0, -moment.numel() % self.BLOCK)).view(-1, self.BLOCK)
                state["absmax1"] = flat.abs().amax(1) if flat.numel() else state["absmax1"]
                scales = state["absmax1"].repeat_interleave(self.BLOCK)[: parameter.numel()].view_as(parameter)
                state["state1"] = torch.bucketize(moment / (scales + 1e-12), self.table).clamp(0, 255).to(torch.uint8)
                parameter.sub_(group["lr"] * moment)


class ExtraSlots(torch.optim.Optimizer):
    """Everything else a state may hold: lists of tensors, numbers, flags, None, tuples, dicts, tensors of any dtype."""

    def __init__(self, groups: Any, lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr, "history": 2, "schedule": {"kind": "none", 3: [1, (2.5, None)]}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(gradients=[], best=float("inf"), improved=False, previous=None, counters={"seen": 0})
                state["gradients"] = [*state["gradients"], parameter.grad.clone()][-group["history"] :]
                norm = float(parameter.grad.norm())
                state["improved"], state["best"] = norm < state["best"], min(norm, state["best"])
                state["counters"]["seen"] += 1
                state["signs"] = parameter.grad > 0
                state["wide"] = state.get("wide", torch.zeros((), dtype=torch.float64)) + norm
                state["previous"] = (norm, parameter.grad.to(torch.bfloat16))
                factor = 0.5 if state["improved"] else 1.0
                parameter.sub_(group["lr"] * factor * torch.stack(state["gradients"]).mean(0))


def _adam(parameter: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: Any, step: int) -> None:
    gradient, (beta1, beta2) = parameter.grad, group["betas"]
    first.mul_(beta1).add_(gradient, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    update = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
    parameter.sub_(group["lr"] * (update + group["weight_decay"] * parameter))


class MixedPrecision:
    """A bf16 model, fp32 masters and a loss scaler, put together as megatron-core's Float16Optimizer does it.

    With `masters=False` the inner optimizer trains the model's weights themselves. The learning rate is so small that
    one update is lost in bf16.
    """

    def __init__(self, model: nn.Module, *, masters: bool = True, grad_scaler: Any = None) -> None:
        self.model = model.bfloat16()
        weights = list(model.parameters())
        self.masters = [weight.detach().float() for weight in weights] if masters else []
        self.float16_groups = [weights] if masters else []
        self.fp32_from_float16_groups = [self.masters] if masters else []
        self.optimizer = torch.optim.AdamW(self.masters or weights, lr=1e-6)
        self.grad_scaler = grad_scaler

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for master in self.masters:
                master.grad = torch.randn(master.shape, generator=generator)
            self.optimizer.step()
            for master, weight in zip(self.masters, self.float16_groups[0], strict=True):
                weight.data.copy_(master)

    def reload_model_params(self) -> None:
        for master, weight in zip(self.masters, self.float16_groups[0], strict=True):
            master.copy_(weight.data)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Megatron's two: what decays, and what does not (vectors and numbers)."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    rest = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": matrices, "wd_mult": 1.0}, {"params": rest, "wd_mult": 0.0, "lr": 0.02}]


LAYOUTS: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW, step per parameter": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "AdamW, groups": lambda model: torch.optim.AdamW(groups(model), lr=0.01),
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "AdamW, learning rate in a tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "SGD without state": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "Adagrad, state before the first step": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "RMSprop, centered": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True, momentum=0.5),
    "step per group": lambda model: FusedAdamLike(groups(model)),
    "fp16 moments with scales": lambda model: LowPrecisionMoments(groups(model)),
    "8-bit with tables": lambda model: EightBit(model.parameters()),
    "extra slots": lambda model: ExtraSlots(groups(model)),
}
