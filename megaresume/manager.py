"""ResumeManager: the one object a training loop talks to. It counts steps, saves when due, stops when asked, and
resumes.

What it decides is decided elsewhere (`resume_request`, `store.lineage`, `audit`); what it does to tensors is done in
`saving` and `restoring`. Here is the order of things, and the guards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from functools import wraps
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from megaresume import restoring, saving
from megaresume.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    MegaresumeError,
    PoisonedError,
    ReplayDivergedError,
)
from megaresume.job import read_job
from megaresume.journal import Journal
from megaresume.megatron.parallel import reports_loss
from megaresume.progress import why_unhealthy
from megaresume.resume_request import Choice, Request, choose, is_uri, parse_request
from megaresume.run_objects import TRAIN, RunObjects, Shared, agree_on_shape, find_place, gather_objects
from megaresume.saver import Saver
from megaresume.state.staging import Staging
from megaresume.status import StatusWord
from megaresume.stop import StopSignals
from megaresume.store import layout
from megaresume.store.attempts import Attempt, claim_attempt
from megaresume.store.commit import SaveReport
from megaresume.store.control import DEFAULT_TIMEOUT_S, ControlPlane
from megaresume.store.references import Source
from megaresume.store.rendezvous import open_control_plane
from megaresume.store.retention import prune, remove_leftovers
from megaresume.store.rootcheck import check_root
from megaresume.watch import Watch, describe_job, tell_supervisor

if TYPE_CHECKING:
    from megaresume.data.sampler import DataParallelBatchSampler

logger = logging.getLogger("megaresume")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _tells(
    method: Callable[Concatenate[ResumeManager, _Arguments], _Result],
) -> Callable[Concatenate[ResumeManager, _Arguments], _Result]:
    """A supervisor has to know a refusal from a crash, also where the error comes before or after the `with` block."""

    @wraps(method)
    def told(self: ResumeManager, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._tell(error)
            raise

    return told


@dataclass(frozen=True)
class ResumeReport:
    """What `resume()` did, on every rank the same.

    path, step: the checkpoint that was restored and the step to go on from; None and 0 for a fresh start.
    consumed_train_samples, epoch, learning_rate: where the run stands now; None without a sampler or an optimizer.
    passed: (name, reason) of each newer checkpoint that was passed over.
    changes: what differs from the checkpoint on purpose; the replay audit is off where there are any.
    notes, left_out: one line for each difference that was settled, and for each part that was not restored.
    """

    path: Path | None
    step: int
    consumed_train_samples: int
    attempt: int
    passed: tuple[tuple[str, str], ...] = ()
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0
    epoch: int | None = None
    learning_rate: float | None = None


class ResumeManager:
    """Makes a Megatron-style training loop stop anywhere and go on as if it had never stopped.

    Args:
        root: directory of this run's checkpoints, shared by all ranks; made if it is not there.
        model: the model, or the list of its virtual pipeline chunks, DDP-wrapped or not.
        optimizer: megatron-core's (distributed, chained, plain) or a `torch.optim.Optimizer`; None trains nothing.
        scheduler: `OptimizerParamScheduler` or another object with `state_dict()`.
        data: samplers by name; "train" is counted by `end_step`, others by `advance`.
        save_every: steps between saves; None saves only on `save()`, on a stop and at the end.
        keep_last: number of newest checkpoints that a save leaves; None keeps all. Where loss or gradient norm were not
            finite at any of these, the newest one before stays too.
        recycle: saves write over the files of checkpoints that `keep_last` removed. Faster, for local disks only; see
            docs/explanation/saving.md.
        async_save: saves that `end_step` makes go on behind the training (Megatron's --async-save): it waits for one
            copy of this rank's state into memory kept for it. False: it waits for the commit, and needs no memory.
        max_failed_saves: where so many of these in a row have failed, `end_step` raises. Each is in the log and in
            events.jsonl.
        register: objects of your own that resume too, by name: tensors, generators, dicts of tensors, or objects with a
            `state_dict`. Every rank saves and gets back its own.
        extra: JSON of your own for `trainer_state.json`; `manager.extra` is what was there at the resume, and may be
            changed.
        resume_from: see `resume_request.parse_request`: None (newest, or a fresh start), "latest", "last_healthy" (the
            newest whose loss was finite), a step, or a directory.
        start_fresh: allows a start from step 0 though an earlier one committed and nothing of it is readable.
        replay: "report" compares steps trained again with the log and says how they agree; "raise" also raises when
            they don't.
        verify: "load" checks every byte while it is read; "first" reads all files twice and touches nothing before all
            are whole; "none" trusts the disk.
        save_rng, load_rng: whether random streams are stored and restored; each acts on its own side alone.
        override_opt_param_scheduler: this run's learning rates, weight decays and schedule win over the checkpoint's
            (Megatron's argument of this name). Default: what the scheduler was built with.
        allow_data_change: settings of the data that may differ from the checkpoint's, such as {"global_batch_size"}.
        allow_model_change: facts of the model that may differ, by the names they have in the table of a refusal.
        stop_signals: names of signals that ask for a save and a stop.
        job_end: when this job will be killed, in Unix seconds, where neither SLURM_JOB_END_TIME nor squeue says
            it; the run then saves and stops in time by itself.
        topology_axes: sizes of parallel axes megaresume does not know, to be recorded and compared.
        timeout_s: how long any rank waits for another's answer before it is named in an error.
        shared: what this manager shares with others of its process (AdapterManager's have one each per adapter), which
            then closes it; `model` is then the RunObjects.

    Collective over all ranks: construction, `resume`, `end_step`, `poll`, `save`, `close`. Construct it after model
    parallelism, model and optimizer.
    """

    @_tells
    def __init__(
        self,
        root: str | PathLike[str],
        *,
        model: Any,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        data: Mapping[str, DataParallelBatchSampler] | None = None,
        save_every: int | None = None,
        keep_last: int | None = None,
        recycle: bool = False,
        async_save: bool = True,
        max_failed_saves: int = 2,
        register: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        resume_from: int | str | PathLike[str] | None = None,
        start_fresh: bool = False,
        replay: str = "report",
        verify: str = "load",
        save_rng: bool = True,
        load_rng: bool = True,
        override_opt_param_scheduler: bool | None = None,
        allow_data_change: AbstractSet[str] = frozenset(),
        allow_model_change: AbstractSet[str] = frozenset(),
        stop_signals: Iterable[str] = ("SIGTERM", "SIGUSR1"),
        job_end: float | None = None,
        topology_axes: Mapping[str, int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        shared: Shared | None = None,
    ) -> None:
        counts = {"save_every": save_every, "keep_last": keep_last, "max_failed_saves": max_failed_saves}
        for name, value in counts.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigurationError(f"{name} must be a whole number of at least 1 or None, found {value!r}")
        _check_choice("replay", replay, ("report", "raise"))
        _check_choice("verify", verify, ("load", "first", "none"))
        StopSignals(stop_signals)  # a wrong name is every rank's error, before any of them is spoken to
        if is_uri(root):
            raise ConfigurationError(
                f"root {str(root)!r} is a URI; checkpoints are written to local or mounted directories"
            )
        self.root = Path(root)
        self.extra: dict[str, Any] = dict(extra or {})
        self.step = 0
        self.should_stop = False
        self._objects = (
            model
            if isinstance(model, RunObjects)
            else gather_objects(model=model, optimizer=optimizer, scheduler=scheduler, data=data, register=register)
        )
        scheduler = self._objects.scheduler
        self._save_every, self._keep_last, self._save_rng = save_every, keep_last, save_rng
        self._request, self._start_fresh, self._replay_rule = parse_request(resume_from), start_fresh, replay
        override = override_opt_param_scheduler
        if override is None:
            override = bool(getattr(scheduler, "override_opt_param_scheduler", False))
        self._options = restoring.Options(
            load_rng=load_rng,
            override_opt_param_scheduler=override,
            allow_data_change=frozenset(allow_data_change),
            allow_model_change=frozenset(allow_model_change),
            verify=verify,
        )
        self._shared = shared is not None
        self._place = find_place(topology_axes) if shared is None else shared.place
        self._control = (
            open_control_plane(timeout_s=timeout_s, label=self._place.stem) if shared is None else shared.control
        )
        check_root(self.root, control=self._control)
        self._shape = agree_on_shape(self._control, self._place, self._objects)
        self._watch = (
            Watch(rank=self._place.rank, stop_signals=stop_signals, job_end=job_end) if shared is None else shared.watch
        )
        self._word = StatusWord()
        self._attempt: Attempt | None = None
        self._journal: Journal | None = None
        self._samples_without_sampler = 0
        self._skipped_samples = 0
        self._recycle = recycle
        self._frozen: dict[str, Source] = {}  # where weights that are not trained lie already
        self._saver = Saver(
            self._objects,
            self._control,
            self._connect_writer() if async_save and not self._shared else None,
            max_failed_saves=max_failed_saves,
            done=self._after_save,
            failed=self._record_failure,
            say=self._say,
        )
        self._scheduler_position = _position_of(scheduler)
        self._unlogged: dict[str, Any] | None = None
        self._poisoned: str | None = None
        self._no_time_to_save = False
        self._closed = False

    # --- resuming -----------------------------------------------------------------------------------------------------

    @_tells
    def resume(self, *, weights_only: bool = False, skip_data: bool = True) -> ResumeReport:
        """Restore the checkpoint that `resume_from` asks for, or start fresh where nothing was committed yet. Once,
        before training.

        `weights_only` takes parameters and buffers alone: step 0, fresh optimizer (masters refreshed), data and random
        numbers. `skip_data=False` restores everything but the position in the data. Either is said in one line and
        recorded.

        Collective. Raises a named error on all ranks; unless it is PoisonedError, live objects are as they were.
        """
        self._guard()
        if self._attempt is not None:
            raise ConfigurationError("resume() was called before; a manager resumes once, before training")
        started = time.monotonic()
        choice = self._choose()
        if choice.followed:
            self._say(choice.followed)
            weights_only, skip_data = False, True
        try:
            report = self._restore(choice, weights_only, skip_data) if choice.paths else self._begin(choice)
        except CheckpointNotFoundError as error:
            if not self._start_fresh:
                raise
            self._say(str(error))
            report = self._begin(choice)
        for name, reason in report.passed:
            self._say(f"passed over {name}: {reason}")
        self._open_journal(report, time.monotonic() - started)
        self._watch.resumed(self.root / layout.EVENTS, self.step)
        # Whoever was asked to stop while it started up need not train a step first. The end of the job's time is no
        # such request: a job too short for more than a few steps has to make those, or it would be requeued for ever.
        asked = self._control.together("look for a stop request", self._watch.asked)
        if self._control.announce("stop before the first step", asked is not None and any(asked)):
            self._say(f"a stop was asked for during the start ({self._watch.wanted() or 'on another rank'})")
            self.should_stop = True
        return report

    def _begin(self, choice: Choice) -> ResumeReport:
        self._claim(start_step=0, resumed_from=None, changes=(), root_id=None)
        self._say(f"{self.root}: fresh start at step 0{describe_job()}")
        return self._report(passed=choice.passed_since(0))

    def _report(self, **fields: Any) -> ResumeReport:
        train = self._objects.data.get(TRAIN)
        return ResumeReport(
            **{"path": None, **fields},
            step=self.step,
            consumed_train_samples=self._consumed(),
            attempt=self._current().attempt,
            epoch=None if train is None else train.epoch,
            learning_rate=self._objects.learning_rate(),
        )

    def _choose(self) -> Choice:
        job = read_job()
        told = self._control.decide(
            "choose a checkpoint",
            lambda: asdict(choose(self.root, self._request, job=job, start_fresh=self._start_fresh)),
        )
        return Choice(**told)

    def _restore(self, choice: Choice, weights_only: bool, skip_data: bool) -> ResumeReport:
        options = replace(self._options, weights_only=weights_only, skip_data=skip_data)
        try:
            restored = restoring.restore_first_valid(
                [Path(path) for path in choice.paths],
                control=self._control,
                place=self._place,
                shape=self._shape,
                objects=self._objects,
                options=options,
                fall_back=not choice.explicit,
            )
        except PoisonedError as error:
            self._poisoned = str(error)
            raise
        state, manifest = restored.state, restored.manifest
        if not weights_only:
            self.step = state.global_step
            self.extra = {**self.extra, **state.extra}
            self._skipped_samples = state.skipped_train_samples
            self._samples_without_sampler = state.consumed_train_samples if skip_data else 0
        own = restored.path.parent.resolve() == self.root.resolve()
        if own:
            self._frozen.update(restored.frozen)
        self._claim(
            start_step=self.step,
            resumed_from=(manifest.attempt, manifest.step) if own else None,
            changes=restored.changes,
            # Of another root, the checkpoint has an id that this one must not share: its own will have the same
            # numbers.
            root_id=manifest.root_id if own else None,
        )
        self._saver.resumed(self.step if own and not restored.changes else None)
        self._scheduler_position = _position_of(self._objects.scheduler)
        if state.healthy is False and not weights_only:
            logger.warning(
                'loss or gradient norm were not finite at step %d; resume_from="last_healthy" goes back to where they '
                "were",
                self.step,
            )
        for line in (*restored.notes, *(f"not restored: {part}" for part in restored.left_out)):
            self._say(line)
        self._say(
            f"resumed from {restored.path}: step {self.step}, {self._consumed()} samples consumed, "
            f"in {restored.seconds:.1f} s"
            f"{describe_job()}"
        )
        return self._report(
            path=restored.path,
            passed=choice.passed_since(manifest.step) + restored.passed,
            changes=restored.changes,
            notes=restored.notes,
            left_out=restored.left_out,
            seconds=restored.seconds,
        )

    def _claim(
        self, *, start_step: int, resumed_from: tuple[int, int] | None, changes: tuple[str, ...], root_id: str | None
    ) -> None:
        job = read_job()

        def claim() -> Any:
            attempt = claim_attempt(
                self.root,
                start_step=start_step,
                resumed_from=resumed_from,
                changes=changes,
                job_id=job.job_id,
                restart_count=job.restart_count,
                root_id=root_id,
            )
            remove_leftovers(self.root, attempt=attempt.attempt)
            return attempt.to_json()

        self._attempt = Attempt.from_json(self._control.decide("claim an attempt", claim))

    def _open_journal(self, report: ResumeReport, seconds: float) -> None:
        def open_it() -> None:
            self._journal = Journal(self.root, self._current())

        self._control.decide("read the step log", open_it)
        if self._journal is not None:
            self._journal.event(
                "resume" if report.path else "start",
                step=report.step,
                path=None if report.path is None else report.path.name,
                seconds=seconds,
                restore_seconds=report.seconds,
                consumed_train_samples=report.consumed_train_samples,
                passed=[list(each) for each in report.passed],
                changes=list(report.changes),
                left_out=list(report.left_out),
            )

    # --- training -----------------------------------------------------------------------------------------------------

    @property
    def consumed_train_samples(self) -> int:
        """Training samples consumed so far over all data-parallel ranks."""
        return self._consumed()

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per data-parallel rank of the next step (gradient accumulation); follows a batch-size
        ramp-up."""
        if TRAIN not in self._objects.data:
            raise ConfigurationError('num_microbatches needs a sampler: give data={"train": sampler}')
        return self._objects.data[TRAIN].num_microbatches

    def end_step(
        self, *, loss: Any = None, grad_norm: Any = None, skipped: bool = False, samples: int | None = None
    ) -> None:
        """Count a finished step, log it, save if due, notice a stop. Call it on every rank, after optimizer and
        scheduler.

        loss: mean loss of this rank's part of the global batch (number or one-element tensor); None off the last
            pipeline stage.
        grad_norm: as the optimizer returned it. skipped: the optimizer skipped the update (fp16 overflow); the step
            still counts.
        samples: size of the global batch, only where no "train" sampler was given.

        Collective (one asynchronous reduction of five numbers). Raises SaveError on all ranks where `max_failed_saves`
        in a row have failed (with async_save=False: where the save that was due failed): the step is counted, earlier
        checkpoints are whole, and training may go on.
        """
        self._guard(started=True)
        self._check_scheduler(skipped)
        stop = self._take_word()
        size = self._count_samples(samples)
        self.step += 1
        self._watch.step_ended(self.step)
        self._skipped_samples += size if skipped else 0
        self._unlogged = {
            "step": self.step,
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "lr": self._objects.learning_rate(),
            "consumed_train_samples": self._consumed(),
        }
        self._post_word(float(loss) if loss is not None and reports_loss() else None)
        self._saver.take_in()
        if stop:
            self._stop()
        elif self._save_every is not None and self.step % self._save_every == 0:
            # Now and not at the next step: where a crash follows the commit, the log must have the line of this step.
            if self._take_word():
                self._stop()
            elif self._saver.behind_training:
                self._saver.begin(self.step, self._target(), self._collect)
            else:
                self.save()
        elif self._save_every is not None:
            self._saver.prepare()

    def advance(self, name: str, batches: int = 1) -> int:
        """Count `batches` global batches read from the sampler called `name` (validation, mostly); returns their
        samples."""
        self._guard()
        if name == TRAIN or name not in self._objects.data:
            others = sorted(set(self._objects.data) - {TRAIN})
            raise ConfigurationError(
                f"advance: no data called {name!r} to count here; there is {others or 'none'}, and end_step counts "
                "train"
            )
        return sum(self._objects.data[name].advance() for _ in range(batches))

    def poll(self) -> bool:
        """Whether to stop, asked in the middle of something long (validation). Saves the last finished step if so.

        Collective, and unlike `end_step` it waits for the slowest rank.
        """
        self._guard(started=True)
        self._watch.beat(f"polled after step {self.step}")
        stop = self._take_word()
        self._post_word(None)
        if (self._take_word() or stop) and not self.should_stop:
            self._stop()
        return self.should_stop

    def settle(self) -> bool:
        """Log the last finished step, once all ranks have said their word on it, and return whether any wants to stop.

        The next `end_step` does it too; who trains something else in between calls this. Collective.
        """
        return self._take_word()

    def save(self) -> Path:
        """Save this step now; returns the checkpoint's directory, committed, on every rank. Does nothing where it is
        saved already. Waits for a save that is still being written behind the training.

        Collective; no tensor moves between ranks. Raises SaveError on all ranks; the root is then as it was.
        """
        self._guard(started=True)
        self._saver.finish()
        if self._saver.saved_step != self.step:
            stop = self._take_word()
            self._saver.save(self.step, self._target(), self._collect)
            if stop:
                self.should_stop = True
        return self.root / layout.step_directory(self.step)

    @_tells
    def close(self) -> None:
        """Save what is not saved yet and let go of signals and files. Collective; leaving the `with` block without an
        error calls it."""
        if self._closed:
            return
        try:
            if self._attempt is not None and self._poisoned is None:
                self._take_word()
                self._saver.finish()
                if self.step != self._saver.saved_step and self.step > 0 and not self._no_time_to_save:
                    self.save()
            if self._shared:
                return
            self._control.close()
            if self._attempt is not None and self._poisoned is None:
                self._watch.ended(stopped=self.should_stop, step=self.step)
        finally:
            self._release()

    def __enter__(self) -> ResumeManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # The other ranks may be gone or elsewhere: nothing collective can be done any more. What is being written
            # on all of them is another matter: it is waited for, with the deadlines of the control plane.
            self._tell(error)  # before the wait, in which a launcher may kill this process
            lost = self._saver.finish()
            self._release()
            if lost is not None and isinstance(error, SystemExit) and not error.code:
                raise lost

    # --- inside -------------------------------------------------------------------------------------------------------

    def _guard(self, *, started: bool = False) -> None:
        if self._closed:
            raise ConfigurationError("this ResumeManager is closed")
        if self._poisoned is not None:
            raise PoisonedError(
                f"the restore of this process failed half-way, its state must not be trained or saved: {self._poisoned}"
            )
        if started and self._attempt is None:
            raise ConfigurationError(
                "call resume() first: it finds the checkpoint to go on from, or says that this is a fresh start"
            )

    def _current(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    def _consumed(self) -> int:
        train = self._objects.data.get(TRAIN)
        return self._samples_without_sampler if train is None else train.consumed_samples

    def _count_samples(self, samples: int | None) -> int:
        train = self._objects.data.get(TRAIN)
        if train is not None:
            if samples is not None:
                raise ConfigurationError(
                    "end_step(samples=...) is for loops without a sampler; the train sampler counts here"
                )
            size = train.advance()
        else:
            size = samples or 0
            self._samples_without_sampler += size
        self._objects.count(self._consumed())
        return size

    def _check_scheduler(self, skipped: bool) -> None:
        """A save between optimizer.step() and scheduler.step() would resume with the learning rate one step behind."""
        position = _position_of(self._objects.scheduler)
        if position is not None and position == self._scheduler_position and not skipped:
            raise ConfigurationError(
                f"the scheduler stands at {position}, where it stood at the last end_step(): call scheduler.step() "
                "before end_step(), or give skipped=True for a step that the optimizer skipped"
            )
        self._scheduler_position = position

    def _post_word(self, loss: float | None) -> None:
        diverged = self._journal is not None and self._journal.diverged
        self._word.post(
            stop=self._watch.wanted() is not None, diverged=diverged, save_failed=self._saver.post(), loss=loss
        )

    def _take_word(self) -> bool:
        """Read the word posted last, log the step it belongs to, and say whether any rank wants to stop."""
        word = self._word.take()
        if word is None:
            return False
        if self._journal is not None and self._unlogged is not None:
            self._journal.record(loss=word.loss, **self._unlogged)
            self._watch.progress(step=self._unlogged["step"], loss=word.loss, saved_step=self._saver.saved_step)
        self._unlogged = None
        self._saver.heard(word.save_failed)
        if word.diverged and self._replay_rule == "raise":
            raise ReplayDivergedError(
                f"steps trained again after the resume are not those in {self.root / layout.STEP_LOG}; the first "
                "difference is in the "
                f'log of rank 0 and in {layout.EVENTS}. With replay="report" training would go on.'
            )
        return word.stop > 0

    def _healthy(self) -> bool | None:
        return None if self._journal is None else self._journal.healthy

    def _stop(self) -> None:
        why = self._watch.wanted() or "on another rank"
        committed = self._saver.committed_step
        recent = committed is not None and self.step - committed <= (self._save_every or 0)
        if self._control.decide("is there time to save", lambda: self._watch.worth_saving(recent=recent)):
            self._say(f"a stop was asked for ({why}): saving step {self.step}")
            self.save()
        else:
            self._no_time_to_save = True
            self._say(f"a stop was asked for ({why}): no save of step {self.step}, which could not be finished in time")
        self.should_stop = True

    # --- saves --------------------------------------------------------------------------------------------------------

    def _connect_writer(self) -> ControlPlane:
        """A control plane for the writer's thread."""
        box: list[ControlPlane] = []
        self._control.together("connect the writer", lambda: box.append(self._control.another()))
        return box[0]

    def _target(self) -> saving.Target:
        attempt = self._current()

        def before_commit() -> None:
            if self._journal is not None:
                self._journal.sync()

        def after_commit() -> None:
            if self._keep_last is not None:
                try:
                    prune(
                        self.root,
                        keep_last=self._keep_last,
                        attempt=attempt.attempt,
                        recycle=self._recycle,
                        unhealthy=why_unhealthy,
                    )
                except MegaresumeError as error:
                    # The save is done, and what rank 0 alone cannot tidy up must not part it from the others.
                    logger.warning("no old checkpoint was removed: %s", error)

        return saving.Target(
            self.root,
            self._place,
            self._shape,
            attempt,
            before_commit,
            after_commit,
            self._frozen,
            self._recycle,
        )

    def _counters(self) -> saving.Counters:
        return saving.Counters(self.step, self._consumed(), self._skipped_samples, self._healthy(), self.extra)

    def _collect(self, staging: Staging | None) -> Callable[[], saving.Snapshot]:
        return saving.collect(self._target(), self._objects, self._counters(), save_rng=self._save_rng, staging=staging)

    def _record_failure(self, step: int, error: Exception) -> None:
        if self._journal is not None:
            self._journal.event("save_failed", step=step, error=str(error))

    def _after_save(self, step: int, report: SaveReport) -> None:
        self._watch.saved(report.seconds, step)
        if self._place.rank != 0 or self._journal is None:
            return
        self._journal.event(
            "save", step=step, path=report.path.name, bytes=report.bytes_written, seconds=report.seconds
        )
        self._say(f"saved {report.path.name}: {report.bytes_written / 1e6:.1f} MB in {report.seconds:.2f} s")

    def _tell(self, error: BaseException) -> None:
        # Any attribute may be missing still: this may be an error of the constructor.
        request: Request | None = getattr(self, "_request", None)
        looked = request is not None and request.kind in ("auto", "latest", "last_healthy")
        tell_supervisor(
            error, step=getattr(self, "step", None), had_committed=looked and (self.root / layout.LATEST).exists()
        )

    def _release(self) -> None:
        self._closed = True
        watch = getattr(self, "_watch", None)  # an error during construction may come first
        if watch is not None and not self._shared:
            watch.release()
        saver = getattr(self, "_saver", None)
        if saver is not None:
            saver.release()
        if self._journal is not None:
            self._journal.close()

    def _say(self, line: str) -> None:
        if self._place.rank == 0:
            logger.info("%s%s", f"adapter {self.root.name}: " if self._shared else "", line)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, found {value!r}")


def _position_of(scheduler: Any | None) -> Any:
    return getattr(scheduler, "num_steps", getattr(scheduler, "last_epoch", None))
