"""Which checkpoints belong to the run as it is now, and which log lines a replay is compared with.

Pure decisions over attempt records: touches no disk, and knows no manifest and no clock. Everything that picks, keeps
or replaces a checkpoint asks here, so that there is one answer to "is this still our history?".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megaresume.store.attempts import Attempt


def on_branch(attempt: int, step: int, attempts: Sequence[Attempt]) -> bool:
    """Whether the checkpoint (attempt, step) lies in the history of the newest attempt.

    That history is the newest attempt itself; before it, the attempt it resumed from, up to the step it resumed at;
    and so on. Where every attempt resumed from a checkpoint of its branch this says the same as: `step` is at most the
    start step of every later attempt. It differs where someone resumed on purpose from an abandoned branch, which then
    is the branch again.

    An attempt newer than every record is on the branch (its record has not reached us yet, or was lost with all
    others). Where a record in between is missing, what lies before it is judged by the start steps of all later
    attempts.
    """
    records = {record.attempt: record for record in attempts}
    current = max(records, default=0)
    if attempt > current:
        return True
    limit: int | None = None
    while attempt < current:
        record = records.get(current)
        if record is None or (record.resumed_from is not None and record.resumed_from[0] >= current):
            return _below_later_starts(attempt, step, attempts)
        if record.resumed_from is None or record.resumed_from[1] != record.start_step:
            return False  # a history of its own: from nothing, from another root, or from weights alone at step 0
        current, limit = record.resumed_from
    return attempt == current and (limit is None or step <= limit)


def _below_later_starts(attempt: int, step: int, attempts: Sequence[Attempt]) -> bool:
    return all(step <= record.start_step for record in attempts if record.attempt > attempt)


def replay_reference(
    attempts: Sequence[Attempt], current: Attempt, logged: Iterable[tuple[int, int]]
) -> dict[int, int]:
    """Which earlier attempt's log line each step that `current` trains again is to be compared with.

    `logged` are the (attempt, step) pairs that have a line. Returns step -> attempt for steps after
    `current.start_step`. A line counts where its attempt's own history passes through the checkpoint that `current`
    resumed from, with nothing changed on purpose since; of several such attempts the newest wins. Empty where
    `current` itself changed something on purpose.
    """
    if current.resumed_from is None or current.changes or current.resumed_from[1] != current.start_step:
        return {}
    records = {record.attempt: record for record in attempts}
    reference: dict[int, int] = {}
    passes: dict[int, bool] = {}
    for attempt, step in logged:
        if attempt >= current.attempt or step <= current.start_step or attempt < reference.get(step, 0):
            continue
        if attempt not in passes:
            passes[attempt] = _passes_through(attempt, current.resumed_from, records)
        if passes[attempt]:
            reference[step] = attempt
    return reference


def _passes_through(attempt: int, checkpoint: tuple[int, int], records: Mapping[int, Attempt]) -> bool:
    """Whether `attempt` wrote `checkpoint` itself, or came from it with nothing changed on the way."""
    while attempt != checkpoint[0]:
        record = records.get(attempt)
        if record is None or record.changes or record.resumed_from is None:
            return False
        parent, step = record.resumed_from
        if parent >= attempt or step != record.start_step or step < checkpoint[1]:
            return False
        attempt = parent
    return True
