"""Whether a run may be started once more: a crash that comes again without a newer checkpoint ends it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaresume.launch.records import Commit, PastTry
from megaresume.outcome import CRASHED

MAX_CRASHES = 3
MAX_CRASHES_IN_ALL = 20
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Limits:
    """crashes: tries in a row that crash without a newer commit. crashes_in_all: of one job, progress or not.

    A try that was stopped (walltime, preemption, a person) counts in neither.
    """

    crashes: int = MAX_CRASHES
    crashes_in_all: int = MAX_CRASHES_IN_ALL


def crashed(past: PastTry) -> bool:
    """A try that ended without a word crashed too, and took its host along."""
    return past.end is None or past.end.outcome == CRASHED


def reason_to_give_up(past: Sequence[PastTry], commit: Commit | None, limits: Limits) -> str | None:
    """Why there must be no further try; None where there may be one.

    `past` are the tries of this job, oldest first, none of them running; `commit` is the newest checkpoint now.
    """
    crashes = [each for each in past if crashed(each)]
    stuck = 0
    for each in reversed(crashes):
        if each.record.commit != commit:
            break
        stuck += 1
    where = "no checkpoint was ever committed" if commit is None else f"the newest checkpoint is still step {commit[1]}"
    if stuck >= limits.crashes:
        return f"crash loop: {stuck} tries in a row crashed and {where}. The last one: {_last_words(crashes)}"
    if len(crashes) >= limits.crashes_in_all:
        return (
            f"{len(crashes)} tries of this job have crashed, the limit of all together. "
            f"The last one: {_last_words(crashes)}"
        )
    return None


def pause_before_next(past: Sequence[PastTry], commit: Commit | None) -> float:
    """Seconds to wait after a crash: 1, 2, 4, ... up to a minute while there is no newer commit."""
    stuck = sum(crashed(each) and each.record.commit == commit for each in past)
    return float(min(2.0 ** max(stuck - 1, 0), _LONGEST_PAUSE_S))


def _last_words(crashes: Sequence[PastTry]) -> str:
    end = crashes[-1].end
    return "it ended without a word (killed, or its host was lost)" if end is None else end.reason
