"""cookbook/tp_resume.py, with the accidents that a test asks for by its environment.

TRAINEE_STEP_S=0.5              a step takes half a second longer
TRAINEE_STOP_SAVE_S=40          a save off the save interval, as a stop makes it, takes 40 s longer
TRAINEE_SEGV=17:2:/tmp/done     rank 2 dies of a segmentation fault after step 17, once (the file remembers)
TRAINEE_CRASH=start, or =17     every try ends with an error before it has begun, or after step 17
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def main() -> None:
    if os.environ.get("TRAINEE_CRASH") == "start":
        raise RuntimeError("this one crashes always")
    sys.path.insert(0, str(REPOSITORY))
    from cookbook import tp_resume
    from megaresume import ResumeManager, saving

    end_step, save_checkpoint = ResumeManager.end_step, saving.save_checkpoint
    interval = int(sys.argv[sys.argv.index("--save-interval") + 1])

    def with_accidents(manager: ResumeManager, **values: Any) -> None:
        time.sleep(float(os.environ.get("TRAINEE_STEP_S", "0")))
        end_step(manager, **values)
        fall_over(manager.step)

    def slow_save(*args: Any, step: int, **values: Any) -> Any:
        seconds = float(os.environ.get("TRAINEE_STOP_SAVE_S", "0")) if step % interval else 0.0
        time.sleep(seconds)
        report = save_checkpoint(*args, step=step, **values)
        return dataclasses.replace(report, seconds=report.seconds + seconds)

    ResumeManager.end_step = with_accidents  # type: ignore[method-assign]
    saving.save_checkpoint = slow_save
    tp_resume.main()


def fall_over(step: int) -> None:
    if os.environ.get("TRAINEE_CRASH") == str(step):
        raise RuntimeError("this one crashes always")
    if "TRAINEE_SEGV" in os.environ:
        at, rank, marker = os.environ["TRAINEE_SEGV"].split(":", 2)
        if (str(step), os.environ["RANK"]) == (at, rank) and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGSEGV)


if __name__ == "__main__":
    main()
