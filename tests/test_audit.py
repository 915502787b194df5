"""The replay audit's four verdicts, and that "nothing to compare" is never a success."""

from __future__ import annotations

import math

import pytest

from megaresume.audit import audit, compare_step
from megaresume.store.steplog import StepLine


def line(step: int, loss: float | None = 2.5, *, attempt: int = 2, **more: float) -> StepLine:
    fields = {"grad_norm": 0.5, "lr": 1e-4, "consumed_train_samples": step * 8, **more}
    return StepLine(attempt, step, loss, **fields)  # type: ignore[arg-type]


def reference(*lines: StepLine) -> dict[int, StepLine]:
    return {one.step: one for one in lines}


def test_equal_is_bit_for_bit_and_says_how_many() -> None:
    steps = range(101, 135)
    outcome = audit([line(step) for step in steps], reference(*(line(step, attempt=1) for step in steps)))
    assert outcome.verdict == "equal" and outcome.first is None
    assert outcome.summary == "34 of 34 replayed steps match bit for bit"


@pytest.mark.parametrize("field", ["loss", "grad_norm", "lr"])
def test_one_bit_in_any_float_is_not_equal(field: str) -> None:
    before = line(101, attempt=1)
    value = getattr(before, field)
    after = StepLine(2, 101, **{**_values(before), field: math.nextafter(value, 9.0)})
    outcome = audit([line(100), after], reference(line(100, attempt=1), before))
    assert outcome.verdict == "within tolerance"
    assert (outcome.equal, outcome.compared) == (1, 2)
    assert outcome.first is not None and outcome.first.step == 101
    assert "1 of 2 replayed steps match bit for bit" in outcome.summary and field in outcome.summary


@pytest.mark.parametrize("field", ["loss", "grad_norm", "lr"])
def test_a_value_beyond_the_tolerance_is_divergence_and_is_named(field: str) -> None:
    before = line(101, attempt=1)
    value = getattr(before, field)
    after = StepLine(2, 101, **{**_values(before), field: value * 1.01})
    outcome = audit([after], reference(before))
    assert outcome.verdict == "diverged"
    assert f"step 101 against attempt 1: diverged ({field} {value * 1.01!r} where it was {value!r})" in outcome.summary
    assert audit([after], reference(before), tolerance=0.1).verdict == "within tolerance"


def _values(one: StepLine) -> dict[str, float]:
    return {name: getattr(one, name) for name in ("loss", "grad_norm", "lr", "consumed_train_samples")}


def test_another_number_of_consumed_samples_is_divergence_at_any_tolerance() -> None:
    outcome = audit([line(101, consumed_train_samples=816)], reference(line(101, attempt=1)), tolerance=1e9)
    assert outcome.verdict == "diverged" and "consumed_train_samples 816 where it was 808" in outcome.summary


def test_the_first_diverging_step_is_named_even_behind_a_near_one() -> None:
    before = [line(101, attempt=1), line(102, attempt=1), line(103, attempt=1)]
    outcome = audit([line(101, 2.5001), line(102, 9.0), line(103, 9.0)], reference(*before))
    assert outcome.verdict == "diverged" and outcome.first is not None and outcome.first.step == 102


def test_nan_and_infinity_are_equal_to_themselves_only() -> None:
    nan, inf = float("nan"), float("inf")
    assert compare_step(line(1, nan), line(1, nan, attempt=1)).verdict == "equal"
    assert compare_step(line(1, inf), line(1, inf, attempt=1)).verdict == "equal"
    for ours, theirs in ((nan, 2.5), (2.5, nan), (inf, 2.5), (inf, -inf)):
        assert compare_step(line(1, ours), line(1, theirs, attempt=1)).verdict == "diverged"
    assert compare_step(line(1, -0.0), line(1, 0.0, attempt=1)).verdict == "within tolerance"


@pytest.mark.parametrize(
    "before",
    [
        {},
        {101: line(101, None, attempt=1, grad_norm=None)},  # type: ignore[arg-type]
    ],
)
def test_nothing_to_compare_is_a_verdict_of_its_own(before: dict[int, StepLine]) -> None:
    outcome = audit([line(101)], before)
    assert outcome.verdict == "nothing to compare" and outcome.compared == outcome.equal == 0
    assert "match" not in outcome.summary
    assert audit([], {}).verdict == "nothing to compare"


def test_a_value_that_one_side_did_not_log_is_not_compared() -> None:
    assert compare_step(line(1), line(1, attempt=1, grad_norm=None)).verdict == "equal"  # type: ignore[arg-type]
    assert compare_step(line(1, 3.0), line(1, 2.0, attempt=1, grad_norm=None)).verdict == "diverged"  # type: ignore[arg-type]
