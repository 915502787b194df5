"""The saves of a run: one at a time, in the order of their steps, waited for or behind the training.

What a save does stands in `saving`. Here are the memory for its copies, the thread that writes, and what becomes of a
run whose saves fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeAlias

from megaresume import saving
from megaresume.errors import MegaresumeError, SaveError, SupersededError
from megaresume.megatron.optimizers import before_each_step
from megaresume.run_objects import RunObjects
from megaresume.state.staging import Staging
from megaresume.store.commit import SaveReport
from megaresume.store.control import ControlPlane
from megaresume.store.writer import Outcome, Writer

logger = logging.getLogger("megaresume.saver")

# Takes this rank's state as it is now, copied into the memory given or, without one, as it lies; see `saving.collect`.
Collect: TypeAlias = Callable[[Staging | None], Callable[[], saving.Snapshot]]


class Saver:
    """Used from the training's thread. Every rank calls the same methods at the same steps.

    `writer_control` is the control plane of the writer's thread, None where all saves are waited for; `done` and
    `failed` are told, on each rank, what became of the save of a step, `say` what training does about it.
    """

    def __init__(
        self,
        objects: RunObjects,
        control: ControlPlane,
        writer_control: ControlPlane | None,
        *,
        max_failed_saves: int,
        done: Callable[[int, SaveReport], None],
        failed: Callable[[int, Exception], None],
        say: Callable[[str], None],
    ) -> None:
        self.saved_step: int | None = None
        """Of the save begun last."""
        self.committed_step: int | None = None
        """Of the one known to have succeeded."""
        self._objects, self._control, self._writer_control = objects, control, writer_control
        self._done, self._failed, self._say = done, failed, say
        self._staging = Staging()
        self._hooks: list[Any] | None = None
        if self.behind_training:
            self._hooks = before_each_step(objects.optimizer, self._staging.fence)
        self._writer = Writer()
        self._max_failed_saves, self._failed_saves = max_failed_saves, 0
        self._posted = self._heard = 0  # numbers of saves: begun when the last word was posted, outcome known
        self._failed_somewhere = False

    @property
    def behind_training(self) -> bool:
        """Whether `begin` may be called."""
        return self._writer_control is not None

    @property
    def writing(self) -> bool:
        """Whether a save is being written behind the training at this moment."""
        return self._writer.running()

    def resumed(self, step: int | None) -> None:
        """The run stands where it was saved: at `step`, or nowhere."""
        self.saved_step = self.committed_step = step

    def save(self, step: int, target: saving.Target, collect: Collect) -> None:
        """Save and wait for the commit. `finish` comes first. Collective; raises on all ranks as `saving.save` does."""
        try:
            report = saving.save(target, collect(None), step=step, control=self._control)
        except Exception as error:
            self._failed(step, error)
            raise
        self.saved_step = step
        self._succeeded(step, report)

    def begin(self, step: int, target: saving.Target, collect: Collect) -> None:
        """Copy this step's state and begin to write it, once the save before is done with."""
        control = self._writer_control
        assert control is not None, "behind_training"
        error = self.finish()
        if error is not None:
            self._raise_if_too_many(error)
        if self.saved_step == step:
            return
        collected = collect(self._staging)

        def save() -> SaveReport:
            report = saving.save(target, collected, step=step, control=control)
            control.until_heard(f"save step {step}")
            return report

        if self._hooks is None:
            self._staging.fence()
        self._writer.start(step, save)
        self.saved_step = step

    def prepare(self) -> None:
        """Have the memory for the first save made ready behind the next step: the state must be complete by now."""
        if self.behind_training and not self._staging.size:
            try:
                self._staging.prepare(saving.storable(self._objects))
            except MegaresumeError as error:
                logger.warning("no memory made ready for the first save: %s", error)  # the save will say so too

    def post(self) -> bool:
        """Whether this rank's status word is to say that a save failed."""
        self._posted = self._writer.started
        return self._writer.failed()

    def heard(self, failed: bool) -> None:
        """The word posted last says that a save failed on some rank, or on none."""
        self._failed_somewhere = failed and self._posted > self._heard

    def take_in(self) -> None:
        """Take in what has become of the save behind the training: a success when it is there, a failure when the
        status word says so, which is at the same step on all ranks. Raises it there where it is one too many."""
        if self._failed_somewhere:
            self._failed_somewhere = False
            error = self.finish() or SaveError("a save failed on another rank; its log says why")
            self._raise_if_too_many(error)
        else:
            self._settle(self._writer.take(wait=False))

    def finish(self) -> MegaresumeError | None:
        """Wait for the save behind the training, if one is under way; returns its error."""
        return self._settle(self._writer.take(wait=True))

    def release(self) -> None:
        """Let go of the optimizer. What is being written has been waited for by `finish`."""
        self._writer.close()
        for hook in self._hooks or ():
            hook.remove()

    def _settle(self, outcome: Outcome | None) -> MegaresumeError | None:
        if outcome is None:
            return None
        self._heard = outcome.number
        if outcome.report is not None:
            self._succeeded(outcome.step, outcome.report)
        elif outcome.error is not None:
            self._failed_saves += 1
            if self.saved_step == outcome.step:
                self.saved_step = self.committed_step
            self._failed(outcome.step, outcome.error)
        return outcome.error

    def _succeeded(self, step: int, report: SaveReport) -> None:
        self._failed_saves, self.committed_step = 0, step
        self._done(step, report)

    def _raise_if_too_many(self, error: MegaresumeError) -> None:
        # What is no failed write (an orphan, a state that cannot be captured) will not be better the next time.
        hopeless = isinstance(error, SupersededError) or not isinstance(error, SaveError)
        if hopeless or self._failed_saves >= self._max_failed_saves:
            raise error
        self._say(
            f"training goes on after {self._failed_saves} failed of at most {self._max_failed_saves} saves in a row"
        )
