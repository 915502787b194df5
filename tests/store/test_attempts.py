"""Attempts: no two starts get the same number, and a record that cannot be read is never taken for none."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from megaresume.errors import CheckpointDamagedError, RootError
from megaresume.store import fs
from megaresume.store.attempts import Attempt, claim_attempt, newest_attempt_number, read_attempts
from tests.store.worlds import FaultyOs, claim, no_space, save_alone, sound_disk


def test_attempts_are_numbered_from_one_and_share_the_roots_id(tmp_path: Path) -> None:
    first = claim(tmp_path, job_id="4711", restart_count=0)
    second = claim(tmp_path, (1, 200), changes=["lr"], root_id="ignored: the root has one")
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.root_id == second.root_id and len(first.root_id) == 32
    assert read_attempts(tmp_path) == [first, second]
    assert second.resumed_from == (1, 200) and second.start_step == 200 and second.changes == ("lr",)
    assert first.pid == os.getpid() and first.job_id == "4711" and first.restart_count == 0
    assert newest_attempt_number(tmp_path) == 2
    assert sorted(os.listdir(tmp_path / "attempts")) == ["000001.json", "000002.json"]


def test_a_record_goes_to_other_ranks_and_back(tmp_path: Path) -> None:
    attempt = claim(tmp_path, (3, 40), job_id="1", changes=("data",))
    assert Attempt.from_json(json.loads(json.dumps(attempt.to_json()))) == attempt
    with pytest.raises(ValueError, match="field host is missing"):
        Attempt.from_json({key: value for key, value in attempt.to_json().items() if key != "host"})


def test_an_empty_or_absent_root_has_no_attempts(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == [] and newest_attempt_number(tmp_path) == 0
    assert read_attempts(tmp_path / "absent") == []


def test_starts_at_the_same_moment_get_different_numbers_and_one_root_id(tmp_path: Path) -> None:
    claimed: list[Attempt] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait()
        claimed.append(claim(tmp_path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.attempt for one in claimed) == list(range(1, 9))
    assert len({one.root_id for one in claimed}) == 1
    assert [read.attempt for read in read_attempts(tmp_path)] == list(range(1, 9))
    assert not [name for name in os.listdir(tmp_path / "attempts") if name.endswith(".tmp")]


def test_a_first_start_that_appears_while_another_looks_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is listed later, number and root id come from one look."""
    real, others = os.listdir, []

    def listdir(path: Any) -> list[str]:
        found = real(path)
        if Path(path) == tmp_path / "attempts" and not others:
            others.append(None)
            others[0] = claim(tmp_path)
        return found

    monkeypatch.setattr(os, "listdir", listdir)
    second = claim(tmp_path)
    assert (others[0].attempt, second.attempt) == (1, 2) and others[0].root_id == second.root_id


def test_a_link_that_succeeded_but_is_reported_as_existing_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fs.link

    def lost_answer(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "File exists", str(target))

    monkeypatch.setattr(fs, "link", lost_answer)
    assert claim(tmp_path).attempt == 1
    assert os.listdir(tmp_path / "attempts") == ["000001.json"]


def test_a_file_system_without_hard_links_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(target))

    monkeypatch.setattr(fs, "link", refuse)
    with pytest.raises(RootError, match="hard link"):
        claim(tmp_path)
    assert os.listdir(tmp_path / "attempts") == []


def test_every_failing_call_leaves_the_records_readable(tmp_path: Path) -> None:
    for k in range(1, 50):
        root = tmp_path / str(k)
        claim(root)

        def fail(count: int, name: str, path: str, k: int = k) -> None:
            if count == k:
                raise no_space(path)

        with FaultyOs(fail) as faulty:
            try:
                claim(root)
            except OSError as error:
                assert error.errno == errno.ENOSPC
        assert [one.attempt for one in read_attempts(root)] in ([1], [1, 2])
        assert claim(root).attempt == newest_attempt_number(root)
        if faulty.count < k:
            break
    else:
        pytest.fail("more calls than expected")
    assert k > 5


def test_where_the_records_were_lost_numbers_go_on_above_the_checkpoints(tmp_path: Path) -> None:
    for resumed_from in (None, (1, 10), (2, 20)):
        save_alone(tmp_path, attempt := claim(tmp_path, resumed_from), (attempt.attempt) * 10)
    fs.remove_tree(tmp_path / "attempts")
    again = claim(tmp_path, (1, 10), root_id=attempt.root_id)
    assert again.attempt == 4 and again.root_id == attempt.root_id


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "strict JSON"),
        ('{"attempt": 1', "strict JSON"),
        ("[]", "a list where an object was expected"),
        ("{}", "field attempt is missing"),
        ('{"attempt": 2}', "field attempt is 2, not the number"),
        ("start_step=-1", "field start_step is '-1', not a whole number"),
        ("start_step=true", "field start_step is 'True', not a whole number"),
        ("start_step=10.0", "field start_step is '10.0', not a whole number"),
        ("resumed_from=[1]", "resumed_from is"),
        ('resumed_from=["1",2]', "resumed_from is"),
        ("changes=[1]", "changes is not a list of strings"),
        ("host=null", "field host"),
        ("x" * 100_000, "expected at most 65536 bytes"),
    ],
)
def test_a_record_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path, text: str, found: str) -> None:
    claim(tmp_path)
    path = tmp_path / "attempts" / "000001.json"
    if "=" in text:
        name, _, value = text.partition("=")
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        text = json.dumps({**record, name: json.loads(value)})
    path.write_text(text, "utf-8")
    with pytest.raises(CheckpointDamagedError) as caught:
        read_attempts(tmp_path)
    assert str(caught.value).startswith(str(path)) and found in str(caught.value)


def test_u02_foreign_names_beside_the_records_are_ignored(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    for name in ("000002.json.bak", "2.json", "README", ".nfs0001", ".claim.0123456789ab.tmp", "000000.json"):
        (tmp_path / "attempts" / name).write_text("not ours")
    (tmp_path / "attempts" / "lost+found").mkdir()
    assert read_attempts(tmp_path) == [attempt]
    assert claim(tmp_path).attempt == 2


def test_attempts_that_is_a_file_is_a_root_error(tmp_path: Path) -> None:
    (tmp_path / "attempts").write_text("")
    with pytest.raises(RootError, match="cannot be listed"):
        read_attempts(tmp_path)


def test_the_record_is_durable_before_its_name_is(tmp_path: Path) -> None:
    with sound_disk() as faulty:
        claim_attempt(tmp_path, start_step=0, resumed_from=None)
    calls = [name for name, _ in faulty.trace]
    assert calls.index("fsync") < calls.index("link") < len(calls) - 1 - calls[::-1].index("fsync")
