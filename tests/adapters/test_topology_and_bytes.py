"""What an adapter's save writes, on which ranks, and into which layouts it loads; many adapters; another injector."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaresume.adapters import AdapterManager, LoraConfig
from megaresume.errors import TopologyMismatchError
from megaresume.store.shard import read_header
from tests.adapters.tenants import (
    Crash,
    Live,
    Tenant,
    adapter_root,
    add,
    assert_same_checkpoint,
    attach,
    build_base,
    life,
    opened,
    train,
    train_step,
    training_of,
)
from tests.harness import tree
from tests.ranks import Ranks
from tests.small_models import SmallModel

A = Tenant("a", LoraConfig(rank=4, alpha=8), steps=2, save_every=2)
B = Tenant("b", LoraConfig(rank=2, alpha=2, targets=("linear_fc1",)), steps=2)


def other_layout(config: SmallModel, root: Path) -> str:
    with opened(config, [A], root) as live:
        fresh = {name: p.detach().clone() for name, p in live.chunks[0].named_parameters()}
        with pytest.raises(TopologyMismatchError) as error:
            live.adapters.resume("a")
        assert all(torch.equal(fresh[name], p) for name, p in live.chunks[0].named_parameters())
    return str(error.value)


def test_another_layout_is_refused_with_the_table(ranks: Ranks, tmp_path: Path) -> None:
    saved = SmallModel(num_layers=2)
    ranks.run(life, replace(saved, dp=2), [A], tmp_path, world_size=2)
    before = tree(tmp_path)
    for axis in ({"tp": 2}, {"pp": 2}, {"dp": 1}):
        config = replace(saved, **axis)
        for told in ranks.run(other_layout, config, tmp_path, world_size=config.world_size):
            (field,) = axis
            if field != "dp":
                assert any(line.split()[:3] == [field, "1", "2"] for line in told.splitlines()), told
            assert any(line.split()[:3] == ["dp", "2", "1"] for line in told.splitlines()), told
    assert tree(tmp_path) == before


def test_growing_the_world_never_leaves_a_replica_on_its_fresh_init(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(life, SmallModel(num_layers=2), [A], tmp_path, world_size=1)
    told = ranks.run(other_layout, SmallModel(num_layers=2, dp=2), tmp_path, world_size=2)
    assert all("world_size" in each for each in told)


def save_one(config: SmallModel, root: Path) -> int:
    """Bytes of parameters and optimizer state of adapter a that this rank holds; b has trained too and is not saved."""
    with opened(config, [replace(A, save_every=None), B], root) as live:
        live.adapters.resume_all()
        train(live)
        alone = torch.distributed.get_rank() == 0  # which writes all but the shards
        before = tree(adapter_root(root, "b")) if alone else {}
        live.adapters.save("a")
        assert not alone or tree(adapter_root(root, "b")) == before
        return held_bytes(live, "a")


def held_bytes(live: Live, name: str) -> int:
    optimizer = live.training[name].run.optimizer
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    for leaf in optimizer.chained_optimizers:
        inner = leaf.optimizer.state.values() if leaf.optimizer is not None else ()
        tensors += [value for state in inner for value in state.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_save_writes_the_adapter_and_its_optimizer_and_none_of_the_base(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(tp=2, dp=2, num_layers=2)
    held = ranks.run(save_one, config, tmp_path, world_size=4)
    checkpoint = adapter_root(tmp_path, "a") / "step-00000002"
    files = sorted(checkpoint.glob("*.safetensors"))
    assert len(files) == 4
    data: Counter[str] = Counter()
    for path in files:
        header = read_header(path)
        listed = header.index["tensors"]
        assert all(".a.weight" in name for name in header.index["parameters"])
        for name, span in header.tensors.items():
            data[listed[name]["slot"]] += span.end - span.begin
        # The stated overhead: the file's head, in steps of 4096 bytes.
        assert header.data_start <= 4096 + 600 * (len(listed) + len(header.index["parameters"]))
        assert path.stat().st_size == header.data_start + sum(s.end - s.begin for s in header.tensors.values())
    assert data.keys() <= {"weight", "master", "exp_avg", "exp_avg_sq", "step", "rng"}
    assert data["master"] + data["exp_avg"] + data["exp_avg_sq"] + data["step"] == sum(held)
    # In bf16, half of the masters' bytes where all are stored; what is rounded from its master need not be.
    assert data["weight"] <= data["master"] // 2
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert sum(each["size"] for each in manifest["files"].values()) == sum(path.stat().st_size for path in files)


TINY = Tenant("tiny", LoraConfig(rank=1, alpha=1, targets=("linear_proj",)), steps=3, save_every=2)


def test_ranks_that_own_nothing_of_a_tiny_adapter_save_and_resume(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(dp=8, num_layers=1, num_attention_heads=1)
    tiny = replace(TINY, global_batch_size=8)
    whole = ranks.run(life, config, [tiny], tmp_path / "whole", world_size=8)
    ranks.run(life, config, [tiny], tmp_path / "cut", 2, world_size=8)
    owners = set()
    for path in (adapter_root(tmp_path / "cut", "tiny") / "step-00000002").glob("*.safetensors"):
        index = read_header(path).index
        members = [m for o in index["optimizers"] for group in o["groups"] for m in group["members"]]
        owners.add(bool(members))
    assert owners == {True, False}, "no rank's shard is empty: this test does not show what it is for"
    resumed = ranks.run(life, config, [tiny], tmp_path / "cut", world_size=8)
    for ours, reference in zip(resumed, whole, strict=True):
        assert ours == {("tiny", 3): reference["tiny", 3]}
    last = "step-00000003"
    assert_same_checkpoint(
        adapter_root(tmp_path / "cut", "tiny") / last, adapter_root(tmp_path / "whole", "tiny") / last
    )


def test_a_stage_without_any_target_takes_part(ranks: Ranks, tmp_path: Path) -> None:
    """The last stage's layer alone is adapted: the first stage holds nothing, and still sends gradients nowhere."""
    config = SmallModel(pp=2, num_layers=2)
    whole = ranks.run(one_stage, config, tmp_path / "whole", 3, world_size=2)
    ranks.run(one_stage, config, tmp_path / "cut", 2, world_size=2)
    assert ranks.run(one_stage, config, tmp_path / "cut", 3, world_size=2) == [{3: each[3]} for each in whole]


def one_stage(config: SmallModel, root: Path, steps: int) -> dict[int, Any]:
    last = torch.distributed.get_rank() == config.pp - 1
    targets = ("linear_proj",) if last else ("no_such_linear",)
    tenant = Tenant("a", LoraConfig(rank=2, alpha=2, targets=targets), steps=steps)
    facts = LoraConfig(rank=2, alpha=2, targets=("linear_proj",))
    chunks = build_base(config)
    training = attach(chunks, config, tenant)
    with AdapterManager(root, model=chunks) as adapters:
        add(adapters, replace(tenant, config=facts), training)
        live = Live(config, chunks, [tenant], adapters, {"a": training})
        adapters.resume_all()
        return {step: result for (_, step), result in train(live).items()}


# --- many ------------------------------------------------------------------------------------------------------------

MANY = [
    Tenant(
        f"adapter {number}",
        LoraConfig(
            rank=4 + 60 * number // 31,
            alpha=8,
            dropout=0.1 * (number % 2),
            targets=("linear_qkv",) if number % 3 else ("linear_fc1", "linear_proj"),
        ),
        steps=2,
        save_every=1 + number % 2,
        dataset_size=11 + number,
        global_batch_size=2,
        seed=number,
    )
    for number in range(32)
]


def test_thirty_two_adapters_killed_and_resumed_are_the_uninterrupted_ones(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(dp=2, num_layers=1)
    whole = ranks.run(life, config, MANY, tmp_path / "whole", world_size=2, timeout_s=300)
    ranks.run(life, config, MANY, tmp_path / "cut", 45, world_size=2, timeout_s=300)
    resumed = ranks.run(life, config, MANY, tmp_path / "cut", world_size=2, timeout_s=300)
    for ours, reference in zip(resumed, whole, strict=True):
        # 19 were to make their second step; 10 of those had not been saved at all, and make both again.
        assert len(ours) == 29 and ours == {key: reference[key] for key in ours}
    for tenant in MANY:
        assert_same_checkpoint(
            adapter_root(tmp_path / "cut", tenant.name) / "step-00000002",
            adapter_root(tmp_path / "whole", tenant.name) / "step-00000002",
        )


# --- another way into the model --------------------------------------------------------------------------------------


class Bottleneck(torch.nn.Module):
    """A Houlsby adapter behind a layer's MLP, by a forward hook: nothing of megaresume's layers."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.down = torch.nn.Parameter(torch.randn(hidden, 3, generator=generator).to(dtype) * 0.1)
        self.up = torch.nn.Parameter(torch.zeros(3, hidden, dtype=dtype))
        self.on = False

    def forward(self, module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> Any:
        if not self.on:
            return output
        value, bias = output
        inner = torch.nn.functional.dropout(torch.tanh(value @ self.down), 0.2)
        return value + inner @ self.up, bias


class BottleneckLayers(torch.nn.Module):
    pre_process, share_embeddings_and_output_weights = True, False

    def __init__(self, config: Any, layers: list[Bottleneck]) -> None:
        super().__init__()
        self.config, self.layers = config, torch.nn.ModuleList(layers)


def bottlenecks(config: SmallModel, root: Path, crash_after: int | None) -> dict[int, Any]:
    chunks = build_base(config)
    layers = []
    for layer in chunks[0].module.module.decoder.layers:
        layer.bottleneck_h = Bottleneck(config.hidden_size, torch.bfloat16)
        layer.mlp.register_forward_hook(layer.bottleneck_h)
        layers.append(layer.bottleneck_h)
    tenant = Tenant("h", LoraConfig(rank=1, alpha=1), steps=4, save_every=2)
    training = training_of(chunks, config, tenant, [BottleneckLayers(chunks[0].config, layers)])
    chunks[0].module.module.embedding.register_forward_hook(lambda m, i, out: out.requires_grad_(True))
    results = {}
    try:
        with AdapterManager(root, model=chunks) as adapters:
            adapters.add(
                "h",
                {"width": 3},
                parameters=lambda name: ".bottleneck_h." in name,
                optimizer=training.run.optimizer,
                scheduler=training.run.scheduler,
                data={"train": training.sampler},
                save_every=2,
            )
            adapters.resume_all()
            live = Live(config, chunks, [tenant], adapters, {"h": training})
            for layer in layers:
                layer.on = True
            while adapters["h"].step < tenant.steps:
                result = train_step(live, "h")
                results[adapters["h"].step] = result
                if len(results) == crash_after:
                    raise Crash
    except Crash:
        pass
    return results


def test_adapters_of_another_injector_resume_exactly_too(ranks: Ranks, tmp_path: Path) -> None:
    config = SmallModel(dp=2, num_layers=2)
    whole = ranks.run(bottlenecks, config, tmp_path / "whole", None, world_size=2)
    ranks.run(bottlenecks, config, tmp_path / "cut", 3, world_size=2)
    resumed = ranks.run(bottlenecks, config, tmp_path / "cut", None, world_size=2)
    for ours, reference in zip(resumed, whole, strict=True):
        assert ours == {step: reference[step] for step in (3, 4)}
    checkpoint = "step-00000004"
    assert_same_checkpoint(
        adapter_root(tmp_path / "cut", "h") / checkpoint, adapter_root(tmp_path / "whole", "h") / checkpoint
    )
    names = read_header(next((adapter_root(tmp_path / "cut", "h") / checkpoint).glob("*.safetensors"))).index[
        "parameters"
    ]
    assert len(names) == 4 and all(".bottleneck_h." in name for name in names)
