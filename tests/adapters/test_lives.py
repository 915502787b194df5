"""Each adapter's life is its own: killed and resumed, trained among others or alone, it is the same in every bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaresume.adapters import LoraConfig
from tests.adapters.tenants import Tenant, adapter_root, assert_same_checkpoint, life
from tests.ranks import Ranks
from tests.small_models import SmallModel

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
