"""Names and back: what we write we recognise, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.store import layout

NUMBERS = st.integers(0, 10**12)


def test_names_are_as_specified() -> None:
    assert layout.step_directory(1200) == "step-00001200"
    assert layout.step_directory(1234567890) == "step-1234567890"
    assert layout.staging_directory(1200, 3) == ".staging-step-00001200-a000003"
    assert layout.aside_directory(1200, 3) == "step-00001200.a0003"
    assert layout.attempt_file(7) == "000007.json"


@settings(deadline=None)
@given(step=NUMBERS, attempt=NUMBERS)
def test_what_is_written_is_recognised(step: int, attempt: int) -> None:
    assert layout.parse_step_directory(layout.step_directory(step)) == step
    assert layout.parse_staging_directory(layout.staging_directory(step, attempt)) == (step, attempt)
    assert layout.parse_aside_directory(layout.aside_directory(step, attempt)) == (step, attempt)
    assert layout.parse_attempt_file(layout.attempt_file(attempt)) == attempt


@settings(deadline=None)
@given(name=st.text(alphabet="step-.aging0123456789_json", max_size=32) | st.text(max_size=32))
def test_a_name_is_recognised_only_as_written(name: str) -> None:
    step = layout.parse_step_directory(name)
    assert step is None or layout.step_directory(step) == name
    pair = layout.parse_staging_directory(name)
    assert pair is None or layout.staging_directory(*pair) == name
    attempt = layout.parse_attempt_file(name)
    assert attempt is None or layout.attempt_file(attempt) == name
    kinds = (step, pair, layout.parse_aside_directory(name), attempt)
    assert sum(kind is not None for kind in kinds) <= 1, "one name is one kind of thing"


@pytest.mark.parametrize(
    "name",
    [
        "step-1200",
        "step-000001200",
        "step-0000120x",
        "step-00001200 ",
        "step-00001200\n",
        "step-٠٠٠٠١٢٠٠",
        "step--0001200",
        "Step-00001200",
        "iter_0001200",
        "checkpoint-1200",
        ".trash-step-00001200",
        "step-00001200.tmp",
        "step-" + "9" * 19,
        "step-" + "9" * 100_000,
        "",
    ],
)
def test_foreign_names_are_no_steps(name: str) -> None:
    assert layout.parse_step_directory(name) is None
    assert layout.parse_staging_directory(name) is None
    assert layout.parse_aside_directory(name) is None
    assert layout.parse_attempt_file(name) is None


@pytest.mark.parametrize(
    "name", ["step-00001200.a0003.1", "step-00001200.a0003.02", "step-00001200.a3", "step-1.a0001"]
)
def test_foreign_names_are_nothing_renamed_aside(name: str) -> None:
    assert layout.parse_aside_directory(name) is None


def test_what_is_renamed_aside_takes_no_name_twice() -> None:
    taken: list[str] = []
    for _ in range(4):
        taken.append(layout.aside_directory(1200, 3, taken))
    assert taken == ["step-00001200.a0003", *(f"step-00001200.a0003.{copy}" for copy in (2, 3, 4))]
    assert {layout.parse_aside_directory(name) for name in taken} == {(1200, 3)}


def test_a06_order_is_that_of_numbers() -> None:
    steps = [200, 1000, 9000, 10_000, 99_999_999, 100_000_000]
    names = sorted(layout.step_directory(step) for step in steps)
    assert sorted(filter(None, map(layout.parse_step_directory, names))) == steps
    assert max(names) != layout.step_directory(steps[-1]), "the order of strings is another one from nine digits on"
