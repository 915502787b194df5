"""Weights that are not written come back exactly: rounded from masters, or from the checkpoint that had them first."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from megaresume import ResumeManager
from megaresume.store import layout
from megaresume.store.discovery import check_files, find_candidates
from megaresume.store.shard import read_header
from tests.harness import assert_continues, run
from tests.ranks import Ranks
from tests.small_models import SmallModel

MIXED = SmallModel(tp=2, dp=2, num_layers=2, global_batch_size=4)
STEPS = 6


def kinds(root: Path, step: int) -> dict[str, set[str]]:
    """Kind -> names of the weights, over the files of all ranks."""
    found: dict[str, set[str]] = {}
    for path in (root / layout.step_directory(step)).glob("*.safetensors"):
        for name, entry in read_header(path).index["tensors"].items():
            if entry["slot"] == "weight":
                found.setdefault(entry["kind"], set()).add(name)
    return found


def test_with_masters_no_trained_weight_is_written_and_the_resume_is_exact(ranks: Ranks, tmp_path: Path) -> None:
    assert MIXED.precision == "bf16"
    whole = run(ranks, MIXED, tmp_path / "whole", STEPS)
    run(ranks, MIXED, tmp_path / "cut", STEPS, crash_at=3, save_every=3)
    assert kinds(tmp_path / "cut", 3).keys() == {"derived"}
    sizes = [path.stat().st_size for path in (tmp_path / "cut" / layout.step_directory(3)).glob("*.safetensors")]
    resumed = run(ranks, MIXED, tmp_path / "cut", STEPS, save_every=3, verify="first")
    assert resumed[0].report.step == 3
    assert_continues(resumed, whole)
    tensors = [
        span.end - span.begin
        for path in (tmp_path / "cut" / layout.step_directory(3)).glob("*.safetensors")
        for span in read_header(path).tensors.values()
        if span.name.startswith("model/")
    ]
    assert sizes and tensors == []


class Frozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.base = torch.nn.Linear(64, 64)
        self.base.requires_grad_(False)
        self.head = torch.nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x)))


def train_frozen(root: Path, steps: int, arguments: dict[str, Any]) -> tuple[list[str], int, dict[str, list[float]]]:
    logging.getLogger("megaresume").setLevel(logging.ERROR)
    model = Frozen()
    if arguments.pop("other_base", False):
        model.base.weight.data.zero_()
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01)
    losses = []
    weights_only = arguments.pop("weights_only", False)
    with ResumeManager(root, model=model, optimizer=optimizer, **arguments) as manager:
        resumed = manager.resume(weights_only=weights_only).step
        while manager.step < steps:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(manager.step))
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            for parameter in model.head.parameters():  # the ranks are replicas
                if parameter.grad is not None and torch.distributed.get_world_size() > 1:
                    torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            losses.append(loss.item().hex())
            manager.end_step(loss=loss, samples=8)
    return losses, resumed, {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def test_frozen_weights_are_written_once_kept_and_come_back(ranks: Ranks, tmp_path: Path) -> None:
    def go(root: str, steps: int, **arguments: Any) -> list[Any]:
        return ranks.run(train_frozen, tmp_path / root, steps, {"save_every": 2, **arguments}, world_size=2)

    whole = go("whole", 10)
    root = tmp_path / "root"
    go("root", 6, keep_last=1)
    # Step 2 has the base, and stays for step 6 needs it; step 4 was pruned.
    assert [candidate.step for candidate in find_candidates(root)[0]] == [6, 2]
    base = {"model/base.weight", "model/base.bias"}
    assert base <= kinds(root, 2)["stored"] and kinds(root, 6)["referenced"] == base
    manifest = json.loads((root / layout.step_directory(6) / layout.MANIFEST).read_text("utf-8"))
    assert {each["step"] for each in manifest["references"]} == {2}
    resumed = go("root", 10, keep_last=1, other_base=True)
    for (losses, step, state), (expected, _, reference) in zip(resumed, whole, strict=True):
        assert (step, losses, state) == (6, expected[6:], reference)
    # A later start refers to where the base was first written, not to the checkpoint it resumed from.
    assert [candidate.step for candidate in find_candidates(root)[0]] == [10, 2]
    check_files(find_candidates(root)[0][0])
    for losses, step, state in go("root", 0, weights_only=True, other_base=True):
        assert (losses, step) == ([], 0) and state == whole[0][2]
