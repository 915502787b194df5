"""Kills a run at every system call that changes the disk, and sees what the next start finds. Run as a program, by
`test_commit.py`: a process that has loaded neither torch nor pytest forks in a millisecond.

The run: attempt 1 committed steps 10, 20 and 30. Attempt 2 goes back to step 20, saves 30 (where attempt 1's stands in
the way) and 40, then removes what is beyond the last two. After each kill a third attempt must find the last committed
step of its branch, whole, and be able to go on from there; nothing may be left that needs a person.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path

from megaresume.store.attempts import newest_attempt_number
from megaresume.store.control import ControlPlane
from megaresume.store.discovery import find_candidates
from megaresume.store.retention import prune, remove_leftovers
from tests.store.worlds import FaultyOs, MemoryStore, assert_whole, claim, leftovers, save, save_alone, sound_disk

KILLED = 9


def life(root: Path, report: int) -> None:
    """The run that is killed somewhere; writes the number of each step to `report` once its save has returned."""
    control = ControlPlane(MemoryStore(), 0, 1)
    attempt = claim(root, (1, 20))
    os.write(report, b"20 ")
    remove_leftovers(root, attempt=attempt.attempt)
    for step in (30, 40):
        save(root, control, attempt, step)
        os.write(report, f"{step} ".encode())
        prune(root, keep_last=2, attempt=attempt.attempt)


def killed_at(root: Path, k: int, *, half: bool) -> tuple[bool, list[int]]:
    """Run `life` in a child that ends at the k-th call, before it or in the middle of its write.

    Returns whether it was killed, and the steps it had reported.
    """
    reader, report = os.pipe()
    child = os.fork()
    if child == 0:

        def kill() -> None:
            os._exit(KILLED)

        def act(count: int, name: str, path: str) -> str | None:
            if count == k:
                return "half" if half else kill()  # type: ignore[func-returns-value]
            return None

        try:
            with FaultyOs(act, after_half=kill):
                life(root, report)
        except BaseException as error:
            print(f"call {k}: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    os.close(report)
    with os.fdopen(reader, "rb") as file:
        steps = [int(step) for step in file.read().split()]
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), f"call {k}: exit code {code}"
    return code == KILLED, steps


def check(root: Path, reported: list[int]) -> tuple[int, int]:
    """What the next start finds, goes on from, and leaves behind. Returns the (attempt, step) it resumed from."""
    candidates, _ = find_candidates(root)
    found = candidates[0]
    assert_whole(found)
    if newest_attempt_number(root) == 1:  # killed before its claim: attempt 1 is still the run
        assert not reported and (found.attempt, found.step) == (1, 30), found
    else:
        last = reported[-1] if reported else 20
        may_be = {last, *{20: {30}, 30: {40}, 40: set()}[last]}  # a save may be committed before it has returned
        assert found.step in may_be and found.attempt == (1 if found.step == 20 else 2), (found, reported)
    next_attempt = claim(root, (found.attempt, found.step))
    remove_leftovers(root, attempt=next_attempt.attempt)
    save_alone(root, next_attempt, found.step + 10)
    prune(root, keep_last=1, attempt=next_attempt.attempt)
    candidates, _ = find_candidates(root)
    assert [(one.attempt, one.step) for one in candidates] == [(next_attempt.attempt, found.step + 10)], candidates
    assert_whole(candidates[0])
    assert not leftovers(root), os.listdir(root)
    return found.attempt, found.step


def main() -> None:
    found: set[tuple[int, int]] = set()
    kills = 0
    logging.disable()
    with tempfile.TemporaryDirectory() as directory, sound_disk():
        for half in (False, True):
            for k in range(1, 1000):
                root = Path(directory, f"{half}-{k}")
                save_alone(root, claim(root), 10, 20, 30)
                killed, reported = killed_at(root, k, half=half)
                found.add(check(root, reported))
                kills += killed
                if not killed:
                    assert reported == [20, 30, 40]
                    break
    assert found == {(1, 30), (1, 20), (2, 30), (2, 40)}, found
    print(f"{kills} kills")


if __name__ == "__main__":
    main()
