"""Processes of one try: started out of reach of stop signals, waited for together with them, killed to the last one.

torchrun gives every worker a session of its own, so that killing its process group reaches none of them: the supervisor
adopts what its children leave behind, and finds all by descent. Linux only. Decides nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

logger = logging.getLogger("megaresume.launch.processes")

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
_PR_SET_CHILD_SUBREAPER = 36
_KILL_S = 30.0


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Stop signals and SIGCHLD are kept for `wait` from here on: none is lost between two looks, no handler runs."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS | {signal.SIGCHLD})
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        logger.warning("orphaned workers cannot be adopted here; a worker may outlive a torchrun that was killed")
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own, deaf to the stop signals: where a scheduler signals every process of a
    job, torchrun would kill its workers before they have saved. OSError where there is no such program."""
    return subprocess.Popen(
        list(command), env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_deafen
    )


def _deafen() -> None:
    for each in STOP_SIGNALS - {signal.SIGINT}:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS | {signal.SIGCHLD})


def wait(seconds: float) -> signal.Signals | None:
    """The next held stop signal; None after `seconds`, or at once when a child has ended. Reaps adopted children."""
    info = signal.sigtimedwait(STOP_SIGNALS | {signal.SIGCHLD}, seconds)
    if info is None or info.si_signo == signal.SIGCHLD:
        return None
    return signal.Signals(info.si_signo)


def reap_adopted(own: subprocess.Popen[bytes]) -> None:
    """Collect ended children that are not `own`, whose exit code is its Popen's to collect."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.pid != own.pid and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def kill_descendants(own: subprocess.Popen[bytes]) -> int:
    """SIGKILL every descendant of this process, stopped ones too, until none is left; returns how many there were."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        alive = [each for each in psutil.Process().children(recursive=True) if _lives(each)]
        if not alive:
            break
        for each in alive:
            with contextlib.suppress(psutil.Error):
                each.kill()
                killed.add(each.pid)
        time.sleep(0.05)
        own.poll()
        reap_adopted(own)
    else:
        logger.error("processes that cannot be killed: %s", ", ".join(map(str, sorted(killed))))
    own.poll()
    reap_adopted(own)
    return len(killed)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
