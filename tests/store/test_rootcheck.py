"""A root that is not one writable directory for all ranks is refused before anything touches it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaresume.errors import ConfigurationError, RootError
from megaresume.store import rootcheck
from megaresume.store.control import ControlPlane
from megaresume.store.rootcheck import check_root
from tests.store.worlds import FaultyOs, run_ranks


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootcheck, "RETRY_PAUSES_S", (0.05, 0.1, 0.2))


def check(root_of: Callable[[int], Path], world_size: int = 2) -> list[Any]:
    return run_ranks(world_size, lambda control: check_root(root_of(control.rank), control=control))


def test_a_root_is_made_where_it_is_absent_and_nothing_stays_behind(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    assert check(lambda _: root, 3) == [None] * 3
    assert os.listdir(root) == []
    assert check(lambda _: root, 1) == [None]


def test_t06_ranks_with_different_directories_are_told_so_with_their_names(tmp_path: Path) -> None:
    started = time.monotonic()
    outcomes = check(lambda rank: tmp_path / f"node{min(rank, 1)}", 3)
    assert time.monotonic() - started < 10
    assert {type(one) for one in outcomes} == {RootError} and len({str(one) for one in outcomes}) == 1
    for part in (
        "not shared by all hosts",
        "ranks 1 (tp01-pp00-dp00), 2 (tp02-pp00-dp00)",
        str(tmp_path / "node1"),
        os.uname().nodename,
    ):
        assert part in str(outcomes[0])
    assert os.listdir(tmp_path / "node0") == []


def test_a10_a_file_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"reads": 2}
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name.endswith(".nonce") and threading.current_thread().name and late["reads"] > 0:
            late["reads"] -= 1
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert check(lambda _: tmp_path) == [None, None]
    assert late["reads"] == 0


def test_a_root_that_is_a_file_or_below_one_or_a_loop_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep me")
    os.symlink("loop", tmp_path / "loop")
    for root in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "loop"):
        outcomes = check(lambda _, root=root: root)
        assert {type(one) for one in outcomes} == {RootError} and len({str(one) for one in outcomes}) == 1, outcomes
        assert str(root) in str(outcomes[0])
    assert (tmp_path / "file").read_text() == "keep me"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_root_that_cannot_be_written_is_refused_on_all_ranks(tmp_path: Path, number: int) -> None:
    def refuse(count: int, name: str, path: str) -> str | None:
        raise OSError(number, os.strerror(number), path)

    with FaultyOs(refuse):
        outcomes = check(lambda _: tmp_path)
    assert {type(one) for one in outcomes} == {RootError} and len({str(one) for one in outcomes}) == 1
    assert os.strerror(number) in str(outcomes[1]) and str(tmp_path) in str(outcomes[1])


def test_a_rank_that_may_not_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    outcomes = check(lambda _: tmp_path)
    assert {type(one) for one in outcomes} == {RootError} and "cannot be written on host" in str(outcomes[1])


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///tmp/run", "hf://org/model"])
def test_u09_a_url_is_refused_and_no_directory_of_its_name_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (outcome,) = run_ranks(1, lambda control: _raised(lambda: check_root(Path(url), control=control)))
    assert isinstance(outcome, ConfigurationError) and "not a URL" in str(outcome)
    assert os.listdir(tmp_path) == []


def _raised(function: Callable[[], None]) -> BaseException | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def test_the_control_plane_goes_on_after_a_refusal(tmp_path: Path) -> None:
    def act(control: ControlPlane) -> Any:
        with pytest.raises(RootError):
            check_root(tmp_path / str(control.rank), control=control)
        return control.announce("next", control.rank)

    assert run_ranks(2, act) == [0, 0]
