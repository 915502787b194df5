"""A checkpoint exists or it does not: every call fails once, every call is the last one, and orphans come late."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megaresume.errors import MegaresumeError, SaveError, SupersededError
from megaresume.store import commit as commit_module
from megaresume.store import control as control_module
from megaresume.store import fs, layout
from megaresume.store.attempts import Attempt, read_attempts
from megaresume.store.commit import save_checkpoint
from megaresume.store.control import ControlPlane
from megaresume.store.discovery import find_candidates
from megaresume.store.manifest import parse_manifest
from megaresume.store.shard import Entry, ShardIdentity
from tests.store.worlds import (
    FaultyOs,
    MemoryStore,
    assert_whole,
    claim,
    leftovers,
    no_space,
    run_ranks,
    save,
    save_alone,
    sound_disk,
)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(commit_module, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    with sound_disk():
        yield


def alone() -> ControlPlane:
    return ControlPlane(MemoryStore(), 0, 1)


def newest(root: Path, *, world_size: int = 1) -> tuple[int, int]:
    candidates, _ = find_candidates(root)
    assert_whole(candidates[0], world_size=world_size)
    return candidates[0].attempt, candidates[0].step


def test_a_save_of_several_ranks_is_one_directory(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    reports = run_ranks(3, lambda control: save(tmp_path, control, attempt, 10))
    assert newest(tmp_path, world_size=3) == (1, 10)
    directory = tmp_path / "step-00000010"
    manifest = parse_manifest(directory / layout.MANIFEST)
    assert sorted(os.listdir(directory)) == [
        "manifest.json",
        *(f"tp0{rank}-pp00-dp00.safetensors" for rank in range(3)),
        "trainer_state.json",
    ]
    sizes = sum((directory / name).stat().st_size for name in os.listdir(directory) if name != layout.MANIFEST)
    assert {(one.path, one.bytes_written, one.committed) for one in reports} == {(directory, sizes, True)}
    assert manifest.topology == {"tp": 3} and manifest.versions == {"megaresume": "test"}
    assert (tmp_path / layout.LATEST).read_text("utf-8") == "step-00000010\n"
    assert sorted(os.listdir(tmp_path)) == ["LATEST", "attempts", "step-00000010"]


def test_what_is_written_is_durable_before_it_has_its_name(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    with sound_disk() as faulty:
        save(tmp_path, alone(), attempt, 10)
    staging, target = tmp_path / layout.staging_directory(10, 1), tmp_path / layout.step_directory(10)
    moved = faulty.trace.index(("rename", f"{staging} -> {target}"))
    before, after = faulty.trace[:moved], faulty.trace[moved:]
    files = {path for name, path in before if name == "open" and Path(path).parent == staging}
    assert {Path(path).name for path in files} == {"manifest.json", "trainer_state.json", "tp00-pp00-dp00.safetensors"}
    last = {path: max(at for at, call in enumerate(before) if call[1] == path) for path in files}
    for path, at in last.items():
        assert before[at] == ("fsync", path), "a file changed after its fsync, or was never synced"
    assert before[-1] == ("fsync", str(staging)) and max(last.values()) < len(before) - 1
    manifest = last[str(staging / layout.MANIFEST)]
    assert all(at <= manifest for at in last.values()), "the manifest is written last"
    assert after[1:3] == [("open", str(tmp_path)), ("fsync", str(tmp_path))], "the root is synced before anything else"


def test_a11_a_save_returns_on_no_rank_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = claim(tmp_path)
    real = fs.rename

    def slow(source: Path, target: Path) -> None:
        time.sleep(0.3)
        real(source, target)

    monkeypatch.setattr(fs, "rename", slow)

    def act(control: ControlPlane) -> Any:
        report = save(tmp_path, control, attempt, 10)
        state = json.loads((report.path / layout.TRAINER_STATE).read_text("utf-8"))
        return state["global_step"], (tmp_path / layout.LATEST).read_text("utf-8")

    assert run_ranks(2, act) == [(10, "step-00000010\n")] * 2


# --- every call fails once ------------------------------------------------------------------------------------------


def fail_at(k: int, number: int, *, from_then_on: bool = False) -> Callable[[int, str, str], str | None]:
    def act(count: int, name: str, path: str) -> str | None:
        if count == k or (from_then_on and count > k):
            raise OSError(number, os.strerror(number), path)
        return None

    return act


@pytest.mark.parametrize("in_the_way", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a23_whichever_call_fails_the_save_fails_on_all_ranks_and_nothing_else_changes(
    tmp_path: Path, world_size: int, in_the_way: bool
) -> None:
    failures = 0
    for k in range(1, 200):
        root = tmp_path / str(k)
        attempt = _scene(root, world_size, in_the_way=in_the_way)
        before = _tree(root)
        with FaultyOs(fail_at(k, errno.ENOSPC)) as faulty:
            outcomes = run_ranks(world_size, lambda control, root=root, a=attempt: save(root, control, a, 20))
        if any(isinstance(one, BaseException) for one in outcomes):
            failures += 1
            assert [type(one) for one in outcomes] == [SaveError] * world_size, outcomes
            assert len({str(one) for one in outcomes}) == 1
            assert "No space left on device" in str(outcomes[0]) and str(root) in str(outcomes[0])
            assert newest(root, world_size=world_size) == (1, 10)
            assert _tree(root) == before
        else:
            assert newest(root, world_size=world_size) == (attempt.attempt, 20)
        assert not leftovers(root)
        assert not any(
            isinstance(one, BaseException)
            for one in run_ranks(world_size, lambda c, r=root, a=attempt: save(r, c, a, 30))
        )
        assert newest(root, world_size=world_size) == (attempt.attempt, 30)
        if faulty.count < k:
            break
    else:
        pytest.fail("more calls than expected")
    assert failures >= 15 + 4 * (world_size - 1)


def _scene(root: Path, world_size: int, *, in_the_way: bool) -> Attempt:
    """A root whose branch ends at (1, 10); with `in_the_way`, step 20 is there too and off the branch."""
    first = claim(root)
    for step in (10, 20) if in_the_way else (10,):
        run_ranks(world_size, lambda control, step=step: save(root, control, first, step))
    return claim(root, (1, 10)) if in_the_way else first


def _tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a23_a_disk_that_stays_broken_leaves_what_was_committed(tmp_path: Path) -> None:
    for k in range(1, 200):
        root = tmp_path / str(k)
        attempt = _scene(root, 1, in_the_way=True)
        with FaultyOs(fail_at(k, errno.EIO, from_then_on=True)) as faulty:
            outcome = run_ranks(1, lambda control, root=root, a=attempt: save(root, control, a, 20))[0]
        renamed = [path for name, path in faulty.trace[: k - 1] if name == "rename" and path.endswith("step-00000020")]
        if isinstance(outcome, BaseException):
            assert type(outcome) is SaveError
            # Where not even the rename back was possible the checkpoint is there, and whole: never half of one.
            assert newest(root) == ((attempt.attempt, 20) if renamed else (1, 10))
        else:
            assert newest(root) == (attempt.attempt, 20)
        if faulty.count < k:
            return
    pytest.fail("more calls than expected")


def test_a23_a_passing_error_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attempt = claim(tmp_path)

    def flicker(count: int, name: str, path: str) -> str | None:
        if name == "fsync" and path.endswith("manifest.json") and not tried.setdefault("manifest", 0):
            tried["manifest"] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if name == "writev" and path.endswith("tp01-pp00-dp00.safetensors") and tried.setdefault("shard", 0) < 2:
            tried["shard"] += 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return None

    tried: dict[str, int] = {}
    with FaultyOs(flicker), caplog.at_level(logging.WARNING):
        run_ranks(2, lambda control: save(tmp_path, control, attempt, 10))
    assert newest(tmp_path, world_size=2) == (1, 10) and tried == {"manifest": 1, "shard": 2}
    assert caplog.text.count("trying again") == 3


def test_a23_a_full_disk_on_one_rank_names_rank_path_and_bytes_on_all(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    run_ranks(3, lambda control: save(tmp_path, control, attempt, 10))

    def full(count: int, name: str, path: str) -> str | None:
        return "half" if name == "writev" and "tp01" in path else None

    def raise_full() -> None:
        raise no_space("tp01")

    with FaultyOs(full, after_half=raise_full):
        outcomes = run_ranks(3, lambda control: save(tmp_path, control, attempt, 20))
    assert len({(type(one), str(one)) for one in outcomes}) == 1
    text = str(outcomes[2])
    for part in ("save step 20", "rank 1 (tp01-pp00-dp00)", "tp01-pp00-dp00.safetensors", "ENOSPC", "4096 bytes"):
        assert part in text
    assert newest(tmp_path, world_size=3) == (1, 10) and not leftovers(tmp_path)


def test_a10_a_directory_that_another_host_made_and_this_one_does_not_see_yet(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    stale = {"makedirs": 1, "open": 2}

    def lag(count: int, name: str, path: str) -> str | None:
        if "staging" in path and stale.get(name, 0) and ("tp01" in path or name == "makedirs"):
            stale[name] -= 1
            number = errno.EEXIST if name == "makedirs" else errno.ENOENT
            raise OSError(number, os.strerror(number), path)
        return None

    with FaultyOs(lag):
        run_ranks(2, lambda control: save(tmp_path, control, attempt, 10))
    assert newest(tmp_path, world_size=2) == (1, 10) and stale == {"makedirs": 0, "open": 0}

    with FaultyOs(lambda count, name, path: _missing(path) if name == "open" and "tp01" in path else None):
        outcomes = run_ranks(2, lambda control: save(tmp_path, control, attempt, 20))
    assert len({str(one) for one in outcomes}) == 1 and "rank 1" in str(outcomes[0]) and "ENOENT" in str(outcomes[0])


def _missing(path: str) -> None:
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def test_a_shard_that_rank_0_cannot_see_is_never_named_by_a_manifest(tmp_path: Path) -> None:
    attempt = claim(tmp_path)

    def act(control: ControlPlane) -> Any:
        def vanish() -> None:
            while not list(tmp_path.glob(".staging-*/tp01*")):
                time.sleep(0.01)
            time.sleep(0.2)
            for path in tmp_path.glob(".staging-*/tp01*"):
                path.unlink()

        return save(tmp_path, control, attempt, 10, describe=vanish)

    outcomes = run_ranks(2, act)
    assert {type(one) for one in outcomes} == {SaveError} and "tp01-pp00-dp00.safetensors: written by its rank" in str(
        outcomes[1]
    )
    assert find_candidates(tmp_path) == ([], []) and not leftovers(tmp_path)


# --- every call is the last one -------------------------------------------------------------------------------------


def test_a01_a_kill_at_any_call_leaves_a_root_that_resumes_from_the_last_commit_of_its_branch() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.kill_loop"], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 100, done.stdout


# --- two processes, two attempts ------------------------------------------------------------------------------------


def test_a13_an_orphan_of_an_older_start_is_refused_before_it_writes_and_is_told_by_whom(tmp_path: Path) -> None:
    old = claim(tmp_path)
    save_alone(tmp_path, old, 10)
    new = claim(tmp_path, (1, 10), job_id="4712")
    with sound_disk() as faulty:
        outcomes = run_ranks(2, lambda control: save(tmp_path, control, old, 20))
    assert faulty.count == 0
    assert {type(one) for one in outcomes} == {SupersededError} and len({str(one) for one in outcomes}) == 1
    for part in ("attempt 2", f"host {new.host}", "job 4712", f"started {new.started}", "attempt 1"):
        assert part in str(outcomes[0])
    save_alone(tmp_path, new, 20)
    assert newest(tmp_path) == (2, 20)


def test_a13_an_orphan_that_was_overtaken_during_its_save_does_not_commit(tmp_path: Path) -> None:
    old = claim(tmp_path)
    save_alone(tmp_path, old, 10)
    outcomes = run_ranks(
        2, lambda control: save(tmp_path, control, old, 20, describe=lambda: claim(tmp_path, (1, 10)) and None)
    )
    assert {type(one) for one in outcomes} == {SupersededError}
    assert newest(tmp_path) == (1, 10) and not leftovers(tmp_path)
    assert [one.attempt for one in read_attempts(tmp_path)] == [1, 2]


def test_a13_two_starts_write_at_the_same_time_and_never_into_one_checkpoint(tmp_path: Path) -> None:
    old = claim(tmp_path)
    save_alone(tmp_path, old, 10)
    outcomes: dict[str, Any] = {}
    may_go_on, waiting = threading.Event(), threading.Event()

    def pause() -> None:
        waiting.set()
        may_go_on.wait(20)

    def orphan() -> None:
        outcomes["old"] = run_ranks(1, lambda control: save(tmp_path, control, old, 20, describe=pause))[0]

    thread = threading.Thread(target=orphan)
    thread.start()
    waiting.wait(20)
    new = claim(tmp_path, (1, 10))
    save_alone(tmp_path, new, 20)
    may_go_on.set()
    thread.join()
    assert isinstance(outcomes["old"], SupersededError)
    assert newest(tmp_path) == (2, 20)


def test_what_stands_in_the_way_is_renamed_aside_and_never_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = claim(tmp_path)
    save_alone(tmp_path, first, 10, 20)
    kept = _tree(tmp_path / "step-00000020")
    second = claim(tmp_path, (1, 10))
    with caplog.at_level(logging.WARNING):
        save_alone(tmp_path, second, 20)
    assert _tree(tmp_path / "step-00000020.a0002") == kept
    assert newest(tmp_path) == (2, 20)
    assert "stood in the way" in caplog.text and "step-00000020.a0002" in caplog.text
    (tmp_path / "step-00000030").write_text("a file")
    (tmp_path / "step-00000030.a0002").mkdir()
    save_alone(tmp_path, second, 30)
    assert (tmp_path / "step-00000030.a0002.2").read_text() == "a file"
    assert newest(tmp_path) == (2, 30)


def test_a_damaged_checkpoint_of_this_very_attempt_is_renamed_aside_too(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10)
    (tmp_path / "step-00000010" / layout.MANIFEST).write_text("{")
    save_alone(tmp_path, attempt, 10)
    assert newest(tmp_path) == (1, 10) and (tmp_path / "step-00000010.a0001").is_dir()


def test_a_step_that_this_attempt_has_committed_is_reported_and_not_written_again(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    first = run_ranks(2, lambda control: save(tmp_path, control, attempt, 10))
    before = _tree(tmp_path)
    with sound_disk() as faulty:
        again = run_ranks(2, lambda control: save(tmp_path, control, attempt, 10))
    assert [one.committed for one in again] == [False, False]
    assert {(one.path, one.bytes_written) for one in first + again} == {(first[0].path, first[0].bytes_written)}
    assert faulty.count == 0 and _tree(tmp_path) == before


def test_a_save_at_the_start_step_replaces_the_checkpoint_resumed_from(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10)
    second = claim(tmp_path, (1, 10), changes=("lr",))
    save_alone(tmp_path, second, 10)
    assert newest(tmp_path) == (2, 10)


# --- outcomes that are lost -----------------------------------------------------------------------------------------


def test_where_the_announcement_is_lost_the_checkpoint_is_there_and_the_ranks_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "LOG_EVERY_S", 0.1)
    attempt = claim(tmp_path)

    class DyingStore(MemoryStore):
        def set(self, key: str, value: str) -> None:
            if (tmp_path / "step-00000010").exists():
                raise RuntimeError("Connection reset by peer")
            super().set(key, value)

    outcomes = run_ranks(2, lambda control: save(tmp_path, control, attempt, 10), store=DyingStore(), timeout_s=0.5)
    assert {type(one) for one in outcomes} == {SaveError}
    assert newest(tmp_path, world_size=2) == (1, 10)


def test_j09_a_rank_that_stalls_while_it_writes_is_named_on_all_and_the_staging_goes(tmp_path: Path) -> None:
    attempt = claim(tmp_path)

    def stall(count: int, name: str, path: str) -> str | None:
        if name == "writev" and "tp01" in path:
            time.sleep(1.5)
        return None

    with FaultyOs(stall):
        outcomes = run_ranks(3, lambda control: save(tmp_path, control, attempt, 10), timeout_s=0.5)
    assert len({(type(one), str(one)) for one in outcomes}) == 1
    assert isinstance(outcomes[0], SaveError) and "no answer from rank 1 (tp01-pp00-dp00)" in str(outcomes[0])
    assert find_candidates(tmp_path)[0] == [] and not leftovers(tmp_path)


def test_an_error_of_describe_is_a_save_error_before_anything_is_written(tmp_path: Path) -> None:
    attempt = claim(tmp_path)

    def refuse() -> None:
        raise MegaresumeError("extra.path: JSON holds no set")

    with sound_disk() as faulty:
        outcomes = run_ranks(1, lambda control: save(tmp_path, control, attempt, 10, describe=refuse))
    assert type(outcomes[0]) is SaveError and "extra.path" in str(outcomes[0])
    assert faulty.count == 0


def test_t11_two_ranks_with_one_file_name_are_refused_and_named(tmp_path: Path) -> None:
    attempt = claim(tmp_path)

    def act(control: ControlPlane) -> Any:
        return save_checkpoint(
            tmp_path,
            control=control,
            step=10,
            attempt=attempt,
            shard_name="tp00-pp00-dp00.safetensors",
            entries=[Entry("model/w", "U8", (4,), memoryview(b"abcd"))],
            identity=ShardIdentity(attempt.root_id, attempt.attempt, 10, "tp00-pp00-dp00"),
            index={},
            describe=lambda: commit_module.CommitText(b"{}", {}, {}, {}),
        )

    outcomes = run_ranks(2, act)
    assert {type(one) for one in outcomes} == {SaveError}
    assert "ranks 0 and 1 both wrote tp00-pp00-dp00.safetensors" in str(outcomes[0])
    assert find_candidates(tmp_path) == ([], []) and not leftovers(tmp_path)


@pytest.mark.parametrize("state", ["dangling link", "loop", "directory", "file", "link to a directory"])
def test_a19_a_save_never_fails_because_of_latest(tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10)
    latest = tmp_path / layout.LATEST
    latest.unlink()
    if state == "directory":
        (latest / "inside").mkdir(parents=True)
    elif state == "file":
        latest.write_text("step-99999999\n")
    else:
        os.symlink({"dangling link": "gone", "loop": "LATEST", "link to a directory": "step-00000010"}[state], latest)
    assert newest(tmp_path) == (1, 10)
    with caplog.at_level(logging.WARNING):
        save_alone(tmp_path, attempt, 20)
    assert newest(tmp_path) == (1, 20)
    assert sorted(os.listdir(tmp_path / "step-00000010")) == [
        "manifest.json",
        "tp00-pp00-dp00.safetensors",
        "trainer_state.json",
    ]
    if state == "directory":
        assert "it is a hint for people" in caplog.text
    else:
        assert latest.read_text("utf-8") == "step-00000020\n" and not latest.is_symlink()
