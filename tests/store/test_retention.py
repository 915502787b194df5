"""What is removed, and above all what never is."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaresume.errors import ConfigurationError
from megaresume.store import fs, layout
from megaresume.store.discovery import find_candidates
from megaresume.store.retention import prune, remove_leftovers
from tests.store.worlds import FaultyOs, assert_whole, claim, leftovers, save_alone, sound_disk


@pytest.fixture(autouse=True)
def _quick_disk() -> Iterator[None]:
    with sound_disk():
        yield


def steps(root: Path) -> list[int]:
    return sorted(candidate.step for candidate in find_candidates(root)[0])


def test_a06_the_last_n_by_number_stay(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 200, 1000, 9000, 10000, 10100)
    removed = prune(tmp_path, keep_last=2, attempt=attempt.attempt)
    assert [path.name for path in removed] == ["step-00000200", "step-00001000", "step-00009000"]
    assert steps(tmp_path) == [10000, 10100] and not leftovers(tmp_path)
    assert prune(tmp_path, keep_last=2, attempt=attempt.attempt) == []


def test_a22_time_stamps_decide_nothing(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10, 20, 30)
    for step, time in ((10, 4e9), (20, 2e9), (30, 0)):
        os.utime(tmp_path / layout.step_directory(step), (time, time))
    prune(tmp_path, keep_last=1, attempt=1)
    assert steps(tmp_path) == [30]


def test_a08_at_every_call_a_whole_checkpoint_exists(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10, 20)

    def look(count: int, name: str, path: str) -> str | None:
        candidates, _ = find_candidates(tmp_path)
        assert candidates[0].step == 20
        assert_whole(candidates[0])
        return None

    with FaultyOs(look) as disk:
        prune(tmp_path, keep_last=1, attempt=1)
    assert disk.count > 5 and steps(tmp_path) == [20]


def test_the_newest_checkpoint_that_is_whole_is_kept_whatever_stands_above_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10, 20, 30, 40)
    for step in (30, 40):
        (tmp_path / layout.step_directory(step) / "tp00-pp00-dp00.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        prune(tmp_path, keep_last=1, attempt=1)
    assert steps(tmp_path) == [20, 40]
    assert caplog.text.count("not counted as a checkpoint to go back to") == 2
    (tmp_path / "step-00000020" / layout.TRAINER_STATE).unlink()
    assert prune(tmp_path, keep_last=1, attempt=1) == []


def test_u02_nothing_that_is_not_ours_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10, 20, 30)
    (tmp_path / "step-00000010" / "notes.txt").write_text("mine")
    foreign = ["step_10-hf", "checkpoint-final", ".trash-mine", ".staging-mine", "step-5", "lost+found"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    with caplog.at_level(logging.WARNING):
        prune(tmp_path, keep_last=1, attempt=1)
    remove_leftovers(tmp_path, attempt=99)
    assert all((tmp_path / name / "file").exists() for name in foreign)
    assert steps(tmp_path) == [10, 30] and "notes.txt" in caplog.text


def test_what_lies_off_the_branch_is_kept(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10, 20, 30)
    back = claim(tmp_path, (1, 10))
    save_alone(tmp_path, back, 20, 25)
    prune(tmp_path, keep_last=1, attempt=2)
    assert steps(tmp_path) == [25]
    assert {"step-00000020.a0002", "step-00000030"} <= set(os.listdir(tmp_path))


def test_an_orphan_removes_nothing(tmp_path: Path) -> None:
    old = claim(tmp_path)
    save_alone(tmp_path, old, 10, 20)
    claim(tmp_path, (1, 20))
    assert prune(tmp_path, keep_last=1, attempt=old.attempt) == []
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("step-")) == [
        "step-00000010",
        "step-00000020",
    ]


def test_a08_files_that_vanish_during_the_removal_are_no_error(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10, 20, 30)

    def vanish(count: int, name: str, path: str) -> str | None:
        if name == "unlink" and os.path.exists(path):
            os.unlink(path)
        if name == "rename" and "step-00000010" in path:
            raise FileNotFoundError(errno.ENOENT, "gone", path)
        return None

    with FaultyOs(vanish):
        assert [path.name for path in prune(tmp_path, keep_last=1, attempt=attempt.attempt)] == ["step-00000020"]
    assert not leftovers(tmp_path)


def test_a_removal_that_fails_at_any_call_never_fails_the_run_and_is_done_the_next_time(tmp_path: Path) -> None:
    for k in range(1, 100):
        root = tmp_path / str(k)
        save_alone(root, claim(root), 10, 20)

        def fail(count: int, name: str, path: str, k: int = k) -> str | None:
            if count == k:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return None

        with FaultyOs(fail) as disk:
            prune(root, keep_last=1, attempt=1)
        assert steps(root)[-1] == 20
        remove_leftovers(root, attempt=2)
        prune(root, keep_last=1, attempt=1)
        assert steps(root) == [20] and not leftovers(root)
        if disk.count < k:
            return
    pytest.fail("more calls than expected")


def test_leftovers_of_older_attempts_go_and_a_save_under_way_stays(tmp_path: Path) -> None:
    claim(tmp_path)
    for step, attempt in ((30, 1), (40, 2), (50, 3)):
        fs.make_directory(tmp_path / layout.staging_directory(step, attempt))
        (tmp_path / layout.staging_directory(step, attempt) / "half").write_text("")
    fs.make_directory(tmp_path / ".trash-step-00000010-0123abcd")
    fs.make_directory(tmp_path / ".trash-step-00000010.a0002-0123abcd")
    removed = remove_leftovers(tmp_path, attempt=2)
    assert len(removed) == 3
    assert sorted(leftovers(tmp_path)) == [layout.staging_directory(40, 2), layout.staging_directory(50, 3)]


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_none_is_refused(tmp_path: Path, keep_last: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        prune(tmp_path, keep_last=keep_last, attempt=1)


@pytest.mark.parametrize(("finite", "stay"), [((10, 20), [20, 40, 50]), ((10, 50), [40, 50]), ((), [40, 50])])
def test_a18_the_newest_healthy_checkpoint_outlives_the_last_n(
    finite: tuple[int, ...], stay: list[int], tmp_path: Path
) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10, 20, 30, 40, 50)
    healthy = {tmp_path / layout.step_directory(step) for step in finite}
    prune(tmp_path, keep_last=2, attempt=attempt.attempt, unhealthy=lambda path: None if path in healthy else "NaN")
    assert steps(tmp_path) == stay
