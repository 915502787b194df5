"""Adapters as PEFT directories: out of one topology, into others, tensor for tensor, and as PEFT itself reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megaresume.adapters import LoraConfig
from megaresume.adapters.assemble import _check_part, assemble_weights
from megaresume.adapters.peft import export_adapter, read_peft
from megaresume.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ConfigurationError,
    FormatError,
    MegaresumeError,
    StateMismatchError,
    UnsupportedError,
)
from megaresume.store.shard import read_header
from tests.adapters.tenants import Tenant, adapter_root, opened, train
from tests.ranks import Ranks
from tests.small_models import SmallModel

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
TENANT = Tenant("org/x", LoraConfig(rank=3, alpha=6, targets=TARGETS), steps=2)
MODEL = SmallModel(num_layers=2, swiglu=True, precision="fp32")


def trained_and_exported(config: SmallModel, root: Path) -> None:
    with opened(config, [TENANT], root) as live:
        live.adapters.resume_all()
        train(live)
        live.adapters.export(TENANT.name, root / "peft")


def imported_and_exported(config: SmallModel, directory: Path, root: Path) -> str:
    with opened(config, [TENANT], root) as live:
        report = live.adapters.resume(TENANT.name, init_from=directory)
        live.adapters.export(TENANT.name, root / "peft")
    return str(report.tally)


def refused_imports(directory: Path, root: Path) -> dict[str, str]:
    told = {}
    changed = {
        "alpha": replace(TENANT, config=replace(TENANT.config, alpha=1)),
        "rank": replace(TENANT, config=replace(TENANT.config, rank=4)),
        "targets": replace(TENANT, config=replace(TENANT.config, targets=TARGETS[:2])),
        "more layers": TENANT,
    }
    for case, tenant in changed.items():
        config = replace(MODEL, num_layers=4) if case == "more layers" else MODEL
        with opened(config, [tenant], root / case) as live:
            before = {name: p.detach().clone() for name, p in live.chunks[0].named_parameters()}
            try:
                live.adapters.resume(tenant.name, init_from=directory)
            except StateMismatchError as error:
                told[case] = str(error)
            assert all(torch.equal(before[name], p) for name, p in live.chunks[0].named_parameters())
    config = replace(MODEL, num_layers=4)
    with opened(config, [TENANT], root / "allowed", allow={"base", "missing"}) as live:
        told["allowed"] = str(live.adapters.resume(TENANT.name, init_from=directory).tally)
    return told


@pytest.fixture(scope="module")
def exported(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exported")
    ranks.run(trained_and_exported, replace(MODEL, tp=2, pp=2, dp=2), root, world_size=8)
    return root / "peft"


def test_what_2x2x2_exports_4x1x2_and_1x2x4_import_tensor_for_tensor(
    ranks: Ranks, exported: Path, tmp_path: Path
) -> None:
    whole = safetensors.torch.load_file(exported / "adapter_model.safetensors")
    assert all(bool(tensor.count_nonzero()) for tensor in whole.values()), "trained: no B is zero"
    for sizes in ({"tp": 4, "dp": 2}, {"pp": 2, "dp": 4}):
        config = replace(MODEL, **sizes)
        root = tmp_path / "-".join(sizes)
        told = ranks.run(imported_and_exported, config, exported, root, world_size=8)
        assert set(told) == {"16 tensors matched, 0 missing, 0 unexpected"}
        again = safetensors.torch.load_file(root / "peft" / "adapter_model.safetensors")
        assert again.keys() == whole.keys()
        assert all(torch.equal(again[name], whole[name]) for name in whole)
        assert (root / "peft" / "adapter_config.json").read_bytes() == (exported / "adapter_config.json").read_bytes()


class PlainLayer(torch.nn.Module):
    """The linears of one of the base's layers as plain ones, under the same names."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.self_attention = torch.nn.Module()
        self.self_attention.linear_qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.self_attention.linear_proj = torch.nn.Linear(hidden, hidden)
        self.mlp = torch.nn.Module()
        self.mlp.linear_fc1 = torch.nn.Linear(hidden, 2 * ffn)
        self.mlp.linear_fc2 = torch.nn.Linear(ffn, hidden)


class PlainModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        layers = [PlainLayer(MODEL.hidden_size, 4 * MODEL.hidden_size) for _ in range(MODEL.num_layers)]
        self.decoder.layers = torch.nn.ModuleList(layers)


def test_the_export_has_the_names_and_shapes_of_a_plain_models(exported: Path) -> None:
    """By PEFT's documented rule; the next test asks PEFT itself."""
    whole = safetensors.torch.load_file(exported / "adapter_model.safetensors")
    expected = {}
    for name, module in PlainModel().named_modules():
        if isinstance(module, torch.nn.Linear):
            expected[f"base_model.model.{name}.lora_A.weight"] = (3, module.in_features)
            expected[f"base_model.model.{name}.lora_B.weight"] = (module.out_features, 3)
    assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == expected


def test_peft_reads_the_export_as_it_reads_its_own(exported: Path, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed; the test above checks by its rule")
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(TARGETS), init_lora_weights=False)
    peft.get_peft_model(PlainModel(), config).save_pretrained(tmp_path / "its own")
    own = safetensors.torch.load_file(tmp_path / "its own" / "adapter_model.safetensors")
    ours = safetensors.torch.load_file(exported / "adapter_model.safetensors")
    assert {n: tuple(t.shape) for n, t in own.items()} == {n: tuple(t.shape) for n, t in ours.items()}

    read = peft.PeftModel.from_pretrained(PlainModel(), exported)
    state = peft.get_peft_model_state_dict(read)
    assert state.keys() == ours.keys() and all(torch.equal(state[name], ours[name]) for name in ours)
    layer = read.base_model.model.decoder.layers[1].mlp.linear_fc2
    assert layer.scaling == {"default": 2.0} and layer.r == {"default": 3}
    # And back: what PEFT wrote is read here.
    assert read_peft(tmp_path / "its own").weights.keys() == read_peft(exported).weights.keys()


def test_an_import_that_does_not_fit_is_refused_with_the_counts(ranks: Ranks, exported: Path, tmp_path: Path) -> None:
    (told,) = ranks.run(refused_imports, exported, tmp_path, world_size=1)
    assert "alpha is 6.0 there, 1.0 in this run" in told["alpha"]
    assert "rank is 3 there, 4 in this run" in told["rank"] and "16 of another shape" in told["rank"]
    assert "targets is" in told["targets"] and "8 unexpected" in told["targets"]
    assert "16 tensors matched, 16 missing, 0 unexpected" in told["more layers"]
    assert "tensors are missing" in told["more layers"] and "it was trained on " in told["more layers"]
    assert told["allowed"] == "16 tensors matched, 16 missing, 0 unexpected"


# --- hostile and strange ---------------------------------------------------------------------------------------------

GOOD = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["l"]}


def peft_directory(path: Path, config: Any = GOOD, weights: bytes | None = None) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(config))
    data = (
        safetensors.torch.save({"base_model.model.l.lora_A.weight": torch.ones(1, 2)}) if weights is None else weights
    )
    (path / "adapter_model.safetensors").write_bytes(data)
    return path


def test_a_plain_peft_directory_is_read(tmp_path: Path) -> None:
    read = read_peft(peft_directory(tmp_path / "x"))
    assert (read.rank, read.alpha, read.targets, read.base_fingerprint) == (1, 2.0, ["l"], None)
    assert list(read.weights) == ["l.lora_A.weight"]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, "expected a LoRA adapter"),
        ({"use_dora": True}, UnsupportedError, "use_dora is True"),
        ({"bias": "all"}, UnsupportedError, "bias is 'all'"),
        ({"rank_pattern": {"l": 4}}, UnsupportedError, "rank_pattern"),
        ({"r": "1"}, FormatError, "expected r, lora_alpha"),
        ({"target_modules": "all-linear"}, FormatError, "list of target_modules"),
    ],
)
def test_other_adapters_are_refused(
    tmp_path: Path, change: dict[str, Any], kind: type[MegaresumeError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        read_peft(peft_directory(tmp_path / "x", {**GOOD, **change}))


@pytest.mark.parametrize("data", [b"", b"\x80\x04pickle", b"\xff" * 64, safetensors.torch.save({"x": torch.ones(1)})])
def test_weights_that_are_no_safetensors_of_peft_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(FormatError, match="adapter_model.safetensors"):
        read_peft(peft_directory(tmp_path / "x", weights=data))


def test_a_directory_that_is_none_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        read_peft(tmp_path / "nowhere")
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointNotFoundError, match="found: adapter_model.bin"):
        read_peft(tmp_path)


def test_an_export_never_overwrites_and_needs_a_whole_checkpoint(exported: Path, tmp_path: Path) -> None:
    checkpoint = adapter_root(exported.parent, TENANT.name) / "step-00000002"
    with pytest.raises(ConfigurationError, match="an export goes into a new directory"):
        export_adapter(checkpoint, exported, key="org%2fx", base=None)
    manifest, weights = assemble_weights(checkpoint)
    assert len(weights) == 16 and manifest.step == 2
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    header, data = read_header(shard), shard.read_bytes()
    at = header.data_start + next(span for name, span in header.tensors.items() if name.startswith("model/")).begin
    try:
        shard.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointDamagedError, match=shard.name):
            export_adapter(checkpoint, tmp_path / "out", key="org%2fx", base=None)
        assert not (tmp_path / "out").exists()
    finally:
        shard.write_bytes(data)


BOX = {"shape": [2, 3], "strides": [3, 1], "global_offset": [0, 0], "offset": 0}
PART = {"local_shape": [2, 3], "global_shape": [4, 3], "chunks": [BOX]}


@pytest.mark.parametrize(
    "bad",
    [
        {"local_shape": [2, 10**12], "chunks": [{**BOX, "shape": [2, 10**12]}]},
        {"chunks": [{**BOX, "offset": 1}]},
        {"chunks": [{**BOX, "strides": [30, 1]}]},
        {"chunks": [{**BOX, "global_offset": [3, 0]}]},
        {"chunks": [{**BOX, "offset": -1}]},
        {"chunks": [{**BOX, "shape": [2]}]},
        {"chunks": [BOX, BOX]},
        {"chunks": []},
        {"local_shape": [2, True]},
        {"global_shape": "4"},
    ],
)
def test_an_index_that_points_outside_of_its_parameter_is_refused(bad: dict[str, Any]) -> None:
    _check_part(PART, "here", 1000)
    with pytest.raises(FormatError, match="here"):
        _check_part({**PART, **bad}, "here", 1000)
