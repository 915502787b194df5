"""One rank's state, there and back: what is collected, what is refused before anything is touched, and what is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megaresume.errors import FormatError, MegaresumeError, StateMismatchError, UnsupportedError
from megaresume.megatron.live import describe
from megaresume.state.rank_state import RankState, capture, plan_restore
from megaresume.state.registered import Registered
from tests.state.layouts import ExtraSlots, MixedPrecision
from tests.state.objects import Net, Span, everything, frozen, plan, restore, save, spans_of, streams, train


class WithExtraState(Net):
    """A module with a state that is neither parameter nor buffer, as Transformer Engine's have."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.extra: Any = {"amax": torch.arange(3.0), "steps": (1, None)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_buffers_and_extra_states_come_back(tmp_path: Path) -> None:
    model = WithExtraState()
    model(torch.randn(5, 4))
    before = everything(model, None), frozen(model.extra)
    path = save(tmp_path / "x.safetensors", model)
    other = WithExtraState(seed=1)
    other.extra = None
    restore(path, other)
    assert (everything(other)["model"], frozen(other.extra)) == (before[0]["model"], before[1])


def test_several_chunks(tmp_path: Path) -> None:
    """Virtual pipeline chunks: parameters have global names, buffers and extra states those of their chunk."""

    class Chunk(WithExtraState):
        def __init__(self, number: int, seed: int) -> None:
            super().__init__(seed)
            for name, module in list(self.named_children()):
                delattr(self, name)
                setattr(self, f"{name}{number}", module)
            self.extra = {"number": number}
            for name in ("scale", "nothing"):
                setattr(self, f"{name}{number}", getattr(self, name))
                delattr(self, name)

    chunks = [Chunk(number, seed=number) for number in range(3)]
    for number, chunk in enumerate(chunks):
        getattr(chunk, f"centre{number}").mean.fill_(number + 0.5)
    others = [Chunk(number, seed=7) for number in range(3)]
    for other in others:
        other.extra = None
    path = save(tmp_path / "x.safetensors", chunks)
    restore(path, others)
    assert everything(others)["model"] == everything(chunks)["model"]
    assert [other.extra for other in others] == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_collecting_copies_no_weight_and_no_moment() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    state = capture(describe([model], optimizer), None, Registered({}))
    assert state.tensors["model/first.weight"].data_ptr() == model.first.weight.data_ptr()
    moment = optimizer.state[model.first.weight]["exp_avg"]
    assert state.tensors["optim/0/exp_avg/first.weight"] is moment


def test_weights_alone(tmp_path: Path) -> None:
    run = MixedPrecision(Net())
    run.train(range(3))
    path = save(tmp_path / "x.safetensors", run.model, run, streams=streams(), registered={"ema": torch.ones(2)})
    new = MixedPrecision(Net(seed=1))
    new.train(range(1))
    before, ema = everything(new.model, new), torch.zeros(2)
    made = restore(path, new.model, new, streams=streams(), registered={"ema": ema}, weights_only=True)
    after = everything(new.model, new)
    assert after["model"] == everything(run.model, run)["model"]
    assert (after["optimizers"], after["rng"]) == (before["optimizers"], before["rng"])
    assert ema.tolist() == [0, 0]
    assert made.left_out == ["optimizer", "random numbers", "registered objects"]
    for master, weight in zip(new.masters, new.float16_groups[0], strict=True):
        assert torch.equal(master, weight.float()), "stale masters would overwrite the weights at the next step"


def test_weights_alone_do_not_ask_what_the_optimizer_was(tmp_path: Path) -> None:
    model = Net()
    path = save(tmp_path / "x.safetensors", model, torch.optim.SGD(model.parameters(), lr=0.1), streams=streams())
    restore(path, Net(seed=1), None, weights_only=True)


# --- another model ---------------------------------------------------------------------------------------------------


class OtherShape(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(6, 5, bias=False)


class Fewer(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.scale
        self.scale = 1.0


class More(Net):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(2))


class OtherBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.centre.register_buffer("variance", torch.zeros(6))
        del self.centre.last


class LongerBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.centre.mean = torch.zeros(1)


class OtherDtype(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.to(torch.bfloat16)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (OtherShape, ["parameter second.weight: local_shape is [4, 6] in the checkpoint, [5, 6] in this run"]),
        (Fewer, ["parameter scale is in the checkpoint, not in this model"]),
        (More, ["parameter gate is in this model, not in the checkpoint"]),
        (
            OtherBuffers,
            [
                "buffer chunk0.centre.last is in the checkpoint, not in this model",
                "buffer chunk0.centre.variance is in this model, not in the checkpoint",
            ],
        ),
        (LongerBuffer, ["buffer/chunk0.centre.mean is F32 [6] in the checkpoint, F32 [1] in this run"]),
        (OtherDtype, ["parameter second.weight: dtype is float32 in the checkpoint, bfloat16 in this run"]),
        (Frozen, ["parameter first.bias: trainable is True in the checkpoint, False in this run"]),
        (WithExtraState, ["extra state chunk0. is only in this model"]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.parametrize("weights_only", [False, True])
def test_t14_a_tensor_of_another_shape_or_name_is_an_error_and_nothing_is_applied(
    model: type[Net], lines: list[str], weights_only: bool, tmp_path: Path
) -> None:
    path = save(tmp_path / "x.safetensors", Net(), streams=streams())
    other = model()
    before = everything(other)
    with pytest.raises(StateMismatchError) as caught:
        plan(path, other, streams=streams(), weights_only=weights_only)
    for line in lines:
        assert line in str(caught.value)
    assert everything(other) == before


def test_t14_all_differences_are_told_at_once_and_a_dozen_of_them_in_full(tmp_path: Path) -> None:
    path = save(tmp_path / "x.safetensors", nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))))
    with pytest.raises(StateMismatchError) as caught:
        plan(path, nn.Sequential(*(nn.Linear(3, 2, bias=False) for _ in range(20))))
    lines = str(caught.value).splitlines()
    assert lines[0] == "the checkpoint is not of this model and optimizer:"
    assert lines[-1].strip() == "and 68 more" and len(lines) == 14  # 20 biases, 20 weights with 3 fields each


@pytest.mark.parametrize(
    ("name", "span", "words"),
    [
        ("model/first.weight", Span("F32", (6, 5)), "F32 [6, 5] in the checkpoint, F32 [6, 4] in this run"),
        ("model/first.weight", Span("BF16", (6, 4)), "BF16 [6, 4] in the checkpoint, F32 [6, 4] in this run"),
        ("model/nothing", Span("F32", (0, 4)), "F32 [0, 4] in the checkpoint, F32 [0, 3] in this run"),
        ("buffer/chunk0.centre.mean", Span("F32", (1,)), "F32 [1] in the checkpoint, F32 [6] in this run"),
        ("buffer/chunk0.centre.batches", Span("I32", ()), "I32 [] in the checkpoint, I64 [] in this run"),
        ("optim/0/signs/first.weight", Span("BOOL", (6, 3)), "the index says elements 0 to 24, the file holds 18"),
        ("rng/torch", Span("U8", (7,)), "random stream torch has [7] bytes in the checkpoint"),
        ("rng/torch", Span("I8", (5056,)), "I8 [5056] in the checkpoint, U8 [5056] in this run"),
        ("registered/ema/w", Span("F32", (3,)), "registered object ema['w'] is F32 [3] in the checkpoint"),
        ("model/second.weight", Span("F5", (4, 6)), "F5"),
        ("optim/0/signs/scale", Span("F5", ()), "optim/0/signs/scale has dtype 'F5', which this release does not know"),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_t14_an_index_that_says_all_is_right_of_a_file_where_it_is_not(name: str, span: Span, words: str) -> None:
    model, optimizer, state, spans = subject()
    assert name in spans
    before = everything(model, optimizer)
    with pytest.raises((StateMismatchError, FormatError)) as caught:
        plan_restore(
            state.index, {**spans, name: span}, describe([model], optimizer), streams(), Registered(REGISTERED)
        )
    assert words in str(caught.value) and name.rpartition("/")[2] in str(caught.value)
    assert everything(model, optimizer) == before


# --- an index from anywhere ------------------------------------------------------------------------------------------

REGISTERED = {"ema": {"w": torch.zeros(2), "more": {"b": torch.zeros(3, dtype=torch.int64)}}, "seed": torch.Generator()}


def subject() -> tuple[Net, torch.optim.Optimizer, RankState, dict[str, Span]]:
    """A stepped model and an index of everything an index may have in it."""
    model = WithExtraState()
    optimizer = ExtraSlots(model.parameters(), lr=0.01)
    train(model, optimizer, 2)
    state = capture(describe([model], optimizer), streams(), Registered(REGISTERED))
    return model, optimizer, state, spans_of(state)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a tree of JSON."""
    for key, part in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(part, (dict, list)):
            yield from places(part)


class Dropped:
    pass


@pytest.mark.parametrize(
    "wrong", [Dropped, None, -1, "model/first.weight", [3, 2, 1], {"~": "tensor", "v": "x"}], ids=str
)
def test_t14_whatever_stands_in_an_index_planning_refuses_by_name_or_touches_nothing(wrong: Any) -> None:
    model, optimizer, state, spans = subject()
    live, before = describe([model], optimizer), everything(model, optimizer, *REGISTERED["ema"].values())
    refused = total = 0
    index = copy.deepcopy(state.index)
    for container, key in places(index):
        part = container[key]
        if wrong is Dropped:
            del container[key]
        else:
            container[key] = wrong
        total += 1
        try:
            plan_restore(index, spans, live, streams(), Registered(REGISTERED))
        except MegaresumeError:
            refused += 1
        if wrong is Dropped and isinstance(container, list):
            container.insert(key, part)
        else:
            container[key] = part
    assert everything(model, optimizer, *REGISTERED["ema"].values()) == before
    # What may differ is the value of a state or an option that a schedule moves; nearly all of an index may not.
    assert total > 400 and refused > 0.8 * total, (refused, total)
    plan_restore(state.index, spans, live, streams(), Registered(REGISTERED))


def remove(path: str) -> Callable[[Any, Any], None]:
    def edit(index: Any, spans: Any) -> None:
        *parents, last = path.split()
        for parent in parents:
            index = index[int(parent) if parent.isdigit() else parent]
        del index[int(last) if last.isdigit() else last]

    return edit


def assign(path: str, value: Any) -> Callable[[Any, Any], None]:
    def edit(index: Any, spans: Any) -> None:
        *parents, last = path.split()
        for parent in parents:
            index = index[int(parent) if parent.isdigit() else parent]
        index[int(last) if last.isdigit() else last] = value

    return edit


FIRST_STATE = "optimizers 0 groups 0 members 0 state"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        *((remove(field), field) for field in ("version", "parameters", "tensors", "buffers", "extra_states")),
        *((remove(field), field) for field in ("optimizers", "rng", "registered")),
        *(
            (assign(field, 3), field)
            for field in ("parameters", "tensors", "buffers", "extra_states", "optimizers", "rng")
        ),
        (assign("version", 2), "index is of version 2, this release reads version 1"),
        (assign("version", True), "index is of version True"),
        (
            assign("tensors model/scale kind", "elsewhere"),
            "kind: expected stored or derived or referenced, found 'else",
        ),
        (assign("tensors model/scale range", [1, 0]), "range"),
        (
            assign("tensors model/ghost", {"parameter": None, "slot": "x", "range": None, "kind": "stored"}),
            "model/ghost",
        ),
        (remove("tensors model/scale"), "the file holds tensor model/scale, which the index does not name"),
        (remove("tensors rng/torch"), "rng/torch"),
        (assign("rng 0", "torch"), "each name once"),
        (remove("optimizers 0 groups"), "groups is missing"),
        (remove("optimizers 0 groups 0 options"), "options is missing"),
        (remove("optimizers 0 groups 0 members 0 range"), "range is missing"),
        (remove(FIRST_STATE), "state is missing"),
        (assign("optimizers 0 scaler", []), "scaler: expected an object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_t14_each_field_of_an_index_missing_or_of_the_wrong_type_is_named(edit, words: str) -> None:
    model, optimizer, state, spans = subject()
    index = copy.deepcopy(state.index)
    edit(index, spans)
    before = everything(model, optimizer)
    with pytest.raises(FormatError) as caught:
        plan_restore(index, spans, describe([model], optimizer), streams(), Registered(REGISTERED))
    assert words in str(caught.value)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("model/first.weight", "the weights of the model"),
        ("optim/0/signs/first.bias", "another slot"),
        ("rng/torch", "a random stream"),
        ("registered/ema/w", "a registered tensor"),
        ("not/there", "nothing"),
    ],
)
def test_an_index_that_refers_to_another_ones_tensor_is_refused(name: str, victim: str) -> None:
    """Else what it belongs to would silently not be restored."""
    model, optimizer, state, spans = subject()
    index = copy.deepcopy(state.index)
    for member in index["optimizers"][0]["groups"][0]["members"]:
        if member["parameter"] == "first.weight":
            member["state"][""]["signs"]["tensor"] = name
    before = everything(model, optimizer)
    with pytest.raises(FormatError, match=f"refers to tensor '{name}'"):
        plan_restore(index, spans, describe([model], optimizer), streams(), Registered(REGISTERED))
    assert everything(model, optimizer) == before


def test_a_tensor_that_nothing_refers_to_is_refused() -> None:
    model, optimizer, state, spans = subject()
    index = copy.deepcopy(state.index)
    for member in index["optimizers"][0]["groups"][0]["members"]:
        member["state"][""].pop("signs", None)
    with pytest.raises(FormatError, match="nothing in it refers to"):
        plan_restore(index, spans, describe([model], optimizer), streams(), Registered(REGISTERED))


# --- what cannot be stored -------------------------------------------------------------------------------------------


def test_two_tensors_under_one_name_are_refused() -> None:
    """Else one of them would silently not be stored."""
    model = nn.Module()
    model.add_module("a", WithExtraState())
    model.add_module("a/b", WithExtraState())
    model.get_submodule("a").extra = {"b/c": torch.zeros(1)}
    model.get_submodule("a/b").extra = {"c": torch.zeros(1)}
    with pytest.raises(UnsupportedError, match=r"would both be stored as extra_state/chunk0\.a/b/c"):
        capture(describe([model], None), None, Registered({}))


def test_a_buffer_that_cannot_be_stored_is_named() -> None:
    model = Net()
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="buffer/chunk0.phases has dtype torch.complex64"):
        capture(describe([model], None), None, Registered({}))
