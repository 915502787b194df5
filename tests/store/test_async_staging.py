"""Copies of the state in memory that is kept: right, aligned, reused; and on an accelerator, in the right order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megaresume.state import staging as module
from megaresume.state.staging import Staging


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "model/w": random(7, 3).bfloat16(),
        "model/strided": random(6, 8)[:, ::2],
        "optim/0/exp_avg/w": random(21),
        "model/none": random(0, 4),
        "optim/0/step/w": torch.tensor(3.0),
        "flag": torch.tensor([True, False, True]),
        "double": random(5).double(),
    }


def test_copies_keep_their_values_when_the_tensors_change() -> None:
    live, staging = tensors(), Staging()
    expected = {name: tensor.clone() for name, tensor in live.items()}
    staged = staging.copy(live, settled=lambda _: False)
    for tensor in live.values():
        tensor.zero_()
    staged.wait()
    assert list(staged.copies) == list(live)
    for name, copy in staged.copies.items():
        assert copy.is_contiguous() and copy.dtype == live[name].dtype
        assert torch.equal(copy, expected[name])


def test_the_memory_is_as_large_as_the_state_and_kept() -> None:
    live, staging = tensors(), Staging()
    first = staging.copy(live, settled=lambda _: False)
    addresses = {name: copy.data_ptr() for name, copy in first.copies.items()}
    held = staging.size
    assert held <= sum(tensor.nbytes + 7 for tensor in live.values())
    second = staging.copy(tensors(1), settled=lambda _: False)
    assert {name: copy.data_ptr() for name, copy in second.copies.items()} == addresses
    assert staging.size == held


def test_tensors_of_another_form_under_the_same_names_get_copies_of_that_form() -> None:
    staging = Staging()
    for live in ({"a": torch.zeros(8), "b": torch.ones(4)}, {"a": torch.ones(2, 3), "b": torch.arange(3).short()}):
        copies = staging.copy(live, settled=lambda _: False).copies
        for name, tensor in live.items():
            assert copies[name].dtype == tensor.dtype and torch.equal(copies[name], tensor)


def test_memory_made_ready_is_used_and_a_larger_state_still_fits() -> None:
    staging = Staging()
    staging.prepare(list(tensors().values()))
    staged = staging.copy(tensors(), settled=lambda _: False)
    assert torch.equal(staged.copies["double"], tensors()["double"])
    grown = {**tensors(), "more": torch.arange(1000)}
    assert torch.equal(staging.copy(grown, settled=lambda _: False).copies["more"], torch.arange(1000))


class Log(list[tuple[Any, ...]]):
    """What a recording stand-in for `torch.cuda` was asked to do, in order."""


class FakeCuda:
    def __init__(self, log: Log) -> None:
        self.log, self.streams = log, ["training"]

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self.streams[-1])

    def Stream(self) -> FakeStream:
        return FakeStream(self, "side")

    def Event(self) -> FakeEvent:
        return FakeEvent(self.log)

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append((self.name, "waits for stream", other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append((self.name, "waits for event of", event.of))


class FakeEvent:
    def __init__(self, log: Log) -> None:
        self.log, self.of = log, ""

    def record(self, stream: FakeStream) -> None:
        self.of = stream.name
        self.log.append((stream.name, "records"))

    def synchronize(self) -> None:
        self.log.append(("host", "waits for event of", self.of))


def test_on_an_accelerator_the_optimizers_step_waits_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    cuda = FakeCuda(log)
    usual = torch.Tensor.copy_

    def recorded(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        log.append((cuda.streams[-1], "copies", source.numel()))
        return usual(target, source)

    monkeypatch.setattr(module.torch, "cuda", cuda)
    monkeypatch.setattr(module.torch.Tensor, "copy_", recorded)
    monkeypatch.setattr(module, "_on_accelerator", lambda _: True)
    monkeypatch.setattr(module, "_reserve", lambda size, pinned: torch.empty(size if pinned else -1, dtype=torch.uint8))
    live = {"model/w": torch.ones(2), "optim/0/exp_avg/w": torch.ones(3), "buffer/b": torch.ones(4)}
    staging = Staging()
    staged = staging.copy(live, settled=lambda name: name.startswith("optim/"))
    assert log == [
        ("training", "copies", 2),
        ("training", "copies", 4),
        ("training", "records"),
        ("side", "waits for stream", "training"),
        ("side", "copies", 3),
        ("side", "records"),
    ]
    log.clear()
    staging.fence()
    staging.fence()
    assert log == [("training", "waits for event of", "side")], "once per save, and without stopping the host"
    log.clear()
    staged.wait()
    assert log == [("host", "waits for event of", "training"), ("host", "waits for event of", "side")]
