"""What a run is doing and where its time went, from its files alone, also while it runs: `megaresume status`.

Reads; claims and changes nothing. Times are those written by the hosts that led, so clocks that differ show up here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from megaresume.launch.records import End, Launch, PastTry, past_tries
from megaresume.outcome import CRASHED, DAMAGED, FINISHED, REFUSED, STOPPED
from megaresume.store import layout
from megaresume.store.attempts import Attempt, read_attempts
from megaresume.store.discovery import find_candidates
from megaresume.store.steplog import StepLine, read_events, read_steps

SILENT_S = 600.0  # longer than most steps and saves: a run that says nothing for so long may be gone


@dataclass(frozen=True)
class Times:
    """Seconds. training: steps that count; saving: what saves made them longer, and each attempt's last save; lost:
    steps trained again, `lost_steps` of them; waiting: between starts, those that came to nothing included."""

    total: float = 0.0
    training: float = 0.0
    lost: float = 0.0
    saving: float = 0.0
    resuming: float = 0.0
    waiting: float = 0.0
    lost_steps: int = 0

    @property
    def goodput(self) -> float:
        """The part of the time that became progress, from 0 to 1."""
        return self.training / self.total if self.total > 0 else 0.0


@dataclass(frozen=True)
class History:
    """state: "running", "finished", ... and why. Ages are seconds; None where there is nothing to measure."""

    root: Path
    state: str
    why: str
    step: int | None
    step_age: float | None
    saved_step: int | None
    save_age: float | None
    attempts: int
    tries: int
    crashes: int
    times: Times = field(default_factory=Times)


def read_history(root: Path, *, now: float) -> History:
    """The history of `root` as its files tell it at `now` (Unix seconds). Raises as reading attempts does."""
    attempts, steps = read_attempts(root), read_steps(root / layout.STEP_LOG)
    events, tries = read_events(root / layout.EVENTS), past_tries(root)
    candidates, _ = find_candidates(root)
    signs = [each.record.started for each in tries] + [
        *(seconds for line in steps[-1:] if (seconds := _seconds(line.time)) is not None),
        *(seconds for event in events[-1:] if (seconds := _seconds(event.get("time"))) is not None),
    ]
    silence = None if not signs else now - max(signs)
    launch = Launch(root, tries[-1].run_id) if tries else None
    state, why = judge(
        launch.read_end() if launch else None,
        launch.read_requeue() if launch else None,
        silence,
        supervised=bool(tries),
    )
    saved_at = [_seconds(event.get("time")) for event in events if event.get("event") == "save"]
    running = state in ("running", "waiting to be requeued")
    last = steps[-1] if steps else None
    return History(
        root=root,
        state=state,
        why=why,
        step=last.step if last else None,
        step_age=_age(now, _seconds(last.time) if last else None),
        saved_step=candidates[0].step if candidates else None,
        save_age=_age(now, saved_at[-1] if saved_at else None),
        attempts=len(attempts),
        tries=len(tries),
        crashes=sum(each.end is not None and each.end.outcome == CRASHED for each in tries),
        times=account(attempts, steps, events, tries, until=now if running else None),
    )


def judge(
    end: End | None, requeued: Mapping[str, Any] | None, silence: float | None, *, supervised: bool
) -> tuple[str, str]:
    """(state, why) of the newest launch: its end, whether it was queued again, seconds since its last sign of life."""
    again = requeued is not None and requeued.get("requeued") is True
    not_again = "" if requeued is None or again else f"; not queued again: {requeued.get('why')}"
    if again and (end is None or end.outcome == STOPPED):
        return "waiting to be requeued", str((requeued or {}).get("why"))
    if end is not None:
        if end.outcome == CRASHED and end.reason.startswith("crash loop"):
            return "crash loop", end.reason
        text = {
            FINISHED: "all trained",
            STOPPED: f"{end.reason}{not_again or '; start it again to go on'}",
            CRASHED: end.reason,
            REFUSED: f"{end.reason} (starting again gives the same answer)",
            DAMAGED: end.reason,
        }
        return end.outcome, text[end.outcome]
    if silence is None:
        return "not started", "no attempt and no launch is recorded"
    if silence < SILENT_S:
        return "running", f"the last sign of life was {_duration(silence)} ago"
    who = "its supervisor wrote no end" if supervised else "no supervisor was there to write an end"
    return "silent", f"no sign of life for {_duration(silence)}, and {who}: killed, or in a very long step"


def account(
    attempts: Sequence[Attempt],
    steps: Sequence[StepLine],
    events: Sequence[Mapping[str, Any]],
    tries: Sequence[PastTry],
    *,
    until: float | None,
) -> Times:
    """Where the time from the first start to the last sign of life went, or to `until` (Unix seconds) if it goes on."""
    training = lost = saving = resuming = waiting = 0.0
    lost_steps = 0
    first: float | None = None
    last: float | None = None
    for attempt in attempts:
        mine = [event for event in events if event.get("attempt") == attempt.attempt]
        lines = [line for line in steps if line.attempt == attempt.attempt]
        ready = next((_seconds(each.get("time")) for each in mine if each.get("event") in ("start", "resume")), None)
        ready = ready or _seconds(attempt.started) or 0.0
        begin = _begin_of(attempt, tries, ready, last)
        first = begin if first is None else first
        waiting += max(begin - last, 0.0) if last is not None else 0.0
        resuming += max(ready - begin, 0.0)
        kept_until = min((each.start_step for each in attempts if each.attempt > attempt.attempt), default=None)
        intervals = _intervals(ready, lines)
        usual = median([seconds for _, _, seconds in intervals]) if intervals else 0.0
        saves = [
            (_seconds(each.get("time")) or 0.0, each.get("seconds")) for each in mine if each.get("event") == "save"
        ]
        for line, begun, seconds in intervals:
            # What a save costs is what its step took longer: a save behind the training costs next to nothing.
            longest = sum(float(took or 0.0) for when, took in saves if begun < when <= begun + seconds)
            cost = min(longest, max(seconds - usual, 0.0))
            saving += cost
            if kept_until is not None and line.step > kept_until:
                lost += seconds - cost
                lost_steps += 1
            else:
                training += seconds - cost
        mark = intervals[-1][1] + intervals[-1][2] if intervals else ready
        final = max([mark, *(_seconds(each.get("time")) or mark for each in mine)])
        saving += final - mark  # after the last step there is only the last save
        last = final
    if first is None or last is None:
        return Times()
    if until is not None:
        waiting += max(until - last, 0.0)
    return Times(
        total=(until or last) - first,
        training=training,
        lost=lost,
        saving=saving,
        resuming=resuming,
        waiting=waiting,
        lost_steps=lost_steps,
    )


def _intervals(ready: float, lines: Sequence[StepLine]) -> list[tuple[StepLine, float, float]]:
    """(line, when its step began, how long it took) of one attempt's steps."""
    found: list[tuple[StepLine, float, float]] = []
    mark = ready
    for line in lines:
        at = max(_seconds(line.time) or mark, mark)
        found.append((line, mark, at - mark))
        mark = at
    return found


def _begin_of(attempt: Attempt, tries: Sequence[PastTry], ready: float, previous_end: float | None) -> float:
    """When the process of this attempt was started: by its try where one is recorded, else when it began to resume."""
    claimed = (_seconds(attempt.started) or ready) + 1.0  # recorded in whole seconds
    started = [each.record.started for each in tries if each.record.started <= claimed]
    begin = started[-1] if started else min(ready, claimed - 1.0)
    return begin if previous_end is None else max(begin, min(previous_end, ready))


def render(history: History) -> str:
    """The history as lines for a person."""
    times = history.times
    lines = [
        f"{history.root}: {history.state}" + (f" ({history.why})" if history.why else ""),
        f"  step          {_or_none(history.step)}{_ago(history.step_age)}",
        f"  checkpoint    {_or_none(history.saved_step)}{_ago(history.save_age)}",
        f"  started       {history.attempts} attempt(s), {history.tries} supervised tries, {history.crashes} crashed",
        f"  lost          {times.lost_steps} step(s), trained again",
    ]
    if times.total > 0:
        parts = ("training", "lost", "saving", "resuming", "waiting")
        lines += [
            f"  time          {_duration(times.total)}, goodput {times.goodput:.1%}",
            *(
                f"    {part:<12}{_duration(getattr(times, part)):>10}  {getattr(times, part) / times.total:6.1%}"
                for part in parts
            ),
        ]
    return "\n".join(lines)


def _seconds(text: object) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
    except ValueError:
        return None


def _age(now: float, then: float | None) -> float | None:
    return None if then is None else max(now - then, 0.0)


def _ago(age: float | None) -> str:
    return "" if age is None else f", {_duration(age)} ago"


def _or_none(number: int | None) -> str:
    return "none yet" if number is None else str(number)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, _ = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
