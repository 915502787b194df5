"""What others' bug reports say of resuming adapters, one test per case, on one rank; and every refusal by its words."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megaresume.adapters import AdapterManager, AdapterReport, LoraConfig
from megaresume.adapters.naming import encode_name
from megaresume.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    MegaresumeError,
    StateMismatchError,
    UnsupportedError,
)
from megaresume.megatron import lora
from megaresume.megatron.rng import random_streams
from tests.adapters.tenants import (
    Crash,
    Live,
    Tenant,
    adapter_root,
    add,
    attach,
    build_base,
    life,
    opened,
    train,
    train_step,
)
from tests.harness import tree
from tests.ranks import Ranks
from tests.small_models import SmallModel, StepResult

ONE = SmallModel(num_layers=1, precision="fp32")
BF16 = SmallModel(num_layers=1)
A = Tenant("a", LoraConfig(rank=4, alpha=8, dropout=0.2), steps=5, save_every=2)
B = Tenant("b", LoraConfig(rank=6, alpha=6, targets=("linear_fc1", "linear_proj")), steps=2, lr=0.03, dataset_size=11)


def on_one(ranks: Ranks, function: Callable[..., Any], *args: Any) -> Any:
    return ranks.run(function, *args, world_size=1)[0]


def weights(live: Live, name: str) -> dict[str, list[float]]:
    key = encode_name(name)
    return {
        each: parameter.flatten().tolist()
        for each, parameter in live.chunks[0].named_parameters()
        if lora.belongs_to(each, key)
    }


@contextmanager
def refused(kind: type[MegaresumeError]) -> Any:
    told: list[str] = []
    try:
        yield told
    except kind as error:
        assert type(error) is kind
        told.append(str(error))
    else:
        raise AssertionError(f"no {kind.__name__}")


# --- what comes back -------------------------------------------------------------------------------------------------


def trained_and_resumed(root: Path) -> dict[str, Any]:
    reference = life(BF16, [A], root / "reference")
    with opened(BF16, [replace(A, steps=4)], root / "run") as live:
        live.adapters.resume_all()
        train(live)
        saved = weights(live, "a")
    with opened(BF16, [A], root / "run") as live:
        fresh = weights(live, "a")
        report = live.adapters.resume("a")
        facts = {
            "equal": weights(live, "a") == saved != fresh,
            "attached": sorted(lora.attached(live.chunks)),
            "step": report.resumed.step,
            "tally": str(report.tally),
            "next": train_step(live, "a") == reference["a", 5],
        }
    return facts


def test_l01_the_adapter_is_not_the_fresh_one(ranks: Ranks, tmp_path: Path) -> None:
    assert on_one(ranks, trained_and_resumed, tmp_path) == {
        "equal": True,
        "attached": ["a"],
        "step": 4,
        "tally": "4 tensors matched, 0 missing, 0 unexpected",
        "next": True,
    }


STRANGE = ["org/name-v1.5", "../up", "A", "a", "x y", "é", "forward"]


def test_l04_strange_names_train_and_resume_within_the_root(ranks: Ranks, tmp_path: Path) -> None:
    tenants = [Tenant(name, LoraConfig(rank=2, alpha=2), steps=2, seed=n) for n, name in enumerate(STRANGE)]
    on_one(ranks, life, ONE, [replace(each, steps=1) for each in tenants], tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["adapters"]
    directories = sorted(path.name for path in (tmp_path / "run/adapters").iterdir())
    assert directories == sorted(map(encode_name, STRANGE)) and len({d.lower() for d in directories}) == len(STRANGE)
    resumed = on_one(ranks, life, ONE, tenants, tmp_path / "run")
    assert sorted(resumed) == sorted((name, 2) for name in STRANGE)
    assert resumed == {
        key: v for key, v in on_one(ranks, life, ONE, tenants, tmp_path / "whole").items() if key in resumed
    }


def standing(live: Live, name: str) -> tuple[Any, ...]:
    run, training = live.adapters[name], live.training[name]
    return (run.step, run.consumed_train_samples, training.sampler.epoch, training.run.optimizer.param_groups[0]["lr"])


def two_at_different_steps(root: Path) -> dict[str, Any]:
    with opened(ONE, [A, B], root) as live:
        live.adapters.resume_all()
        train(live)
        before = {name: standing(live, name) for name in ("a", "b")}
    with opened(ONE, [A, B], root) as live:
        live.adapters.resume_all()
        both = {name: standing(live, name) for name in ("a", "b")}
    a_on_disk = tree(adapter_root(root, "a"))
    with opened(ONE, [replace(B, steps=3)], root) as live:
        live.adapters.resume_all()
        only = standing(live, "b")
        absent = live.adapters.absent()
        train(live)
    return {
        "before": before,
        "both": both,
        "only": only,
        "absent": absent,
        "a untouched": a_on_disk == tree(adapter_root(root, "a")),
    }


def test_l06_each_adapter_has_its_own_step_schedule_and_data(ranks: Ranks, tmp_path: Path) -> None:
    found = on_one(ranks, two_at_different_steps, tmp_path)
    assert found["before"]["a"][:2] == (5, 20) and found["before"]["b"][:2] == (2, 8)
    assert found["before"]["a"][3] != found["before"]["b"][3]
    assert found["both"] == found["before"] and found["only"] == found["before"]["b"]
    assert found["absent"] == ["a"] and found["a untouched"]


def save_all_and_ask_for_one_that_never_was(root: Path) -> list[str]:
    with opened(ONE, [replace(A, name="x"), replace(B, name="y")], root) as live:
        live.adapters.resume_all()
        train(live)
    with opened(ONE, [replace(A, name="x"), replace(A, name="z")], root, resume_from="latest") as live:
        live.adapters.resume("x")
        with refused(CheckpointNotFoundError) as told:
            live.adapters.resume("z")
        return [*told, *live.adapters.on_disk()]


def test_l07_every_adapter_is_saved_and_a_missing_one_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    told, *names = on_one(ranks, save_all_and_ask_for_one_that_never_was, tmp_path)
    assert "adapters/z: no checkpoint can be resumed from, though one was asked for" in told
    assert names == ["x", "y"], "all that trained, none called default, and not the one that was refused"


def init_and_resume(root: Path) -> dict[str, Any]:
    with opened(BF16, [A], root / "first") as live:
        live.adapters.resume_all()
        train(live)
        live.adapters.export("a", root / "peft")
        trained = weights(live, "a")
    facts = {}
    with opened(BF16, [A], root / "second") as live:
        report = live.adapters.resume("a", init_from=root / "peft")
        facts["weights"] = weights(live, "a") == trained
        facts["begins"] = (report.resumed.path, standing(live, "a")[:2], str(report.tally))
        masters = [p for group in live.training["a"].run.optimizer.param_groups for p in group["params"]]
        values = sorted(value for p in masters for value in p.flatten().tolist())
        facts["masters"] = values == sorted(value for each in trained.values() for value in each)
        facts["state"] = len(live.training["a"].run.optimizer.chained_optimizers[0].optimizer.state)
        train_step(live, "a")
    with opened(BF16, [A], root / "second") as live:
        report = live.adapters.resume("a", init_from=root / "peft")
        facts["again"] = (report.resumed.step, standing(live, "a")[0])
    return facts


def test_l08_beginning_with_an_adapter_is_another_mode_than_resuming_it(ranks: Ranks, tmp_path: Path) -> None:
    facts = on_one(ranks, init_and_resume, tmp_path)
    assert facts == {
        "weights": True,
        "begins": (None, (0, 0), "4 tensors matched, 0 missing, 0 unexpected"),
        "masters": True,
        "state": 0,
        "again": (1, 1),
    }


def other_trainable_sets(root: Path) -> list[str]:
    life(ONE, [A], root)
    told = []
    with opened(ONE, [A], root) as live:
        base = live.chunks[0].module.decoder.layers[0].self_attention.linear_proj.base.weight
        base.requires_grad_(True)
        with refused(ConfigurationError) as loose:
            live.adapters.resume("a")
        base.requires_grad_(False)
        parameter = next(p for n, p in live.chunks[0].named_parameters() if ".lora_B.a." in n)
        parameter.requires_grad_(False)
        with refused(StateMismatchError) as frozen:
            live.adapters.resume("a")
        parameter.requires_grad_(True)
        live.adapters.resume("a")
        before = base.clone()
        train(live)
        assert torch.equal(base, before)
        told += [*loose, *frozen]
    chunks = build_base(ONE)
    training = attach(chunks, ONE, A)
    next(p for n, p in chunks[0].named_parameters() if ".lora_B.a." in n).requires_grad_(False)
    with AdapterManager(root, model=chunks) as adapters, refused(ConfigurationError) as at_once:
        add(adapters, A, training)
    return [*told, *at_once]


def test_l09_another_trainable_set_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    loose, frozen, at_once = on_one(ranks, other_trainable_sets, tmp_path)
    assert "1 parameters need a gradient and are no adapter's: " in loose and "linear_proj.base.weight" in loose
    assert ".lora_B.a.weight: trainable is True in the checkpoint, False in this run" in frozen
    assert "needs no gradient, so would never train: " in at_once and ".lora_B.a.weight" in at_once


def resume_told(tenant: Tenant, root: Path, **settings: Any) -> str | AdapterReport:
    """The refusal's words; the live adapter must be as it was."""
    with opened(ONE, [tenant], root, **settings) as live:
        before = weights(live, tenant.name)
        try:
            return live.adapters.resume(tenant.name)
        except StateMismatchError as error:
            assert weights(live, tenant.name) == before, "a refusal changed something"
            return str(error)


def resumes_told(cases: dict[str, tuple[Tenant, dict[str, Any]]], root: Path) -> dict[str, str | AdapterReport]:
    return {name: resume_told(tenant, root, **settings) for name, (tenant, settings) in cases.items()}


def with_config(tenant: Tenant, **changes: Any) -> Tenant:
    return replace(tenant, config=replace(tenant.config, **changes))


def test_l10_another_config_is_refused_with_adapter_and_field(ranks: Ranks, tmp_path: Path) -> None:
    on_one(ranks, life, ONE, [A, B], tmp_path)
    cases: dict[str, tuple[Tenant, dict[str, Any]]] = {
        "alpha": (with_config(A, alpha=16), {}),
        "rank": (with_config(B, rank=8), {}),
        "dropout": (with_config(A, dropout=0.0), {}),
        "targets": (with_config(A, targets=("linear_qkv", "linear_fc2")), {}),
        "swapped": (replace(A, config=B.config), {}),
        "unchanged": (A, {}),
        "alpha allowed": (with_config(A, alpha=16), {"allow": {"alpha"}}),
    }
    told = on_one(ranks, resumes_told, cases, tmp_path)
    for field, saved, now in (("alpha", "8.0", "16.0"), ("rank", "6", "8"), ("dropout", "0.2", "0.0")):
        line = next(line for line in told[field].splitlines() if line.startswith(f"adapter.{field}"))
        assert line.split()[1:3] == [saved, now], line
        assert f"adapters/{cases[field][0].name}/step-" in told[field]
    assert "adapter.targets" in told["targets"]
    assert all(f"adapter.{field}" in told["swapped"] for field in ("rank", "alpha", "dropout", "targets"))
    allowed = told["alpha allowed"].resumed
    assert allowed.step == 5 and allowed.changes == ("model",)
    assert allowed.notes[0] == "adapter.alpha is 8.0 in the checkpoint, 16.0 in this run, which was allowed"
    assert told["unchanged"].resumed.step == 5 and told["unchanged"].resumed.changes == ()


def resume_in_parts(root: Path) -> dict[str, Any]:
    life(ONE, [A], root)
    facts: dict[str, Any] = {}
    for what, settings, call in (
        ("all", {}, {}),
        ("no random numbers", {"load_rng": False}, {}),
        ("no data", {}, {"skip_data": False}),
        ("weights only", {}, {"weights_only": True}),
    ):
        with opened(ONE, [A], root, **settings) as live:
            states = len(live.training["a"].run.optimizer.chained_optimizers[0].optimizer.state)
            fresh = {name: s.get().tolist() for name, s in live.adapters._adapters["a"].streams.streams().items()}
            report = live.adapters.resume("a", **call)
            after = {name: s.get().tolist() for name, s in live.adapters._adapters["a"].streams.streams().items()}
            optimizer = live.training["a"].run.optimizer.chained_optimizers[0].optimizer
            facts[what] = {
                "optimizer": len(optimizer.state) > states,
                "scheduler": live.training["a"].run.scheduler.num_steps,
                "consumed": standing(live, "a")[1],
                "rng": after != fresh,
                "left out": report.resumed.left_out,
                "step": report.resumed.step,
            }
            live.adapters.__exit__(Crash, Crash(), None)  # so that nothing is saved over the next case
    return facts


def test_l12_what_is_left_out_is_left_out_in_adapter_mode_too(ranks: Ranks, tmp_path: Path) -> None:
    facts = on_one(ranks, resume_in_parts, tmp_path)
    whole = {"optimizer": True, "scheduler": 20, "consumed": 20, "rng": True, "left out": (), "step": 5}
    assert facts["all"] == whole
    assert facts["no random numbers"] == whole | {"rng": False, "left out": ("random numbers (not asked for)",)}
    assert facts["no data"] == whole | {"consumed": 0}
    assert facts["weights only"] == {
        "optimizer": False,
        "scheduler": 0,
        "consumed": 0,
        "rng": False,
        "left out": ("optimizer", "random numbers", "registered objects"),
        "step": 0,
    }


def another_base(root: Path) -> list[Any]:
    life(ONE, [A], root)
    told: list[Any] = []
    for allow in ((), ("base",)):
        chunks = build_base(ONE)
        with torch.no_grad():
            next(p for n, p in chunks[0].named_parameters() if n.endswith("linear_fc2.weight"))[3, 5] += 1e-3
        with opened(ONE, [A], root, chunks=chunks, allow=allow) as live:
            try:
                told.append(live.adapters.resume("a").resumed.notes[0])
            except StateMismatchError as error:
                told.append(str(error))
    return told


def test_l13_another_base_is_refused_and_never_stored_with_an_adapter(ranks: Ranks, tmp_path: Path) -> None:
    refusal, note = on_one(ranks, another_base, tmp_path)
    assert "base.fingerprint" in refusal and note.startswith("base.fingerprint is ")
    (checkpoint,) = (tmp_path / "adapters/a").glob("step-00000005")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["extra"]["base"] == "the-base"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["model"]["base"]["fingerprint"] and manifest["model"]["adapter"]["name"] == "a"


def one_resumed_beside_another(root: Path) -> dict[str, Any]:
    life(ONE, [B], root / "b")
    alone = life(ONE, [A], root / "alone")
    facts: dict[str, Any] = {}
    with opened(ONE, [A, replace(B, steps=4)], root / "b") as live:
        live.adapters.resume("a")
        results = {("a", step): train_step(live, "a") for step in (1, 2, 3)}
        before = {name: stream.get().tolist() for name, stream in random_streams(None).items()}
        live.adapters.resume("b")
        facts["process"] = before == {name: stream.get().tolist() for name, stream in random_streams(None).items()}
        results |= {("a", step): train_step(live, "a") for step in (4, 5)}
    facts["a"] = results == alone
    return facts


def test_l15_resuming_one_adapter_leaves_the_others_and_the_process_alone(ranks: Ranks, tmp_path: Path) -> None:
    assert on_one(ranks, one_resumed_beside_another, tmp_path) == {"process": True, "a": True}


# --- refusals --------------------------------------------------------------------------------------------------------


def damaged_numbers(root: Path) -> dict[str, list[Any]]:
    told: dict[str, list[Any]] = {}
    for case, name in (("nonfinite", "a"), ("zero_b", "b")):
        tenant = replace(A, name=name, save_every=None)
        with opened(ONE, [tenant], root) as live:
            live.adapters.resume_all()
            train(live)
            with torch.no_grad():
                for each, parameter in live.chunks[0].named_parameters():
                    if f".lora_B.{name}." in each:
                        parameter.mul_(0.0 if case == "zero_b" else float("nan"))
            live.adapters.save(name)
        told[case] = [resume_told(tenant, root), resume_told(tenant, root, allow={case})]
    return told


def test_numbers_that_no_trained_adapter_has_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    told = on_one(ranks, damaged_numbers, tmp_path)
    assert "NaN or Inf in 2 tensors" in told["nonfinite"][0] and "allow={'nonfinite'}" in told["nonfinite"][0]
    assert "every B is zero" in told["zero_b"][0] and "allow={'zero_b'}" in told["zero_b"][0]
    for case in told:
        assert told[case][1].resumed.step == 5, "allowed by name, it is taken"


def an_untrained_adapter_is_not_suspicious(root: Path) -> int:
    with opened(ONE, [replace(A, steps=1)], root) as live:
        live.adapters.resume_all()
        train(live)  # the first step of a warm-up from zero: B is still zero
    report = resume_told(A, root)
    assert isinstance(report, AdapterReport)
    return report.resumed.step


def test_a_zero_b_of_one_step_is_taken(ranks: Ranks, tmp_path: Path) -> None:
    assert on_one(ranks, an_untrained_adapter_is_not_suspicious, tmp_path) == 1


def missing_and_unexpected(root: Path) -> list[str]:
    """The same configuration, but a model that lost one linear and gained another."""
    told = []
    life(ONE, [A], root)
    deeper = replace(ONE, num_layers=2)
    with opened(deeper, [A], root, allow={"base"}) as live:
        with pytest.raises(MegaresumeError) as error:
            live.adapters.resume("a")
        told.append(str(error.value))
    chunks = build_base(ONE)
    training = attach(chunks, ONE, A)
    with AdapterManager(root, model=chunks) as adapters:
        for bad in ({"parameters": lambda name: False}, {"allow": {"rank"}}, {"allow": {"anything"}}):
            with refused(ConfigurationError) as words:
                add(adapters, A, training, **bad)
            told += words
        with refused(UnsupportedError) as words:
            add(adapters, A, training, parameters=lambda name: ".lora_A.a." in name)
        told += words
        add(adapters, A, training)
        for again in (A, replace(A, name="c")):
            with refused(ConfigurationError) as words:
                add(adapters, again, training, parameters=lambda name: ".lora_A.a." in name)
            told += words
        with refused(ConfigurationError) as words:
            adapters.save("nobody")
        told += words
    return told


def test_what_does_not_fit_is_refused_in_words(ranks: Ranks, tmp_path: Path) -> None:
    deeper, nothing, rank, anything, loose, taken, twice, nobody = on_one(ranks, missing_and_unexpected, tmp_path)
    assert "num_layers" in deeper
    assert "no parameter of the model is its own" in nothing
    assert "allow=['rank']: expected some of" in rank and "allow=['anything']" in anything
    assert "is no parameter of the model given" in loose
    assert "is there already" in taken and "already of adapter 'a'" in twice
    assert "no adapter 'nobody' here; there are: a" in nobody


def test_the_counts_say_what_matched() -> None:
    from megaresume.adapters.admission import tally

    found = tally({"x": [2, 3], "y": [1], "z": [4, 4]}, {"x": [2, 3], "w": [1], "z": [4, 5]})
    assert str(found) == "1 tensors matched, 1 missing, 1 unexpected, 1 of another shape"
    assert found.details().split("\n  ")[1:] == [
        "missing: w",
        "unexpected: y",
        "other shape: z: [4, 4], in this run [4, 5]",
    ]


# --- lives -----------------------------------------------------------------------------------------------------------


def added_and_removed(root: Path) -> dict[str, Any]:
    reference = life(ONE, [A], root / "reference")
    facts: dict[str, Any] = {}
    with opened(ONE, [A], root / "run") as live:
        live.adapters.resume_all()
        results: dict[tuple[str, int], StepResult] = {("a", step): train_step(live, "a") for step in (1, 2)}
        live.training["b"] = attach(live.chunks, ONE, B)
        add(live.adapters, B, live.training["b"])
        live.tenants.append(B)
        facts["b begins"] = live.adapters.resume_all()["b"].resumed.step
        results["a", 3] = train_step(live, "a")
        train_step(live, "b")
        live.adapters.remove("b")
        facts["attached"] = sorted(lora.attached(live.chunks))
        facts["b saved"] = (adapter_root(root / "run", "b") / "step-00000001").is_dir()
        facts["absent"] = live.adapters.absent()
        results |= {("a", step): train_step(live, "a") for step in (4, 5)}
    facts["a"] = results == reference
    return facts


def test_adapters_come_and_go_while_others_train(ranks: Ranks, tmp_path: Path) -> None:
    assert on_one(ranks, added_and_removed, tmp_path) == {
        "b begins": 0,
        "attached": ["a"],
        "b saved": True,
        "absent": ["b"],
        "a": True,
    }


def stopped_by_a_signal(root: Path) -> dict[str, Any]:
    reference = life(ONE, [A, replace(B, steps=5)], root / "reference")
    with opened(ONE, [replace(A, save_every=None), replace(B, steps=5)], root / "run") as live:
        live.adapters.resume_all()
        results = {("a", 1): train_step(live, "a"), ("b", 1): train_step(live, "b")}
        os.kill(os.getpid(), signal.SIGTERM)
        results["a", 2] = train_step(live, "a")  # posts the wish
        noticed = live.adapters.should_stop
        results["b", 2] = train_step(live, "b")  # hears it
        stopped = live.adapters.should_stop
        saved = {name: sorted(p.name for p in adapter_root(root / "run", name).glob("step-*")) for name in ("a", "b")}
    results |= life(ONE, [A, replace(B, steps=5)], root / "run")
    return {"noticed": (noticed, stopped), "saved": saved, "equal": results == reference}


def test_a_stop_is_a_stop_for_all_adapters(ranks: Ranks, tmp_path: Path) -> None:
    assert on_one(ranks, stopped_by_a_signal, tmp_path) == {
        "noticed": (False, True),
        "saved": {"a": ["step-00000002"], "b": ["step-00000002"]},
        "equal": True,
    }


def fall_back(root: Path) -> dict[str, Any]:
    with opened(ONE, [A], root) as live:
        live.adapters.resume_all()
        train(live)
    newest = adapter_root(root, "a") / "step-00000005"
    shard = next(newest.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    with opened(ONE, [A], root) as live:
        report = live.adapters.resume("a")
        with refused(ConfigurationError) as told:
            add(live.adapters, replace(A, name="later"), live.training["a"], async_save=True)
    return {"step": report.resumed.step, "passed": report.resumed.passed[0][0], "told": told[0]}


def test_a_damaged_checkpoint_of_an_adapter_is_passed_over_aloud(ranks: Ranks, tmp_path: Path) -> None:
    found = on_one(ranks, fall_back, tmp_path)
    assert (found["step"], found["passed"]) == (4, "step-00000005")
    assert "async_save" in found["told"]
