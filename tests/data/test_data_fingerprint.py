"""The fingerprint notices other data, and not other circumstances."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megaresume.data import dataset_fingerprint


class Samples(list[Any]):
    """A list is a map-style dataset."""


def test_the_same_data_has_the_same_fingerprint_and_other_data_another(tmp_path: Path) -> None:
    def files(*names: str) -> list[Path]:
        for name in names:
            (tmp_path / name).write_bytes(b"x" * len(name))
        return [tmp_path / name for name in names]

    rows = [{"ids": torch.arange(n, dtype=torch.int64), "w": np.float32(n), "text": "x"} for n in range(1, 10)]
    base = dataset_fingerprint(rows, name="a", files=files("b.bin", "aa.bin"))
    assert json.loads(json.dumps(base)) == base
    assert base == dataset_fingerprint(list(rows), name="a", files=[tmp_path / "b.bin", str(tmp_path / "aa.bin")])
    others = [
        dataset_fingerprint(rows, name="b", files=files("b.bin", "aa.bin")),
        dataset_fingerprint(rows, name="a", files=files("aa.bin", "b.bin")),
        dataset_fingerprint(rows[::-1], name="a", files=files("b.bin", "aa.bin")),
        dataset_fingerprint(rows[:-1], name="a", files=files("b.bin", "aa.bin")),
        dataset_fingerprint([{**row, "text": "y"} for row in rows], name="a", files=files("b.bin", "aa.bin")),
    ]
    assert all(other != base for other in others)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ("1", b"1"),
        ([1, 2], [12]),
        (["ab", "c"], ["a", "bc"]),
        ({"a": 1}, {"a": 2}),
        (np.zeros(2, "f4"), np.zeros(2, "i4")),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)),
    ],
)
def test_samples_that_look_alike_are_told_apart(one: Any, other: Any) -> None:
    assert dataset_fingerprint([one])["samples"] != dataset_fingerprint([other])["samples"]


def test_samples_that_tell_nothing_are_left_out_aloud(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(Samples):
        def __getitem__(self, index: Any) -> Any:
            return {1: torch.rand(3), 2: object()}.get(index, index)

    random.seed(3), torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state()
    with caplog.at_level(logging.INFO, "megaresume.data"):
        fingerprint = dataset_fingerprint(Noisy(range(3)))
    assert list(fingerprint["samples"]) == ["0"]
    assert "sample 1 is left out: it reads differently twice" in caplog.text
    assert "sample 2 is left out: a object has no canonical bytes" in caplog.text
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_an_indexed_dataset_tells_its_own_hash_and_few_samples_are_read() -> None:
    class Indexed(Samples):
        unique_description_hash = "c0ffee"
        reads: tuple[int, ...] = ()

        def __getitem__(self, index: Any) -> Any:
            self.reads = (*self.reads, index)
            return index

    dataset = Indexed(range(1000))
    fingerprint = dataset_fingerprint(dataset, samples=3)
    assert fingerprint["description"] == "c0ffee" and fingerprint["length"] == 1000
    assert dataset.reads == (0, 0, 499, 499, 999, 999)
    assert dataset_fingerprint(Indexed(range(1000)), samples=0)["samples"] == {}
