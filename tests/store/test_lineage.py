"""Which checkpoints are on the branch, and which log lines a replay is compared with, against a model of the truth."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaresume.store.attempts import Attempt
from megaresume.store.lineage import on_branch, replay_reference


def started(
    number: int, resumed_from: tuple[int, int] | None = None, *, start: int | None = None, changes: tuple[str, ...] = ()
) -> Attempt:
    step = start if start is not None else resumed_from[1] if resumed_from else 0
    return Attempt(number, step, resumed_from, "host", 1, None, None, "2026-01-01T00:00:00+00:00", "r", changes)


def branch(attempts: list[Attempt], *checkpoints: tuple[int, int]) -> list[tuple[int, int]]:
    return [checkpoint for checkpoint in checkpoints if on_branch(*checkpoint, attempts)]


def test_a_crash_and_a_resume_keep_what_was_committed_up_to_the_resume() -> None:
    attempts = [started(1), started(2, (1, 200))]
    assert branch(attempts, (1, 100), (1, 200), (1, 300), (2, 300)) == [(1, 100), (1, 200), (2, 300)]


def test_a_run_that_went_back_never_again_picks_the_abandoned_branch() -> None:
    attempts = [started(1), started(2, (1, 1200)), started(3, (1, 1000))]
    assert branch(attempts, (1, 1000), (1, 1200), (2, 1400), (3, 1100)) == [(1, 1000), (3, 1100)]
    attempts.append(started(4, (3, 1100)))
    assert branch(attempts, (1, 1000), (1, 1200), (2, 1400), (3, 1100), (3, 1200)) == [(1, 1000), (3, 1100)]


def test_an_orphans_late_commit_is_off_the_branch() -> None:
    assert branch([started(1), started(2, (1, 200))], (1, 300)) == []


def test_going_on_from_an_abandoned_checkpoint_makes_its_branch_the_branch_again() -> None:
    attempts = [started(1), started(2, (1, 100)), started(3, (1, 200))]
    assert branch(attempts, (1, 100), (1, 200), (2, 150), (2, 250)) == [(1, 100), (1, 200)]


def test_a_fresh_start_and_a_start_from_weights_alone_begin_a_history_of_their_own() -> None:
    assert branch([started(1), started(2)], (1, 0), (1, 100), (2, 50)) == [(2, 50)]
    assert branch([started(1), started(2, (1, 100), start=0, changes=("weights_only",))], (1, 0), (1, 100), (2, 5)) == [
        (2, 5)
    ]


def test_without_records_every_checkpoint_is_on_the_branch() -> None:
    assert branch([], (7, 200), (3, 100)) == [(7, 200), (3, 100)]


def test_before_a_missing_record_the_start_steps_of_later_attempts_decide() -> None:
    attempts = [started(1), started(3, (2, 150)), started(4, (3, 180))]  # 2 is lost; it had resumed from (1, 100)
    assert branch(attempts, (1, 100), (1, 160), (2, 150), (2, 170), (3, 180), (4, 200)) == [
        (1, 100),
        (2, 150),
        (3, 180),
        (4, 200),
    ]


@pytest.mark.parametrize("parent", [2, 3])
def test_records_that_point_forward_or_at_themselves_do_not_hang(parent: int) -> None:
    attempts = [started(1), started(2, (parent, 100))]
    assert not on_branch(1, 200, attempts)
    assert replay_reference([*attempts, started(4, (1, 100))], started(4, (1, 100)), [(2, 101), (1, 101)]) == {101: 1}


# --- against the truth ----------------------------------------------------------------------------------------------


@dataclass
class World:
    """Attempts that commit every tenth step; `history` has, for each, every (attempt, step) state it went through."""

    attempts: list[Attempt] = field(default_factory=list)
    history: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    commits: list[tuple[int, int]] = field(default_factory=list)
    lines: list[tuple[int, int]] = field(default_factory=list)

    def start(self, resumed_from: tuple[int, int] | None, steps: int) -> None:
        number = len(self.attempts) + 1
        record = started(number, resumed_from)
        before: list[tuple[int, int]] = []
        if resumed_from:
            parent = self.history[resumed_from[0]]
            before = parent[: parent.index(resumed_from) + 1]
        own = [(number, step) for step in range(record.start_step + 1, record.start_step + steps + 1)]
        self.attempts.append(record)
        self.history[number] = before + own
        self.commits += [state for state in own if state[1] % 10 == 0]
        self.lines += own


@st.composite
def worlds(draw: st.DrawFn, *, only_on_branch: bool = False) -> World:
    world = World()
    for _ in range(draw(st.integers(1, 6))):
        choices = world.commits
        if only_on_branch and world.attempts:
            newest = world.history[len(world.attempts)]
            choices = [commit for commit in world.commits if commit in newest]
        pick = draw(st.integers(-1, len(choices) - 1))
        if only_on_branch and choices:
            pick = max(pick, 0)
        world.start(choices[pick] if pick >= 0 else None, draw(st.integers(0, 35)))
    return world


@given(worlds())
def test_on_branch_is_exactly_the_history_of_the_newest_attempt(world: World) -> None:
    newest = world.history[len(world.attempts)]
    for commit in world.commits:
        assert on_branch(*commit, world.attempts) == (commit in newest)


@given(worlds(only_on_branch=True))
def test_where_nobody_returns_to_an_abandoned_branch_it_is_the_rule_of_start_steps(world: World) -> None:
    for attempt, step in world.commits:
        rule = all(step <= later.start_step for later in world.attempts if later.attempt > attempt)
        assert on_branch(attempt, step, world.attempts) == rule


@given(worlds())
def test_the_reference_of_a_replayed_step_comes_from_the_newest_history_through_the_same_checkpoint(
    world: World,
) -> None:
    for commit in world.commits:
        current = started(len(world.attempts) + 1, commit)
        truth: dict[int, int] = {}
        for attempt, step in sorted(world.lines):
            if step > commit[1] and commit in world.history[attempt] and (attempt, step) in world.history[attempt]:
                truth[step] = attempt
        assert replay_reference([*world.attempts, current], current, world.lines) == truth


def test_what_was_changed_on_purpose_ends_the_comparison() -> None:
    attempts = [started(1), started(2, (1, 100), changes=("lr",)), started(3, (2, 120)), started(4, (1, 100))]
    lines = [(1, 101), (1, 102), (2, 101), (2, 102), (2, 121), (3, 121)]
    assert replay_reference(attempts, attempts[3], lines) == {101: 1, 102: 1}
    assert replay_reference(attempts, started(5, (2, 120)), lines) == {121: 3}
    assert replay_reference(attempts, started(5, (2, 120), changes=("data",)), lines) == {}
    assert replay_reference(attempts, started(5, (1, 100), start=0), lines) == {}
    assert replay_reference(attempts, started(5), lines) == {}
