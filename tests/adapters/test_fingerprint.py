"""The base's fingerprint: equal for the same base however it is cut, another one for any changed number."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megaresume.adapters import fingerprint
from megaresume.adapters.fingerprint import base_fingerprint
from megaresume.errors import StateMismatchError
from megaresume.state.description import Chunk, Parameter, ReplicaGroup
from megaresume.store.control import ControlPlane

WHOLE = torch.arange(24, dtype=torch.float32).reshape(6, 4).sin()


def part(tensor: torch.Tensor, *boxes: tuple[int, tuple[int, ...]], name: str = "w") -> Parameter:
    """A local tensor whose rows lie at the given global rows: (first local row, global offset) per chunk."""
    rows = [first for first, _ in boxes] + [tensor.shape[0]]
    chunks = tuple(
        Chunk(first * 4, (rows[number + 1] - first, 4), (4, 1), offset) for number, (first, offset) in enumerate(boxes)
    )
    return Parameter(name, tensor, (6, 4), chunks, "dense", False)


def of(*ranks: dict[str, Parameter]) -> str:
    """The fingerprint over ranks that hold these, joined as rank 0 joins them."""
    replicas = {"dense": ReplicaGroup(0, 1, None)}
    shares = []

    class Listening(ControlPlane):
        def decide(self, what, function):  # type: ignore[no-untyped-def]
            shares.append(self.answers)
            return super().decide(what, function)

        def together(self, what, function, *, undo=None):  # type: ignore[no-untyped-def]
            self.answers = super().together(what, function)
            return self.answers

    for parameters in ranks:
        base_fingerprint(parameters, replicas, Listening(dist.HashStore(), 0, 1))
    return fingerprint._join([share[0] for share in shares])


def test_the_same_base_in_every_topology() -> None:
    whole = of({"w": part(WHOLE, (0, (0, 0)))})
    halves = of(
        {"w": part(WHOLE[:3].clone(), (0, (0, 0)))},
        {"w": part(WHOLE[3:].clone(), (0, (3, 0)))},
    )
    gated = of(
        {"w": part(torch.cat([WHOLE[0:2], WHOLE[3:4]]), (0, (0, 0)), (2, (3, 0)))},
        {"w": part(torch.cat([WHOLE[2:3], WHOLE[4:6]]), (0, (2, 0)), (1, (4, 0)))},
    )
    copies = of({"w": part(WHOLE, (0, (0, 0)))}, {"w": part(WHOLE.clone(), (0, (0, 0)))})
    assert whole == halves == gated == copies


def test_rounds_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = of({"w": part(WHOLE, (0, (0, 0)))})
    monkeypatch.setattr(fingerprint, "_ROUND", 4)
    assert of({"w": part(WHOLE, (0, (0, 0)))}) == whole


def test_any_other_base_has_another() -> None:
    base = of({"w": part(WHOLE, (0, (0, 0)))})
    seen = {base}
    for change in (
        WHOLE.flip(0),
        WHOLE.to(torch.bfloat16),
        torch.cat([WHOLE[:5], WHOLE[5:] + 1e-7]),
        WHOLE.clone().index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(1e-30)),
    ):
        seen.add(of({"w": part(change.contiguous(), (0, (0, 0)))}))
    seen.add(of({"v": part(WHOLE, (0, (0, 0)), name="v")}))
    assert len(seen) == 6


def test_scalars_vectors_and_empty_parts_count() -> None:
    scalar = Parameter("s", torch.tensor(2.0), (), (Chunk(0, (), (), ()),), "dense", False)
    empty = Parameter("e", torch.empty(0, 4), (0, 4), (Chunk(0, (0, 4), (4, 1), (0, 0)),), "dense", False)
    assert of({"s": scalar, "e": empty}) != of({"s": scalar})


def test_copies_that_differ_are_named() -> None:
    with pytest.raises(StateMismatchError, match=r"w: rank 1 holds other values at \[0, 0\]"):
        of({"w": part(WHOLE, (0, (0, 0)))}, {"w": part(WHOLE + 1, (0, (0, 0)))})
