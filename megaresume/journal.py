"""What rank 0 writes down while the run goes on: a line per step, events, and the comparison of replayed steps with the
log before."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from megaresume.audit import Audit, audit
from megaresume.store import layout
from megaresume.store.attempts import Attempt, read_attempts
from megaresume.store.lineage import replay_reference
from megaresume.store.steplog import EventLog, StepLine, StepLog, read_steps
from megaresume.store.strict_json import JSON

logger = logging.getLogger("megaresume.journal")


class Journal:
    """Step log, event log and replay audit of one attempt. On rank 0 only; reads the log of the attempts before once,
    when made."""

    def __init__(self, root: Path, attempt: Attempt) -> None:
        self._reference = _reference_lines(root, attempt)
        self._last_reference = max(self._reference, default=0)
        self._replayed: list[StepLine] = []
        self._steps = StepLog(root / layout.STEP_LOG, attempt.attempt)
        self._events = EventLog(root / layout.EVENTS, attempt.attempt)
        self.healthy: bool | None = None
        self.diverged = False
        if (attempt.resumed_from is not None or attempt.start_step) and not self._reference:
            verdict, summary = (
                ("off", f"off, for this was changed on purpose: {', '.join(attempt.changes)}")
                if attempt.changes
                else ("nothing to compare", "nothing to compare: no step after this checkpoint is in the log")
            )
            logger.info("replay audit: %s", summary)
            self._events.append("replay", verdict=verdict, compared=0, equal=0, summary=summary)

    def record(
        self, *, step: int, loss: float | None, grad_norm: float | None, lr: float | None, consumed_train_samples: int
    ) -> None:
        """Log a finished step; compare it where an earlier attempt trained it too, and say the verdict when the last
        such step is done."""
        line = self._steps.append(
            step=step, loss=loss, grad_norm=grad_norm, lr=lr, consumed_train_samples=consumed_train_samples
        )
        known = [value for value in (loss, grad_norm) if value is not None]
        self.healthy = all(math.isfinite(value) for value in known) if known else None
        if step not in self._reference:
            return
        self._replayed.append(line)
        first_divergence = not self.diverged and audit([line], self._reference).verdict == "diverged"
        self.diverged = self.diverged or first_divergence
        if first_divergence or step == self._last_reference:
            self._say(audit(self._replayed, self._reference))

    def event(self, name: str, **fields: JSON) -> None:
        """Append an event for people."""
        self._events.append(name, **fields)

    def sync(self) -> None:
        """Make the lines so far durable; before each commit. Like a line that cannot be written, a failure stops
        nothing."""
        try:
            self._steps.sync()
            self._events.sync()
        except OSError as error:
            logger.error("the step log may lose its last lines if this host crashes: %s", error)

    def close(self) -> None:
        """Say how far the replay came where it did not come to its end, and close the files."""
        if self._replayed and self._replayed[-1].step < self._last_reference:
            self._say(audit(self._replayed, self._reference))
        self._steps.close()
        self._events.close()

    def _say(self, outcome: Audit) -> None:
        logger.log(logging.INFO if outcome.verdict == "equal" else logging.WARNING, "replay audit: %s", outcome.summary)
        self._events.append(
            "replay", verdict=outcome.verdict, compared=outcome.compared, equal=outcome.equal, summary=outcome.summary
        )


def _reference_lines(root: Path, attempt: Attempt) -> dict[int, StepLine]:
    lines = read_steps(root / layout.STEP_LOG, after_step=attempt.start_step)
    chosen = replay_reference(read_attempts(root), attempt, ((line.attempt, line.step) for line in lines))
    return {line.step: line for line in lines if chosen.get(line.step) == line.attempt}
