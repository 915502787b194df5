"""Each adapter's life is its own: killed and resumed, trained among others or alone, it is the same in every bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.adapters import LoraConfig
from tests.adapters.tenants import Tenant, adapter_root, assert_same_checkpoint, life, opened, train
from tests.ranks import Ranks
from tests.small_models import SmallModel, StepResult

THREE = [
    Tenant("a", LoraConfig(rank=4, alpha=8, dropout=0.1), steps=5, save_every=2, seed=11),
    Tenant(
        "b/v1.5",
        LoraConfig(rank=3, alpha=3, targets=("linear_fc1", "linear_fc2")),
        steps=3,
        save_every=1,
        distributed_optimizer=False,
    ),
    Tenant(
        "B/v1.5",
        LoraConfig(rank=8, alpha=4, dropout=0.3, targets=("linear_qkv", "linear_fc2")),
        steps=4,
        save_every=3,
        global_batch_size=8,
        dataset_size=19,
        seed=13,
    ),
]

CONFIGS = {
    "2x2x2": SmallModel(tp=2, pp=2, dp=2, num_layers=2),
    "1x1x2 fp32 swiglu": SmallModel(dp=2, num_layers=2, precision="fp32", swiglu=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_killed_and_resumed_each_adapter_is_the_uninterrupted_one(
    ranks: Ranks, tmp_path: Path, config: SmallModel
) -> None:
    size = config.world_size
    whole = ranks.run(life, config, THREE, tmp_path / "whole", world_size=size)
    ranks.run(life, config, THREE, tmp_path / "cut", 7, world_size=size)
    resumed = ranks.run(life, config, THREE, tmp_path / "cut", world_size=size)
    for ours, reference in zip(resumed, whole, strict=True):
        assert ours and ours == {key: reference[key] for key in ours}
    # After 7 steps in turn a and b have made 3 and 2, saved at 2 and 2; B made 2 and was never saved.
    firsts = {tenant.name: min(step for name, step in resumed[0] if name == tenant.name) for tenant in THREE}
    assert firsts == {"a": 3, "b/v1.5": 3, "B/v1.5": 1}
    for tenant in THREE:
        last = f"step-{tenant.steps:08d}"
        assert_same_checkpoint(
            adapter_root(tmp_path / "cut", tenant.name) / last, adapter_root(tmp_path / "whole", tenant.name) / last
        )


def test_an_adapter_trained_among_others_is_the_adapter_trained_alone(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(tp=2, dp=2, num_layers=2)
    together = ranks.run(life, config, THREE, tmp_path / "together", world_size=4)
    for tenant in THREE:
        alone = ranks.run(life, config, [tenant], tmp_path / "alone", world_size=4)
        for ours, reference in zip(alone, together, strict=True):
            assert ours == {key: value for key, value in reference.items() if key[0] == tenant.name}
        last = f"step-{tenant.steps:08d}"
        assert_same_checkpoint(
            adapter_root(tmp_path / "alone", tenant.name) / last,
            adapter_root(tmp_path / "together", tenant.name) / last,
        )


TWO = [
    Tenant("x", LoraConfig(rank=2, alpha=4, dropout=0.2), steps=4, save_every=1, seed=1),
    Tenant("y", LoraConfig(rank=3, alpha=3, targets=("linear_fc2",)), steps=3, save_every=2, seed=2),
]


def killed_after_every_step(config: SmallModel, root: Path) -> list[int]:
    """On a rank: for each number of steps after which the process may die, how many the resumed one trained."""
    whole = life(config, TWO, root / "whole")
    trained = []
    for steps in range(1, len(whole)):
        life(config, TWO, root / str(steps), steps)
        resumed = life(config, TWO, root / str(steps))
        assert resumed == {key: whole[key] for key in resumed}, f"killed after {steps} steps"
        trained.append(len(resumed))
        for tenant in TWO:
            last = f"step-{tenant.steps:08d}"
            assert_same_checkpoint(
                adapter_root(root / str(steps), tenant.name) / last, adapter_root(root / "whole", tenant.name) / last
            )
    return trained


def test_killed_after_any_step(ranks: Ranks, tmp_path: Path) -> None:
    (trained,) = ranks.run(killed_after_every_step, SmallModel(num_layers=1), tmp_path, world_size=1)
    assert trained == [6, 6, 5, 3, 2, 2]


def with_recomputed_layers(config: SmallModel, root: Path, recompute: bool) -> dict[tuple[str, int], StepResult]:
    with opened(config, TWO, root) as live:
        if recompute:
            settings = live.chunks[0].config
            settings.recompute_granularity, settings.recompute_method, settings.recompute_num_layers = (
                "full",
                "uniform",
                1,
            )
        live.adapters.resume_all()
        return train(live)


def test_recomputed_layers_draw_and_learn_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """The adapter's dropout comes again from the stream it came from, and its gradient is not lost at a frozen
    input."""
    config = SmallModel(num_layers=1, precision="fp32")
    (plain,) = ranks.run(with_recomputed_layers, config, tmp_path / "plain", False, world_size=1)
    (again,) = ranks.run(with_recomputed_layers, config, tmp_path / "again", True, world_size=1)
    assert again == plain and all(result.grad_norm for result in again.values())
