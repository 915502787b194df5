"""Files and strict JSON: each system call that writes fails once; no reader accepts what our writer would refuse."""

from __future__ import annotations

import ast
import errno
import json
import os
import stat
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.errors import CheckpointDamagedError, ConfigurationError
from megaresume.store import fs, strict_json

STORE = Path(fs.__file__).parent


class FailingOs:
    """Stands in for `os` in the module under test: counts the calls that write and lets the k-th raise."""

    FILES = ("open", "write", "pwrite", "writev", "ftruncate", "fsync", "close")
    CHANGING = frozenset((*FILES, "rename", "replace", "link", "unlink", "mkdir", "makedirs", "rmdir"))

    def __init__(self, fail_at: int | None = None, code: int = errno.EIO) -> None:
        self.calls: list[str] = []
        self._fail_at, self._code = fail_at, code

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CHANGING:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            if len(self.calls) - 1 == self._fail_at:
                if name == "close":
                    real(*args)  # a close that reports an error has closed all the same
                raise OSError(self._code, os.strerror(self._code))
            return real(*args, **kwargs)

        return call


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_file_is_made_durable_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = FailingOs()
    monkeypatch.setattr(fs, "os", recorder)
    strict_json.write_json_durably(tmp_path / "x.json", {"a": 1})
    assert recorder.calls == ["open", "write", "fsync", "close", "rename", "open", "fsync", "close"]
    monkeypatch.undo()
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_each_call_of_a_durable_write_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    before = open_descriptors()
    for position in range(8):
        path.write_text('{"old": true}')
        with monkeypatch.context() as patch:
            patch.setattr(fs, "os", FailingOs(position, errno.ENOSPC))
            with pytest.raises(OSError, match="No space left"):
                strict_json.write_json_durably(path, {"new": True})
        renamed = position > 4
        assert json.loads(path.read_text()) == ({"new": True} if renamed else {"old": True})
        assert os.listdir(tmp_path) == ["x.json"], f"call {position} left something behind"
    assert open_descriptors() == before


def test_nothing_is_written_where_the_value_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        strict_json.write_json_durably(tmp_path / "x.json", {"loss": float("nan")})
    assert os.listdir(tmp_path) == []


@settings(deadline=None, max_examples=50)
@given(data=st.binary(max_size=200), step=st.integers(1, 9))
def test_short_writes_are_continued(data: bytes, step: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "short"
    with pytest.MonkeyPatch.context() as patch, fs.open_for_writing(path) as descriptor:
        real_write, real_pwrite = os.write, os.pwrite
        patch.setattr(os, "write", lambda fd, view: real_write(fd, view[:step]))
        patch.setattr(os, "pwrite", lambda fd, view, offset: real_pwrite(fd, view[:step], offset))
        fs.write_all(descriptor, b"head" + data)
        fs.write_all_at(descriptor, data, 4 + len(data))
    assert path.read_bytes() == b"head" + data + data


@settings(deadline=None, max_examples=50)
@given(pieces=st.lists(st.binary(max_size=12), max_size=30), step=st.integers(1, 25))
def test_short_gathered_writes_are_continued(
    pieces: list[bytes], step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "gathered"

    def short_writev(descriptor: int, buffers: list[memoryview]) -> int:
        return os.write(descriptor, b"".join(buffers)[:step])

    with pytest.MonkeyPatch.context() as patch, fs.open_for_writing(path) as descriptor:
        patch.setattr(os, "writev", short_writev)
        fs.write_vectors(descriptor, [memoryview(piece) for piece in pieces])
    assert path.read_bytes() == b"".join(pieces)


def test_more_buffers_than_the_system_takes_at_once(tmp_path: Path) -> None:
    pieces = [bytes([number % 251]) * (number % 3) for number in range(5000)]
    with fs.open_for_writing(tmp_path / "many") as descriptor:
        fs.write_vectors(descriptor, [memoryview(piece) for piece in pieces])
    assert (tmp_path / "many").read_bytes() == b"".join(pieces)


def test_a_link_in_the_place_of_a_file_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "link").symlink_to(precious)
    with pytest.raises(OSError), fs.open_for_writing(tmp_path / "link"):
        pass
    assert precious.read_text() == "keep"


def test_append_lands_at_the_end_whoever_else_appends(tmp_path: Path) -> None:
    one, two = fs.open_for_append(tmp_path / "log"), fs.open_for_append(tmp_path / "log")
    for descriptor in (one, two, one):
        fs.write_all(descriptor, b"line\n")
    fs.close(one)
    fs.close(two)
    assert (tmp_path / "log").read_bytes() == b"line\n" * 3


# --- directories -----------------------------------------------------------------------------------------------------


def test_remove_tree_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "precious").write_text("keep")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").write_text("x")
    (tree / "a" / "link").symlink_to(outside)
    (tree / "dangling").symlink_to(tmp_path / "nowhere")
    fs.remove_tree(tree)
    assert not tree.exists()
    (tmp_path / "alias").symlink_to(outside)
    fs.remove_tree(tmp_path / "alias")
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert sorted(os.listdir(outside)) == ["deep", "precious"]


def test_remove_tree_minds_nothing_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "file").write_text("x")
    real_unlink, real_rmdir = os.unlink, os.rmdir

    def unlink_twice(path: Path) -> None:
        real_unlink(path)
        real_unlink(path)

    def rmdir_twice(path: Path) -> None:
        real_rmdir(path)
        real_rmdir(path)

    monkeypatch.setattr(os, "unlink", unlink_twice)
    monkeypatch.setattr(os, "rmdir", rmdir_twice)
    fs.remove_tree(tree)
    fs.remove_tree(tree)
    assert not tree.exists()


def test_a_directory_that_is_there_is_no_error(tmp_path: Path) -> None:
    fs.make_directory(tmp_path / "a" / "b")
    fs.make_directory(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        fs.make_directory(tmp_path / "file")


# --- reading ---------------------------------------------------------------------------------------------------------


def _missing(path: Path) -> None:
    pass


def _directory(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _under_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


@pytest.mark.parametrize("make", [_missing, _directory, _pipe, _loop, _under_a_file])
def test_what_is_no_plain_file_is_damage_and_no_hang(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "x.json"
    make(path)
    before = open_descriptors()
    with pytest.raises(CheckpointDamagedError, match=r"in/x\.json"):
        strict_json.read_json_strict(path, 1000)
    assert open_descriptors() == before


def test_a_device_is_no_file() -> None:
    with pytest.raises(CheckpointDamagedError, match="/dev/null: expected a plain file"):
        fs.read_bytes(Path("/dev/null"), max_bytes=10)


def test_a_name_no_file_can_have_is_damage() -> None:
    with pytest.raises(CheckpointDamagedError, match="null"):
        fs.read_bytes(Path("/tmp/nul\0byte"), max_bytes=10)


def test_an_error_of_the_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointDamagedError, match=r"x\.json.*Input/output error"):
        strict_json.read_json_strict(path, 1000)


def test_a_file_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    with fs.open_for_reading(path) as (descriptor, _), pytest.raises(CheckpointDamagedError, match="truncated"):
        fs.read_into_at(descriptor, memoryview(bytearray(5)), 0, path)


def test_an_oversize_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(CheckpointDamagedError, match=r"at most 1000 bytes, found 1099511627776"):
        strict_json.read_json_strict(path, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_reading_ahead_asks_for_all_of_it_and_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "x", list[tuple[int, int]]()
    path.write_bytes(bytes(10))
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, length, advice: asked.append((offset, length)))
    for where in (path, tmp_path / "nothing", tmp_path):
        fs.read_ahead(where, 4096, (5 << 20) + 7)
        for thread in [each for each in threading.enumerate() if each.name == "read-ahead"]:
            thread.join()
    ends = [offset + length for offset, length in asked]
    assert [offset for offset, _ in asked] == [4096, *ends[:-1]] and ends[-1] == 4096 + (5 << 20) + 7


# --- the seam --------------------------------------------------------------------------------------------------------


def test_no_other_module_of_the_store_writes() -> None:
    changing = FailingOs.CHANGING - {"open", "close"} | {"remove", "truncate", "symlink", "fdatasync", "renames"}
    changing |= {"write_text", "write_bytes", "touch", "rmtree", "symlink_to", "hardlink_to", "copyfile", "move"}
    found = []
    for path in sorted(STORE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if path.name != "fs.py" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in changing and owner not in ("fs", "re") and not owner.startswith("self"):
                    found.append(f"{path.name}:{node.lineno} {ast.unparse(node.func)}")
    assert found == []


def test_files_are_readable_by_the_group_as_the_umask_says(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        strict_json.write_json_durably(tmp_path / "x.json", {})
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o644
