"""On a real CUDA device: copies behind the training hold the values of their step, and a restore puts them back.

`make gpu-check` runs these; where there is no device they are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megaresume import ResumeManager
from megaresume.state.staging import Staging
from megaresume.store.shard import read_header

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def test_the_optimizers_step_waits_for_the_copy_and_the_host_does_not() -> None:
    live = {"optim/0/exp_avg/w": torch.ones(64 << 20, device="cuda"), "model/w": torch.ones(1 << 20, device="cuda")}
    staging = Staging()
    for number in range(1, 4):
        torch.cuda.synchronize()
        staged = staging.copy(live, settled=lambda name: name.startswith("optim/"))
        live["model/w"].add_(1)  # may change at once
        staging.fence()
        live["optim/0/exp_avg/w"].add_(1)
        staged.wait()
        for copy in staged.copies.values():
            assert copy.is_pinned() and bool((copy == number).all())


def train(root: Path, steps: int, **arguments: Any) -> tuple[list[str], int]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with ResumeManager(root, model=model, optimizer=optimizer, **arguments) as manager:
        resumed = manager.resume().step
        while manager.step < steps:
            x = torch.randn(64, 512, device="cuda")
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            manager.end_step(loss=loss, samples=64)
    return losses, resumed


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    whole, _ = train(tmp_path / "whole", 8)
    train(tmp_path / "root", 4, save_every=1)
    resumed, step = train(tmp_path / "root", 8, save_every=1)
    assert step == 4 and resumed == whole[4:]
    for path in tmp_path.glob("root/step-*/*.safetensors"):
        assert read_header(path).tensors
