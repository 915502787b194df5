"""What need not be written: decided by the bytes, undone exactly by a restore."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megaresume.errors import FormatError
from megaresume.megatron.live import describe
from megaresume.state.description import Live, Optimizer, OptimizerGroup, OptimizerMember
from megaresume.state.economy import Economy, leave_out, sources_in
from megaresume.state.rank_state import capture, plan_restore
from megaresume.state.registered import Registered
from megaresume.state.tensors import dtype_code, host_bytes, sink_rounding_into
from megaresume.store.manifest import Reference
from megaresume.store.shard import Entry, read_header, stream_tensors, write_shard
from tests.store.shards import IDENTITY

WRITTEN = Reference(step=5, attempt=2, name="tp00-pp00-dp00.safetensors", size=10, header_digest="0" * 32)


class Net(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(40, 30).to(dtype)
        self.second = torch.nn.Linear(30, 7).to(dtype)
        self.frozen = torch.nn.Linear(50, 40).to(dtype)
        self.frozen.requires_grad_(False)


def with_masters(model: Net, *, second_half: bool = False) -> Live:
    """As an optimizer with fp32 masters holds it; of the first weight perhaps only the second half."""
    live = describe([model], None)
    members = []
    for name, parameter in live.parameters.items():
        if parameter.trainable:
            start = parameter.tensor.numel() // 2 if second_half and name == "first.weight" else 0
            master = parameter.tensor.detach().reshape(-1)[start:].float()
            # What rounds to the weight and is not the weight: a master that has moved by less than the weight can show.
            master = torch.where(master == 0, master, master * (1 + 2.0**-12))
            members.append(OptimizerMember(name, start, parameter.tensor.numel(), master, master))
    state: dict[Any, dict[str, Any]] = {member.key: {"exp_avg": torch.rand_like(member.key)} for member in members}
    optimizer = Optimizer("Adam", (OptimizerGroup({"lr": 0.1}, tuple(members)),), {"": state}, None)
    shares = {"first.weight": (members[0].start, members[0].end)} if second_half else {}
    return dataclasses.replace(live, optimizers=(optimizer,), shares=shares)


def sorted_out(live: Live, known: Any = None) -> Economy:
    state = capture(live, None, Registered({}))
    tensors = sorted(state.tensors.items(), key=lambda item: -item[1].element_size())
    entries = [Entry(name, dtype_code(t.dtype, name), tuple(t.shape), host_bytes(t)) for name, t in tensors]
    return leave_out(entries, state.index, known or {})


def kinds(economy: Economy) -> dict[str, str]:
    weights = {name: entry for name, entry in economy.index["tensors"].items() if entry["slot"] == "weight"}
    return {name.removeprefix("model/"): entry["kind"] for name, entry in weights.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_are_their_rounded_masters_are_left_out(dtype: torch.dtype) -> None:
    economy = sorted_out(with_masters(Net(dtype)))
    assert kinds(economy) == {
        **dict.fromkeys(("first.weight", "first.bias", "second.weight", "second.bias"), "derived"),
        **dict.fromkeys(("frozen.weight", "frozen.bias"), "stored"),
    }
    written = {entry.name for entry in economy.entries}
    assert "model/first.weight" not in written and "model/frozen.weight" in written


@pytest.mark.parametrize("change", ["one bit", "a zero's sign"])
def test_a_weight_that_differs_in_one_bit_is_stored(change: str) -> None:
    model = Net(torch.bfloat16)
    with torch.no_grad():
        model.second.weight[3, 4] = 0.0
    live = with_masters(model)
    raw = model.second.weight.detach().view(torch.int16).view(-1)
    raw[3 * 30 + 4 if change == "a zero's sign" else 17] ^= -(2**15) if change == "a zero's sign" else 1
    economy = sorted_out(live)
    stored = {name for name, kind in kinds(economy).items() if kind == "stored"}
    assert stored == {"frozen.bias", "frozen.weight", "second.weight"}


def test_fp32_weights_are_stored() -> None:
    live = with_masters(Net(torch.float32))
    assert set(kinds(sorted_out(live)).values()) == {"stored"}


def write_and_read(tmp_path: Path, economy: Economy, live: Live, **options: bool) -> None:
    path = tmp_path / "x.safetensors"
    write_shard(path, economy.entries, identity=IDENTITY, index=economy.index)
    header = read_header(path)
    plan = plan_restore(header.index, header.tensors, live, None, Registered({}), **options)
    stream_tensors(path, header, plan.targets())
    plan.complete()
    plan.install()


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("second_half", [False, True])
def test_a_restore_rounds_them_back_bit_for_bit(weights_only: bool, second_half: bool, tmp_path: Path) -> None:
    saved, fresh = Net(torch.bfloat16), Net(torch.bfloat16)
    economy = sorted_out(with_masters(saved, second_half=second_half))
    live = with_masters(fresh, second_half=second_half)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.fill_(9.0)
    write_and_read(tmp_path, economy, live, weights_only=weights_only)
    half = fresh.first.weight.numel() // 2 if second_half else 0
    for (name, one), two in zip(saved.named_parameters(), fresh.parameters(), strict=True):
        begin = half if name == "first.weight" else 0
        assert torch.equal(one.view(-1)[begin:].view(torch.int16), two.view(-1)[begin:].view(torch.int16)), name
    assert (fresh.first.weight.view(-1)[:half] == 9.0).all(), "another rank's part is another rank's"


def test_rounding_while_reading_goes_by_pieces_of_any_length() -> None:
    full = torch.randn(1000)
    weight = torch.zeros(500, dtype=torch.bfloat16)
    sink = sink_rounding_into([(weight, 300)])
    data = host_bytes(full)
    for begin in range(0, 4000, 52):
        sink(begin, data[begin : begin + 52])
    assert torch.equal(weight, full[300:800].bfloat16())
    with pytest.raises(FormatError, match="multiple"):
        sink(2, data[2:6])


# --- frozen weights ---------------------------------------------------------------------------------------------------


def test_frozen_weights_are_written_once() -> None:
    model = Net(torch.bfloat16)
    first = sorted_out(with_masters(model))
    known = sources_in(first.index, WRITTEN)
    second = sorted_out(with_masters(model), known)
    assert {name for name, kind in kinds(second).items() if kind == "referenced"} == {"frozen.weight", "frozen.bias"}
    entry = second.index["tensors"]["model/frozen.weight"]
    assert entry["from"] == {"step": 5, "attempt": 2, "file": WRITTEN.name, "tensor": "model/frozen.weight"}
    assert {source.reference for source in second.sources} == {WRITTEN}
    assert sources_in(second.index, dataclasses.replace(WRITTEN, step=6), [WRITTEN]) == known, "it lies where it lay"


def test_frozen_weights_that_changed_all_the_same_are_written_again() -> None:
    model = Net(torch.bfloat16)
    known = sources_in(sorted_out(with_masters(model)).index, WRITTEN)
    model.frozen.weight.data[3, 3] += 1  # `.data` tells nobody
    assert kinds(sorted_out(with_masters(model), known))["frozen.weight"] == "stored"
    assert kinds(sorted_out(with_masters(model), known))["frozen.bias"] == "referenced"


def test_weights_that_are_trained_now_are_not_referred_to() -> None:
    model = Net(torch.bfloat16)
    known = sources_in(sorted_out(with_masters(model)).index, WRITTEN)
    model.frozen.requires_grad_(True)
    live = with_masters(model)
    assert "referenced" not in kinds(sorted_out(live, known)).values()


# --- hostile indexes --------------------------------------------------------------------------------------------------

W = "model/first.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"from": "model/frozen.weight"}, "no stored master"),
        ({"from": "nowhere"}, "no stored master"),
        ({"from": W}, "no stored master"),
        ({"from": "optim/0/master/second.weight"}, "no stored master"),
        ({"from": 3}, "expected text"),
        ({"range": [0, 5000]}, "from a master that has the elements"),
        ({"range": None}, "from a master that has the elements"),
        ({"kind": "stored"}, "does not hold"),
        ({"kind": "referenced", "digest": "x", "from": {"step": -1, "attempt": 1, "file": "f", "tensor": "t"}}, "step"),
        ({"kind": "referenced", "digest": "x", "from": "y"}, "expected an object"),
        ({"kind": "stolen"}, "stored or derived or referenced"),
    ],
)
def test_an_index_that_derives_from_the_wrong_thing_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model = Net(torch.bfloat16)
    economy = sorted_out(with_masters(model))
    path = tmp_path / "x.safetensors"
    write_shard(path, economy.entries, identity=IDENTITY, index=economy.index)
    header = read_header(path)
    index = copy.deepcopy(header.index)
    index["tensors"][W] |= change
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(FormatError, match=words):
        plan_restore(index, header.tensors, with_masters(model), None, Registered({}))
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def test_a_master_whose_numbers_are_cut_by_chunks_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    model = Net(torch.bfloat16)
    economy = sorted_out(with_masters(model))
    path = tmp_path / "x.safetensors"
    write_shard(path, economy.entries, identity=IDENTITY, index=economy.index)
    header = read_header(path)
    master = header.index["tensors"][W]["from"]
    span = header.tensors[master]
    spans = {**header.tensors, master: dataclasses.replace(span, begin=span.begin + 2, end=span.end + 2)}
    with pytest.raises(FormatError, match="multiple of 4 bytes"):
        plan_restore(header.index, spans, with_masters(model), None, Registered({}))
