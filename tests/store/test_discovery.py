"""What a root is found to hold: by what was recorded, never by time stamps, strings or hints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaresume.errors import CheckpointDamagedError, CheckpointNotFoundError, FormatError, RootError
from megaresume.store import fs, layout
from megaresume.store.discovery import check_files, find_candidates, open_checkpoint
from tests.store.worlds import claim, save_alone, sound_disk


@pytest.fixture(autouse=True)
def _quick_disk() -> Iterator[None]:
    with sound_disk():
        yield


def found(root: Path) -> list[tuple[int, int]]:
    return [(candidate.attempt, candidate.step) for candidate in find_candidates(root)[0]]


def reasons(root: Path) -> dict[str, str]:
    return {one.path.name: one.reason for one in find_candidates(root)[1]}


def test_a_root_that_is_empty_or_absent_holds_nothing(tmp_path: Path) -> None:
    assert find_candidates(tmp_path) == ([], [])
    assert find_candidates(tmp_path / "absent") == ([], [])
    assert not (tmp_path / "absent").exists()


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("")
    with pytest.raises(RootError, match="root"):
        find_candidates(tmp_path / "root")


def test_a06_order_is_by_number_whatever_the_names_width(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 200, 1000, 9000, 10000, 99_999_999, 100_000_000)
    assert [step for _, step in found(tmp_path)] == [100_000_000, 99_999_999, 10000, 9000, 1000, 200]


def test_a22_order_does_not_come_from_time_stamps(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10, 20, 30)
    for step, time in ((10, 4e9), (20, 1e9), (30, 0)):
        os.utime(tmp_path / layout.step_directory(step), (time, time))
    assert [step for _, step in found(tmp_path)] == [30, 20, 10]


def test_a05_what_is_not_published_is_never_a_candidate_and_named_when_asked_for(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10)
    staging = tmp_path / layout.staging_directory(20, 1)
    shutil.copytree(tmp_path / "step-00000010", staging)
    (tmp_path / "step-00000030").mkdir()
    assert found(tmp_path) == [(1, 10)]
    assert "not published" in reasons(tmp_path)[staging.name]
    assert "manifest.json" in reasons(tmp_path)["step-00000030"]
    with pytest.raises(CheckpointNotFoundError, match="not published: the save of step 20"):
        open_checkpoint(staging)


def test_u02_foreign_names_are_ignored_and_damaged_ones_are_told(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10, 20)
    for name in ("step_10-hf", "checkpoint-final", "latest", ".nfs000", "step-30", "step-00000040-hf", "lost+found"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000050").write_text("a file")
    os.symlink("gone", tmp_path / "step-00000060")
    (tmp_path / "step-00000020" / layout.MANIFEST).write_text('{"format_version": 1')
    assert found(tmp_path) == [(1, 10)]
    told = reasons(tmp_path)
    assert sorted(told) == ["step-00000020", "step-00000050", "step-00000060"]
    assert "a file" in told["step-00000050"] and "leads nowhere" in told["step-00000060"]
    assert "strict JSON" in told["step-00000020"]


def test_a20_a_directory_under_another_steps_name_is_never_taken_for_it(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10, 20)
    (tmp_path / "step-00000020").rename(tmp_path / "step-00000030")
    assert found(tmp_path) == [(1, 10)]
    assert "its name says step 30, its manifest step 20" in reasons(tmp_path)["step-00000030"]
    with pytest.raises(CheckpointDamagedError, match="its name says step 30"):
        open_checkpoint(tmp_path / "step-00000030")


def test_a_manifest_of_a_newer_release_is_passed_over_and_refused_when_asked_for(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10)
    path = tmp_path / "step-00000010" / layout.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "format_version": 99}), "utf-8")
    assert found(tmp_path) == [] and "99" in reasons(tmp_path)["step-00000010"]
    with pytest.raises(FormatError, match="99"):
        open_checkpoint(path.parent)


def test_a_run_that_went_back_follows_its_new_branch_and_says_what_it_left(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 1000, 1200)
    save_alone(tmp_path, claim(tmp_path, (1, 1200)), 1400)
    back = claim(tmp_path, (1, 1000))
    assert found(tmp_path) == [(1, 1000)]
    save_alone(tmp_path, back, 1100)
    assert found(tmp_path) == [(3, 1100), (1, 1000)]
    told = reasons(tmp_path)
    assert sorted(told) == ["step-00001200", "step-00001400"]
    assert "written by attempt 1, and not in the history of attempt 3 (host" in told["step-00001200"]
    assert (open_checkpoint(tmp_path / "step-00001200").attempt, back.attempt) == (1, 3)


def test_a_checkpoint_between_the_two_renames_of_a_commit_is_found_under_its_other_name(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10, 20)
    claim(tmp_path, (1, 20))
    (tmp_path / "step-00000020").rename(tmp_path / layout.aside_directory(20, 2))
    assert found(tmp_path) == [(1, 20), (1, 10)]


def test_a_checkpoint_copied_from_another_root_is_not_mistaken_for_this_runs(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    save_alone(here, claim(here), 10)
    save_alone(there, claim(there), 20)
    shutil.copytree(there / "step-00000020", here / "step-00000020")
    assert found(here) == [(1, 10)]
    assert "another root" in reasons(here)["step-00000020"]
    fs.remove_tree(here / "attempts")  # a copy of checkpoints alone makes a root in which all count
    assert found(here) == [(1, 20), (1, 10)]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "expected a checkpoint directory, found nothing. The newest in"),
        (lambda path: path.write_text(""), "expected a checkpoint directory, found a file"),
        (lambda path: path.mkdir(), "expected manifest.json in it, found nothing"),
        (lambda path: (path / "attempts").mkdir(parents=True), "a root of checkpoints, not a checkpoint"),
        (
            lambda path: (path.mkdir(), (path / "latest_checkpointed_iteration.txt").write_text("9")),
            "written by Megatron",
        ),
        (lambda path: (path.mkdir(), (path / "model.safetensors").write_text("")), "not a resumable checkpoint: 1"),
        (lambda path: (path.mkdir(), (path / "notes").write_text("")), "found 1 other files"),
    ],
)
def test_u01_s01_what_is_no_checkpoint_is_named_with_what_it_is(tmp_path: Path, make: object, says: str) -> None:
    save_alone(tmp_path, claim(tmp_path), 10)
    path = tmp_path / "asked-for"
    make(path)  # type: ignore[operator]
    with pytest.raises(CheckpointNotFoundError) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(str(path)) and says in str(caught.value)


def test_t13_missing_and_cut_files_are_all_named_at_once(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10)
    (candidate,), _ = find_candidates(tmp_path)
    check_files(candidate)
    os.truncate(candidate.path / "tp00-pp00-dp00.safetensors", 100)
    (candidate.path / layout.TRAINER_STATE).unlink()
    with pytest.raises(CheckpointDamagedError) as caught:
        check_files(candidate)
    size = candidate.manifest.files["tp00-pp00-dp00.safetensors"].size
    assert f"tp00-pp00-dp00.safetensors: expected {size} bytes, found 100" in str(caught.value)
    assert "trainer_state.json: expected" in str(caught.value) and "found none" in str(caught.value)


def test_looking_changes_nothing(tmp_path: Path) -> None:
    save_alone(tmp_path, claim(tmp_path), 10)
    with sound_disk() as disk:
        find_candidates(tmp_path)
        open_checkpoint(tmp_path / "step-00000010")
    assert disk.count == 0
