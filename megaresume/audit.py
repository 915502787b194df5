"""The replay audit: are the steps trained again after a resume the steps that were trained before?

Pure comparison of log lines, bit for bit. It does not choose the lines (`store/lineage.py` does) and does not act on
the verdict. "Nothing to compare" is a verdict of its own and never a success.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megaresume.store.steplog import StepLine

Verdict: TypeAlias = Literal["equal", "within tolerance", "diverged", "nothing to compare"]

DEFAULT_TOLERANCE = (
    1e-3  # relative: what other kernels or another reduction order do to a loss within some hundred steps
)
_FLOATS = ("loss", "grad_norm", "lr")


@dataclass(frozen=True)
class FieldDifference:
    """One value of a step that is not the same number. Floats are given as they were; their hex forms differ."""

    field: str
    replayed: float | int
    reference: float | int


@dataclass(frozen=True)
class StepComparison:
    """One replayed step beside its line in the log of `reference_attempt` (None where there is none)."""

    step: int
    reference_attempt: int | None
    verdict: Verdict
    differences: tuple[FieldDifference, ...] = ()

    def __str__(self) -> str:
        if self.reference_attempt is None:
            return f"step {self.step}: nothing to compare"
        fields = ", ".join(f"{d.field} {d.replayed!r} where it was {d.reference!r}" for d in self.differences)
        return f"step {self.step} against attempt {self.reference_attempt}: {self.verdict}" + (
            f" ({fields})" if fields else ""
        )


@dataclass(frozen=True)
class Audit:
    """The verdict over all replayed steps. `first` is the worst verdict's first step, None unless some step differs."""

    verdict: Verdict
    compared: int
    equal: int
    first: StepComparison | None
    summary: str


def compare_step(
    replayed: StepLine, reference: StepLine | None, *, tolerance: float = DEFAULT_TOLERANCE
) -> StepComparison:
    """Compare one step. `tolerance` is relative, and for floats only: another number of consumed samples is divergence.

    A value that either side did not log is not compared; a step without loss and gradient norm on both sides is none.
    """
    if reference is None:
        return StepComparison(replayed.step, None, "nothing to compare")
    assert replayed.step == reference.step, "lines of different steps"
    differences: list[FieldDifference] = []
    verdict: Verdict = "nothing to compare"
    for field in _FLOATS:
        ours, theirs = getattr(replayed, field), getattr(reference, field)
        if ours is None or theirs is None:
            continue
        if verdict == "nothing to compare" and field != "lr":
            verdict = "equal"
        if ours.hex() != theirs.hex():
            differences.append(FieldDifference(field, ours, theirs))
    if verdict == "nothing to compare":
        return StepComparison(replayed.step, reference.attempt, verdict)
    near = all(math.isclose(d.replayed, d.reference, rel_tol=tolerance) for d in differences)
    ours, theirs = replayed.consumed_train_samples, reference.consumed_train_samples
    if ours is not None and theirs is not None and ours != theirs:
        differences.append(FieldDifference("consumed_train_samples", ours, theirs))
        near = False
    if differences:
        verdict = "within tolerance" if near else "diverged"
    return StepComparison(replayed.step, reference.attempt, verdict, tuple(differences))


def audit(
    replayed: Iterable[StepLine], reference: Mapping[int, StepLine], *, tolerance: float = DEFAULT_TOLERANCE
) -> Audit:
    """Compare every replayed step that has a reference line (by step), and say the outcome in one line."""
    steps = [compare_step(line, reference.get(line.step), tolerance=tolerance) for line in replayed]
    compared = [step for step in steps if step.verdict != "nothing to compare"]
    equal = sum(step.verdict == "equal" for step in compared)
    for verdict in ("diverged", "within tolerance"):
        first = next((step for step in compared if step.verdict == verdict), None)
        if first is not None:
            break
    if not compared:
        return Audit(
            "nothing to compare",
            0,
            0,
            None,
            "nothing to compare: no replayed step has a line in the log of the run before",
        )
    match = f"{equal} of {len(compared)} replayed steps match bit for bit"
    if first is None:
        return Audit("equal", len(compared), equal, None, match)
    if first.verdict == "diverged":
        return Audit("diverged", len(compared), equal, first, f"{match}; {first}")
    return Audit(
        "within tolerance", len(compared), equal, first, f"{match}, the others within {tolerance:g}; first {first}"
    )
