"""`megaresume run`: stands between Slurm (or a shell) and torchrun, and starts the run again where that helps.

One supervisor per host; node rank 0 leads: it records each try before it starts, decides whether there is a next one,
and says how the launch ended, all by files in the root, so that supervisors need no connection of their own. A stop
signal becomes a file that the ranks look for; nothing is passed on to them. What neither ends nor makes progress is
killed. Knows no torch, and Slurm only by what `cli` hands over.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaresume.errors import ConfigurationError
from megaresume.launch import processes
from megaresume.launch.command import build_command, build_environment, check_command
from megaresume.launch.guard import Limits, pause_before_next, reason_to_give_up
from megaresume.launch.records import (
    Commit,
    End,
    Launch,
    PastTry,
    Try,
    launch_names,
    open_launch,
    past_tries,
)
from megaresume.outcome import CRASHED, DAMAGED, EXIT_CODES, FINISHED, REFUSED, STOPPED, read_status
from megaresume.stop import reason_in
from megaresume.store import fs
from megaresume.store.discovery import find_candidates

logger = logging.getLogger("megaresume.launch")

HANG_TIMEOUT_S = 1800.0
START_TIMEOUT_S = 1800.0  # until the first sign of life: a container, imports, an index of the data
_LOOK_EVERY_S = 1.0
_PEERS_GRACE_S = 5.0  # for the other hosts' ranks to end by themselves, with a better reason, after one has failed
_LEADER_TIMEOUT_S = 300.0
_STOPPED_LEADER_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Plan:
    """What to run, where, and how often.

    root: of the checkpoints, on a file system all hosts share. run_id: names this launch, the same on all its hosts and
    never used before. job: the same for all launches of one job. nnodes, node_rank, master_addr: this host among those
    of the launch, and where the first one is reached. hang_timeout: seconds without progress, and a try is
    killed; until its first sign of life it has at least START_TIMEOUT_S.
    """

    root: Path
    run_id: str
    job: str
    command: Sequence[str]
    nnodes: int
    node_rank: int
    master_addr: str
    hang_timeout: float = HANG_TIMEOUT_S
    limits: Limits = field(default_factory=Limits)


def supervise(plan: Plan, environment: Mapping[str, str] = os.environ) -> int:
    """Run `plan` to its end; returns the exit code of its outcome (`outcome.EXIT_CODES`).

    Raises ConfigurationError before anything is started for a plan that cannot be served.
    """
    check_command(plan.command, plan.nnodes)
    launch = open_launch(plan.root, plan.run_id)
    with processes.signals_held():
        private = Path(tempfile.mkdtemp(prefix="megaresume-"))
        try:
            end = _Supervisor(plan, launch, private, environment).run()
        finally:
            shutil.rmtree(private, ignore_errors=True)
    reason = (end.reason or "all trained").rstrip(".")
    logger.info("%s: %s. Exit code %d", end.outcome, reason, EXIT_CODES[end.outcome])
    return EXIT_CODES[end.outcome]


class _Supervisor:
    def __init__(self, plan: Plan, launch: Launch, private: Path, environment: Mapping[str, str]) -> None:
        self._plan, self._launch, self._environment = plan, launch, environment
        self._stop_file, self._heartbeat = private / "stop", private / "heartbeat"
        self._leads = plan.node_rank == 0
        self._others: set[str] = set()
        self._stop: str | None = None
        self._running: int | None = None

    def run(self) -> End:
        if self._leads:
            fs.make_directory(self._launch.directory)
            if self._launch.tries() or self._launch.read_end() is not None:
                raise ConfigurationError(
                    f"{self._launch.directory}: --run-id {self._plan.run_id} was used before; give every launch another"
                )
            self._others = launch_names(self._plan.root)
        number = 1
        while True:
            record = self._begin(number) if self._leads else self._await_leader(number)
            if isinstance(record, End):
                return self._finish(record)
            end = self._run_try(record)
            if not self._leads:
                number += 1
                continue
            self._launch.write_try_end(number, end)
            last = self._verdict(end)
            if last is not None:
                return self._finish(last)
            number += 1

    def _finish(self, end: End) -> End:
        if self._leads:
            self._launch.write_end(end)
        return end

    # --- the leader --------------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> Try | End:
        """The next try, recorded; or the end of the launch."""
        past = [each for each in past_tries(self._plan.root) if each.record.job == self._plan.job]
        commit = newest_commit(self._plan.root)
        reason = reason_to_give_up(past, commit, self._plan.limits)
        if reason is not None:
            return _end(CRASHED, reason)
        if number > 1 and not self._pause(past, commit):
            return _end(STOPPED, self._stop or "")
        record = Try(
            number=number,
            job=self._plan.job,
            started=time.time(),
            commit=commit,
            master_addr=self._plan.master_addr,
            master_port=_free_port(),
            nnodes=self._plan.nnodes,
            host=socket.gethostname(),
            earlier=len(past),
        )
        self._launch.write_try(record)
        logger.info(
            "===== try %d of job %s (launch %s, try %d in it): %d node(s), %s =====",
            len(past) + 1,
            self._plan.job,
            self._plan.run_id,
            number,
            self._plan.nnodes,
            "from the beginning" if commit is None else f"the newest checkpoint is step {commit[1]}",
        )
        return record

    def _pause(self, past: Sequence[PastTry], commit: Commit | None) -> bool:
        """Wait before trying again; False where a stop is asked for meanwhile."""
        seconds = pause_before_next(past, commit)
        logger.info("trying again in %.0f s", seconds)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._stop is None:
            self._listen(min(left, _LOOK_EVERY_S))
        return self._stop is None

    def _verdict(self, end: End) -> End | None:
        """How the launch ends after a try ended so; None where there is to be another."""
        if end.outcome in (FINISHED, STOPPED, REFUSED, DAMAGED):
            return end
        superseded = self._superseded()
        if superseded is not None:
            return _end(REFUSED, superseded)
        if self._stop is not None:
            # Whoever asked wants the processes gone, not another try; the crash counts all the same.
            return _end(STOPPED, f"{self._stop}; but the run crashed before it had saved: {end.reason}")
        return None

    def _superseded(self) -> str | None:
        newer = launch_names(self._plan.root) - self._others - {self._plan.run_id}
        if not self._leads or not newer:
            return None
        return f"superseded: launch {sorted(newer)[-1]} has begun in {self._plan.root} since; this one must not go on"

    # --- the others --------------------------------------------------------------------------------------------------

    def _await_leader(self, number: int) -> Try | End:
        """What the leader has decided; a crash where it says nothing: its host is lost, or looks at another root."""
        deadline, asked = time.monotonic() + _LEADER_TIMEOUT_S, self._stop is not None
        while time.monotonic() < deadline:
            if self._stop is not None and not asked:
                # The scheduler wants this host now; a leader that is there hears the same, and ends within this time.
                deadline, asked = min(deadline, time.monotonic() + _STOPPED_LEADER_TIMEOUT_S), True
            end = self._launch.read_end()
            record = self._launch.read_try(number)
            if end is not None or record is not None:
                return end or record or _end(CRASHED, "unreachable")
            self._listen(_LOOK_EVERY_S / 2)
        where = self._launch.directory
        return _end(CRASHED, f"no word from node rank 0 in {where}: is its host lost, or the root not shared?")

    # --- a try -------------------------------------------------------------------------------------------------------

    def _run_try(self, record: Try) -> End:
        self._heartbeat.unlink(missing_ok=True)
        command = build_command(self._plan.command, record, run_id=self._plan.run_id, node_rank=self._plan.node_rank)
        environment = build_environment(
            self._environment, self._launch, record, stop_file=self._stop_file, heartbeat_file=self._heartbeat
        )
        try:
            child = processes.start(command, environment)
        except OSError as error:
            # Not a crash that may pass: the same command will be missing the next time.
            return _end(REFUSED, f"{command[0]} cannot be started: {error.strerror}")
        self._running = record.number
        self._record_stop()
        killed = self._watch(child, record.number)
        processes.kill_descendants(child)
        self._running = None
        return self._judge(record, child.returncode, killed)

    def _watch(self, child: subprocess.Popen[bytes], number: int) -> str | None:
        """Wait for torchrun to end; returns why it has to be killed where it doesn't."""
        beat, beat_at = self._heartbeat_now(), time.monotonic()
        peers_deadline, peers_reason = float("inf"), ""
        while child.poll() is None:
            self._listen(_LOOK_EVERY_S)
            processes.reap_adopted(child)
            now = time.monotonic()
            if (current := self._heartbeat_now()) != beat:
                beat, beat_at = current, now
            patience = self._plan.hang_timeout if beat else max(self._plan.hang_timeout, START_TIMEOUT_S)
            if now - beat_at > patience:
                return f"no progress for {patience:.0f} s; the last sign of life: {beat or 'none at all'}"
            failed = self._launch.read_failed(number) if self._plan.nnodes > 1 else None
            if failed is not None and peers_deadline == float("inf"):
                peers_deadline, peers_reason = now + _PEERS_GRACE_S, failed
            if now > peers_deadline:
                return f"ended, since another host had lost its part: {peers_reason}"
            superseded = self._superseded()
            if superseded is not None:
                return superseded
        return None

    def _judge(self, record: Try, code: int | None, killed: str | None) -> End:
        """How a try ended. The run's own word counts before torchrun's exit code, which is 1 after a clean stop too."""
        status = read_status(self._launch.status_file(record.number))
        if status is not None and killed is None and status.outcome != CRASHED:
            return _end(status.outcome, status.reason)
        if status is not None and status.outcome in (FINISHED, STOPPED):
            return _end(status.outcome, f"{status.reason} (then killed: {killed})")
        if status is None and killed is None and code == 0:
            return _end(FINISHED, "exit code 0; the run wrote no status, so it may have left before its end")
        if killed is not None and killed.startswith("superseded"):
            return _end(REFUSED, killed)
        reason = killed or (status.reason if status else None) or _exit_text(code)
        if self._stop is not None and status is None and killed is None:
            # It had not come so far as to have anything to save, or the whole job is being killed.
            return _end(STOPPED, f"{self._stop}; it ended ({_exit_text(code)}) before the run could say how")
        if self._plan.nnodes > 1:
            self._launch.write_failed(record.number, socket.gethostname(), reason)
        logger.error("try %d crashed: %s", record.number, reason)
        return _end(CRASHED, reason)

    def _heartbeat_now(self) -> str:
        try:
            return self._heartbeat.read_text("utf-8").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return ""

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        """Wait so long, or until a child ends or a signal comes; the first signal becomes the stop file."""
        received = processes.wait(seconds)
        if self._stop is None and os.path.lexists(self._launch.stop_file):
            self._ask_to_stop(reason_in(self._launch.stop_file))
        if received is None:
            return
        if self._stop is None:
            self._ask_to_stop(signal.Signals(received).name)
        else:
            logger.info("%s: a stop was asked for already (%s)", signal.Signals(received).name, self._stop)

    def _ask_to_stop(self, why: str) -> None:
        self._stop = why
        self._stop_file.write_text(f"{why}\n", "utf-8")
        self._record_stop()
        logger.info("%s: the run is asked to save and stop; waiting for it", why)

    def _record_stop(self) -> None:
        """A try that is killed in the middle of its last save was stopped all the same: it did not crash."""
        if self._leads and self._running is not None and self._stop is not None:
            self._launch.write_try_end(
                self._running, _end(STOPPED, f"{self._stop}; killed before it had said how it ended")
            )


def newest_commit(root: Path) -> Commit | None:
    """The checkpoint the next try would go on from; None where there is none."""
    candidates, _ = find_candidates(root)
    return (candidates[0].attempt, candidates[0].step) if candidates else None


def _end(outcome: str, reason: str) -> End:
    return End(outcome, reason, time.time())


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
