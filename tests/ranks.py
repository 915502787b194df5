"""A pool of started ranks for tests: real processes under torch.distributed (gloo), started once and used many times.

Importing torch and megatron-core takes seconds per process; here a forkserver does it once, and ranks are forked from
it. Tests get the pool as the fixture `ranks`:

    def losses(config, steps):                      # a function of a module, run on every rank
        return [result.loss for result in train(config, steps)]

    def test_it(ranks):
        first, *others = ranks.run(losses, SmallModel(tp=2), 3, world_size=2)       # one result per rank

Every run gets a torch.distributed of its own (a fresh default group of `world_size` ranks), so any topology can follow
any other. Processes live on from run to run: what a function leaves behind in module globals, signal handlers or the
environment, the next one finds. Knows nothing of megaresume.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

MAX_WORLD_SIZE = 8
PRELOAD = ["tests.ranks", "tests.small_models"]

# How long the other ranks get to come back after one has failed: they may wait for it in a collective.
_GRACE_S = 10.0

# A gloo group that something still holds keeps its threads; some hundreds of them in every rank slow all ranks down.
_MAX_THREADS = 200

_LET_GO = b"let go"


class RankTraceback(Exception):
    """What failing ranks printed; the cause of the exception that `run` raises."""

    def __str__(self) -> str:
        return "\n" + "\n".join(map(str, self.args))


class RankDied(Exception):
    """A rank's process ended, or was killed after it hung; `exit_codes` holds one per rank, None where it lived."""

    def __init__(self, message: str, exit_codes: list[int | None]) -> None:
        super().__init__(message)
        self.exit_codes = exit_codes


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection
    stacks: Path
    """Where the process writes its Python stacks when it is aborted."""


@dataclass(frozen=True)
class _Failure:
    """A rank's exception on its way to the test; `exception` is None where it can't be pickled."""

    text: str
    exception: BaseException | None


class Ranks:
    """The pool. Ranks are started when first needed; after a death or a hang all are started anew on the next run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks: list[_Rank] = []
        self._runs = 0

    def run(self, function: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = 120.0) -> list[Any]:
        """Call `function(*args)` on ranks 0 .. world_size-1 at once; return their results, by rank.

        The function (module-level), the arguments and the results are pickled. The first exception of any rank is
        raised here, with the ranks' tracebacks as its cause. RankDied is raised when a process ends, or when
        `timeout_s` passes; then with the stacks of the ranks that hung.
        """
        __tracebackhide__ = True
        assert 1 <= world_size <= MAX_WORLD_SIZE
        if any(_threads(rank) > _MAX_THREADS for rank in self._ranks):
            self.close()
        while len(self._ranks) < world_size:
            self._ranks.append(_start(len(self._ranks), self._directory))
        self._runs += 1
        store = str(self._directory / f"store-{self._runs}")
        ranks = self._ranks[:world_size]
        for index, rank in enumerate(ranks):
            message = pickle.dumps((function, args, index, world_size, store, timeout_s))
            with contextlib.suppress(OSError):  # it died between two runs: `_collect` reports it
                rank.connection.send_bytes(message)
        outcomes = _collect(ranks, timeout_s)
        if None in outcomes.values():
            lost = _lost(ranks, outcomes, function.__name__, timeout_s)
            self.close()
            raise lost
        failures = {index: outcome for index, outcome in outcomes.items() if isinstance(outcome, _Failure)}
        if failures:
            _raise(failures)
        return [outcomes[index][0] for index in range(world_size)]

    def close(self) -> None:
        """End all ranks' processes with SIGKILL; the next run starts fresh ones (0.1 s each)."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []


def _threads(rank: _Rank) -> int:
    try:
        return psutil.Process(rank.process.pid).num_threads()
    except psutil.Error:  # it died between two runs: `_collect` reports it
        return 0


def _start(index: int, directory: Path) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    stacks = directory / f"stacks-{index}"
    process = context.Process(target=_serve, args=(theirs, stacks), name=f"rank {index}", daemon=True)
    with _environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1"):
        process.start()  # the first one starts the forkserver, whose preloading reads PYTHONPATH and nothing else
    theirs.close()
    return _Rank(process, ours, stacks)


@contextlib.contextmanager
def _environment(**values: str) -> Any:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _collect(ranks: list[_Rank], timeout_s: float) -> dict[int, Any]:
    """One outcome per rank, in order of arrival: (result,), a _Failure, or None for a rank that died or hung.

    Ranks that have reported are let go, their process groups with them, only when all have: one that leaves early
    breaks connections that others still make. After a failure that is wanted, for the others may wait in a collective.
    """
    outcomes: dict[int, Any] = {}
    waiting: dict[Any, int] = {rank.connection: index for index, rank in enumerate(ranks)}
    held: list[Any] = []
    failed = False
    deadline = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline:
        ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for connection in ready:
            index = waiting.pop(connection)
            try:
                outcomes[index] = pickle.loads(connection.recv_bytes())
                held.append(connection)
            except (EOFError, OSError):
                outcomes[index] = None
            if not failed and not isinstance(outcomes[index], tuple):
                failed = True
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        while held and (failed or not waiting):
            with contextlib.suppress(OSError):
                held.pop().send_bytes(_LET_GO)
    return outcomes | dict.fromkeys(waiting.values())


def _lost(ranks: list[_Rank], outcomes: dict[int, Any], name: str, timeout_s: float) -> RankDied:
    """The error for ranks that died or hung. The hung ones are aborted, so that they tell where they stood."""
    lost = [index for index in range(len(ranks)) if outcomes[index] is None]
    died = [index for index in lost if _ended(ranks[index])]
    hung = [index for index in lost if index not in died]
    exit_codes = [ranks[index].process.exitcode for index in range(len(ranks))]
    for index in hung:
        os.kill(ranks[index].process.pid or 0, signal.SIGABRT)
    for index in hung:
        ranks[index].process.join(5.0)
    lines = [f"rank {index} ended with exit code {exit_codes[index]}" for index in died]
    lines += [
        f"rank {index} did not come back from {name} within {timeout_s:g} s of the start, or {_GRACE_S:g} s of "
        f"another's failure:\n{ranks[index].stacks.read_text()}"
        for index in hung
    ]
    lines += [
        f"rank {index} raised:\n{outcome.text}" for index, outcome in outcomes.items() if isinstance(outcome, _Failure)
    ]
    return RankDied("\n".join(lines), exit_codes)


def _ended(rank: _Rank) -> bool:
    """Whether the process is gone; one whose pipe broke is given a moment to be."""
    rank.process.join(0.5)
    return not rank.process.is_alive()


def _raise(failures: dict[int, _Failure]) -> None:
    """Raise the first failure to arrive: those of other ranks are often its echo (a broken connection)."""
    __tracebackhide__ = True
    texts = [f"rank {index}:\n{failure.text}" for index, failure in failures.items()]
    cause = RankTraceback(*texts)
    exception = next(iter(failures.values())).exception
    if exception is None:
        raise cause
    raise exception from cause


def _serve(connection: Connection, stacks: Path) -> None:
    """A rank's process: run what comes down the pipe, until the pipe is closed."""
    import torch
    from megatron.core import parallel_state

    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=open(stacks, "w"))  # noqa: SIM115 (it stays open for the process's life)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.freeze()  # what was preloaded stays out of collections: it is large, and shared with the other ranks
    while True:
        try:
            function, args, rank, world_size, store, timeout_s = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            torch.distributed.init_process_group(
                "gloo",
                store=torch.distributed.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
            message = pickle.dumps((function(*args),))
        except BaseException as error:
            message = pickle.dumps(_failure(error))
        connection.send_bytes(message)
        assert connection.recv_bytes() == _LET_GO
        parallel_state.destroy_model_parallel()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        gc.collect()  # models hold themselves in cycles, and with them their groups' threads and sockets


def _failure(error: BaseException) -> _Failure:
    text = "".join(traceback.format_exception(error)) + _innermost_locals(error)
    if isinstance(error, AssertionError) and not error.args:
        error.args = (traceback.extract_tb(error.__traceback__)[-1].line,)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return _Failure(text, None)
    return _Failure(text, error)


def _innermost_locals(error: BaseException) -> str:
    """The variables of the frame that raised: pytest does not explain assertions in other processes."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    lines = [f"    {name} = {_short(value)}\n" for name, value in frame.f_locals.items()]
    return "  with\n" + "".join(lines) if lines else ""


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raised {error!r}>"
    return text if len(text) <= 400 else text[:400] + "..."
