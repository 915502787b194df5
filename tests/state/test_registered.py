"""Objects of the user's own: each kind comes back, and one that does not fit is refused before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megaresume.errors import PoisonedError, StateMismatchError, UnsupportedError
from megaresume.state.registered import Registered
from tests.state.objects import Net, everything, frozen, plan, restore, save, streams


class Counts:
    """An object with a state of its own, as a meter or a curriculum has."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "broken" in self.values:
            raise RuntimeError("no such key: epoch")
        self.values = state


def objects(seed: int) -> dict[str, Any]:
    """One of each kind; with another seed, the same kinds with other values."""
    torch.manual_seed(seed)
    module = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if seed == 0:
        module(torch.ones(2)).sum().backward()
        optimizer.step()
    return {
        "tensor": torch.randn(3),
        "weight": nn.Parameter(torch.randn(2, 2)),
        "flags": torch.rand(4) > 0.5,
        "not contiguous": torch.randn(4, 3).T,
        "generator": torch.Generator().manual_seed(seed),
        "nested": {"a": torch.randn(2), "deeper": {1: torch.randn(1), "b": torch.randn(())}, "rng": torch.Generator()},
        "counts": Counts(seen=seed, best=float("-inf"), hist=[torch.randn(2), (1, None)], by_class={3: 0.5}),
        "module": module,
        "its optimizer": optimizer,
        "slash/name": torch.randn(1),
    }


def state(each: Any) -> Any:
    if isinstance(each, dict):
        return {key: state(part) for key, part in each.items()}
    return frozen(each.state_dict() if hasattr(each, "state_dict") else each)


def test_every_kind_comes_back(tmp_path: Path) -> None:
    model, saved, run = Net(), objects(0), objects(1)
    expected = state(saved)
    path = save(tmp_path / "x.safetensors", model, registered=saved)
    for each in run.values():
        if isinstance(each, torch.Tensor) and each.is_floating_point():
            each.detach().fill_(7)
    in_place = {"tensor": run["tensor"], "b": run["nested"]["deeper"]["b"], "weight": run["weight"]}
    restore(path, model, registered=run)
    assert state(run) == expected
    assert in_place["tensor"] is run["tensor"] and torch.equal(in_place["tensor"], saved["tensor"])
    assert torch.equal(in_place["b"], saved["nested"]["deeper"]["b"])
    assert run["weight"].requires_grad
    draws = [torch.rand(2, generator=each["generator"]).tolist() for each in (saved, run)]
    assert draws[0] == draws[1]


def test_collecting_changes_nothing(tmp_path: Path) -> None:
    model, saved = Net(), objects(0)
    expected, before = state(saved), everything(model)
    save(tmp_path / "x.safetensors", model, registered=saved)
    assert (state(saved), everything(model)) == (expected, before)


EMA = {"w": torch.zeros(2, 3), "more": {"b": torch.zeros(4)}}


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("tensor", torch.zeros(4), "registered object tensor is F32 [3] in the checkpoint, float32 [4] in this run"),
        (
            "tensor",
            torch.zeros(3).double(),
            "registered object tensor is F32 [3] in the checkpoint, float64 [3] in this",
        ),
        ("tensor", torch.zeros(1, 3), "registered object tensor is F32 [3]"),  # copy_ would broadcast it
        ("tensor", torch.zeros(()), "registered object tensor is F32 [3]"),
        ("flags", torch.zeros(4), "registered object flags is BOOL [4] in the checkpoint, float32 [4] in this run"),
        (
            "tensor",
            torch.Generator(),
            "registered object tensor is F32 [3] in the checkpoint, uint8 [5056] in this run",
        ),
        ("tensor", {"a": torch.zeros(3)}, "registered object tensor is no dict in the checkpoint, a dict in this run"),
        ("generator", torch.zeros(2), "registered object generator is U8 [5056] in the checkpoint"),
        ("nested", torch.zeros(2), "registered object nested is a dict in the checkpoint, a Tensor in this run"),
        ("nested", {"a": torch.zeros(2)}, "registered object nested['deeper'] is in the checkpoint, not in this run"),
        (
            "nested",
            {"a": torch.zeros(2), "deeper": {1: torch.zeros(5), "c": torch.zeros(())}, "rng": torch.Generator()},
            "registered object nested['deeper'][1] is F32 [1] in the checkpoint, float32 [5] in this run",
        ),
        (
            "nested",
            {"a": torch.zeros(2), "deeper": {1: torch.zeros(5), "c": torch.zeros(())}, "rng": torch.Generator()},
            "registered object nested['deeper']['c'] is in this run, not in the checkpoint",
        ),
        ("module", nn.Linear(3, 3), "registered object module['weight'] is F32 [3, 2] in the checkpoint"),
        (
            "module",
            nn.Linear(2, 3, bias=False),
            "registered object module['bias'] is in the checkpoint, not in this run",
        ),
        (
            "module",
            nn.Linear(2, 3).bfloat16(),
            "registered object module['bias'] is F32 [3] in the checkpoint, bfloat16",
        ),
        ("counts", nn.Linear(2, 3), "registered object counts['weight'] is in this run, not in the checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) and value[:10] != "registered" else "",
)
def test_another_shape_dtype_or_structure_is_refused_before_anything_is_touched(
    name: str, value: Any, line: str, tmp_path: Path
) -> None:
    model = Net()
    path = save(tmp_path / "x.safetensors", model, registered=objects(0), streams=streams())
    run = {**objects(1), name: value}
    before = everything(model), state(run)
    with pytest.raises(StateMismatchError) as caught:
        plan(path, model, registered=run, streams=streams())
    assert line in str(caught.value)
    assert (everything(model), state(run)) == before


def test_names_on_one_side_only_are_refused(tmp_path: Path) -> None:
    model = Net()
    path = save(tmp_path / "x.safetensors", model, registered={"ema": torch.zeros(2), "both": torch.zeros(1)})
    with pytest.raises(StateMismatchError) as caught:
        plan(path, model, registered={"both": torch.zeros(1), "meter": Counts()})
    assert "registered object ema is in the checkpoint, not in this run" in str(caught.value)
    assert "registered object meter is in this run, not in the checkpoint" in str(caught.value)
    assert "both" not in str(caught.value)


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    model = Net()
    path = save(tmp_path / "x.safetensors", model, registered={"meter": Counts(epoch=1)})
    with pytest.raises(PoisonedError, match=r"registered objects could not be put back \(RuntimeError: no such key"):
        restore(path, model, registered={"meter": Counts(broken=True)})


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (3, r"register\['mine'\] is a int"),
        ([torch.zeros(1)], r"register\['mine'\] is a list"),
        ({"a": 1.0}, r"register\['mine'\]\['a'\] is a float"),
        ({"a": {"b": None}}, r"register\['mine'\]\['a'\]\['b'\] is a NoneType"),
        (type("Half", (), {"state_dict": dict})(), r"register\['mine'\] is a Half"),
    ],
)
def test_what_cannot_be_put_back_is_refused_when_it_is_registered(value: Any, where: str) -> None:
    with pytest.raises(UnsupportedError, match=where):
        Registered({"mine": value})


def test_a_dict_that_has_grown_is_saved_as_it_is_and_checked_again(tmp_path: Path) -> None:
    model, ema = Net(), {"w": torch.zeros(2)}
    registered = Registered({"ema": ema})
    ema["more"] = torch.ones(1)
    assert sorted(registered.capture()[1]) == ["registered/ema/more", "registered/ema/w"]
    ema["step"] = 3
    with pytest.raises(UnsupportedError, match=r"register\['ema'\]\['step'\] is a int"):
        registered.capture()
    del ema["step"]
    path = save(tmp_path / "x.safetensors", model, registered={"ema": ema})
    with pytest.raises(StateMismatchError, match=r"ema\['more'\] is in the checkpoint, not in this run"):
        plan(path, model, registered={"ema": {"w": torch.zeros(2)}})


def test_a_state_that_is_no_data_is_named_at_the_save(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"registered/meter/when is a builtins\.set"):
        save(tmp_path / "x.safetensors", Net(), registered={"meter": Counts(when={1, 2})})
