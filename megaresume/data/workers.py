"""Worker processes leave the stop signals to the training process.

torchrun and Slurm signal the whole process group. A worker that dies of it takes its rank along before the step that
would have saved; torch installs a TERM handler of its own in each worker, so an inherited "ignore" is lost. Linux only.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable


class IgnoreStopSignals:
    """A `worker_init_fn`: the worker ignores TERM and USR1, then runs the user's own function.

    TERM from the training process itself still ends it: that is how torch and multiprocessing get rid of a worker that
    does not answer, and a rank whose worker ignored even that would hang at its exit for ever.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self._inner = inner

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        trainer = multiprocessing.parent_process()
        if trainer is not None:
            # Only a waiting thread learns who sent a signal. Blocked signals reach it although they are ignored.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_when_told_by, args=(trainer.pid,), daemon=True).start()
        if self._inner is not None:
            self._inner(worker_id)


def _end_when_told_by(trainer: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)
