"""Files: every system call that changes the disk, and strict JSON in both directions.

All writing of the store goes through the small functions here, so that a test can make the k-th call fail and a reader
of the code can see in one place what is made durable and when. Knows nothing of checkpoints: neither names nor formats.

Errors: writing raises the plain `OSError`, for the caller knows what it was doing; reading raises
`CheckpointDamagedError` with the path, for whatever cannot be read is, to a reader, not what was committed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import os
import re
import secrets
import signal
import stat
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from megaresume.errors import CheckpointDamagedError, ConfigurationError

JSON: TypeAlias = Any  # what `json` reads and writes; a recursive alias would only move the casts to every caller
Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_JSON_DEPTH = 100  # objects and lists within one another: well below where recursion ends, in every reader
_MAX_DIGITS = 4_300  # of an integer: the interpreter's own limit since 3.10.7, unless somebody lifts it
_MAX_VECTORS = 1_024  # IOV_MAX of Linux and macOS
_LIBC = ctypes.CDLL(None, use_errno=True)  # for the two calls of Linux that Python has no name for
_SYNC_FILE_RANGE_WRITE = 2
_AHEAD_STEP = 1 << 20
_F_SETSIG = 10
_interpreters_digits = getattr(sys, "get_int_max_str_digits", lambda: 0)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


# --- directories and names -------------------------------------------------------------------------------------------


def make_directory(path: Path) -> None:
    """Make `path` and its missing parents; one that is there already is no error."""
    os.makedirs(path, exist_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename within one file system. A file replaces a file; a directory replaces only an empty directory."""
    os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Give `source` the second name `target`. `FileExistsError` where that is taken, which makes it an atomic claim."""
    os.link(source, target)


def unlink(path: Path) -> None:
    """Remove one file; one that has vanished is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it, following no link; whatever has vanished meanwhile is no error."""
    if path.is_symlink():
        unlink(path)
        return
    for folder, directories, files in os.walk(path, topdown=False, followlinks=False):
        for name in files:
            unlink(Path(folder, name))
        for name in directories:
            child = Path(folder, name)
            if child.is_symlink():
                unlink(child)
            else:
                _remove_directory(child)
    _remove_directory(path)


def _remove_directory(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path)


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable: a file that is fsynced, but not its name, can vanish in a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- writing ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_for_writing(path: Path) -> Iterator[int]:
    """An empty file at `path`, as a descriptor. A plain file there already is emptied; a link is refused."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_for_overwriting(path: Path) -> Iterator[int]:
    """A file that is there, its bytes as they are, as a descriptor; a link is refused."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_open_here_only(descriptor: int) -> bool:
    """Whether nobody else has the file open, on any file descriptor of any process; False where nobody can tell."""
    try:
        # Whoever opens the file while we hold the lease makes the kernel send a signal, by default one that kills us.
        fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):
        return False
    return True


def truncate(descriptor: int, size: int) -> None:
    """Cut the file to `size` bytes, or extend it with zeros."""
    os.ftruncate(descriptor, size)


def open_for_append(path: Path) -> int:
    """A descriptor whose every write lands at the end of the file; the caller closes it with `close`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def close(descriptor: int) -> None:
    os.close(descriptor)


def fsync_file(descriptor: int) -> None:
    os.fsync(descriptor)


def write_all(descriptor: int, data: Buffer) -> None:
    """Write all of `data` at the descriptor's position: one `write` where the system takes it whole."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_all_at(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all of `data` at byte `offset` of the file, leaving the descriptor's position where it is."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def write_vectors(descriptor: int, buffers: Sequence[memoryview]) -> None:
    """Write `buffers` (of bytes, one after another) without joining them in memory first."""
    pending = [buffer for buffer in buffers if len(buffer)]
    while pending:
        pending = _rest(pending, os.writev(descriptor, pending[:_MAX_VECTORS]))


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    whole = 0
    while whole < len(views) and done >= len(views[whole]):
        done -= len(views[whole])
        whole += 1
    rest = views[whole:]
    if done:
        rest[0] = rest[0][done:]
    return rest


def reserve(descriptor: int, size: int) -> None:
    """Give the file `size` bytes of disk at once, in few pieces: faster to fill, and a full disk is found out here.

    Raises `OSError`. Not done, which changes nothing but the speed, where the file system or platform has no such call
    (the C library's `posix_fallocate` would write zeros instead).
    """
    if size and hasattr(_LIBC, "fallocate"):
        while _LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))


def start_write_back(descriptor: int) -> None:
    """Let the system begin to write to the disk what it holds of the file; does not wait. A hint: never fails."""
    if hasattr(_LIBC, "sync_file_range"):
        _LIBC.sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def write_file_durably(path: Path, data: Buffer) -> None:
    """Write `data` to `path` and fsync it. Not atomic: for names nobody looks at yet."""
    with open_for_writing(path) as descriptor:
        write_all(descriptor, data)
        fsync_file(descriptor)


def replace_file_durably(path: Path, data: Buffer) -> None:
    """Put `data` at `path`, old or new but never torn, and make it and its name durable."""
    temporary = temporary_name(path)
    try:
        write_file_durably(temporary, data)
        rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unlink(temporary)
        raise
    fsync_directory(path.parent)


def write_json_durably(path: Path, value: JSON) -> None:
    """Put `value` at `path` as strict JSON, old or new but never torn. Raises as `dump_json` does, nothing written."""
    replace_file_durably(path, dump_json(value))


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process, on any host, will think of."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


# --- reading ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_for_reading(path: Path) -> Iterator[tuple[int, int]]:
    """(descriptor, size in bytes) of a plain file. Raises `CheckpointDamagedError` where there is none we may read."""
    # Without O_NONBLOCK a named pipe in the place of a file would hold up the whole job for good.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            mode = stat.filemode(status.st_mode)
            raise CheckpointDamagedError(f"{path}: expected a plain file, found something else (mode {mode}).")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def read_into_at(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` from byte `offset` of the file. Raises `CheckpointDamagedError` if it ends first or reading fails."""
    read_vectors_at(descriptor, [view], offset, path)


def read_vectors_at(descriptor: int, views: Sequence[memoryview], offset: int, path: Path) -> None:
    """Fill `views` (of bytes) one after another from byte `offset` of the file. Raises as `read_into_at` does."""
    size, filled, pending = sum(map(len, views)), 0, list(views)
    while filled < size:
        try:
            got = os.preadv(descriptor, pending[:_MAX_VECTORS], offset + filled)
        except OSError as error:
            raise unreadable(path, error) from error
        if got == 0:
            raise CheckpointDamagedError(
                f"{path}: truncated: expected {size} bytes at byte {offset}, found only {filled}."
            )
        filled += got
        if filled < size:
            pending = _rest(pending, got)


def read_ahead(path: Path, offset: int, length: int) -> None:
    """Let the system begin to read this part of a file into its cache, behind the caller. A hint: never fails."""

    def ask() -> None:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            for begin in range(offset, offset + length, _AHEAD_STEP):  # for more at once it reads no more
                os.posix_fadvise(
                    file.fileno(), begin, min(_AHEAD_STEP, offset + length - begin), os.POSIX_FADV_WILLNEED
                )

    if hasattr(os, "posix_fadvise"):
        threading.Thread(target=ask, name="read-ahead", daemon=True).start()


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """The whole of a small file. Raises `CheckpointDamagedError` if it is missing, unreadable or over `max_bytes`."""
    with open_for_reading(path) as (descriptor, size):
        if size > max_bytes:
            raise CheckpointDamagedError(f"{path}: expected at most {max_bytes} bytes, found {size}.")
        data = bytearray(size)
        read_into_at(descriptor, memoryview(data), 0, path)
    return bytes(data)


def unreadable(path: Path, error: Exception) -> CheckpointDamagedError:
    """The error for a file that the system would not let us read, worded for the person on call."""
    if isinstance(error, FileNotFoundError):
        return CheckpointDamagedError(f"{path}: the file is missing.")
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    return CheckpointDamagedError(f"{path}: the file cannot be read: {reason}.")


# --- strict JSON -----------------------------------------------------------------------------------------------------


def dump_json(value: JSON) -> bytes:
    """`value` as UTF-8 JSON, two spaces deep, with a final newline. Raises as `compact_json` does."""
    _check_writable(value)
    return (json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2) + "\n").encode("utf-8")


def compact_json(value: JSON, *, sort_keys: bool = False) -> str:
    """`value` as JSON on one line, without spaces; with `sort_keys`, one text for one value, fit for a digest.

    Raises `ConfigurationError` naming the place for what strict JSON does not hold: NaN and infinities, keys that are
    no strings, objects of other types (NumPy integers, tensors), half surrogate pairs, over `MAX_JSON_DEPTH` levels.
    """
    _check_writable(value)
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)


def read_json_strict(path: Path, max_bytes: int) -> JSON:
    """The JSON value in a file. Raises `CheckpointDamagedError` as `read_bytes` and `parse_json` do."""
    return parse_json(read_bytes(path, max_bytes=max_bytes), source=str(path))


def parse_json(data: bytes, *, source: str) -> JSON:
    """The JSON value in `data`; `source` names it in errors.

    Stricter than `json.loads`: UTF-8 only, no byte order mark, no NaN or number beyond a float's range, no key twice in
    an object, no half surrogate pair, at most `MAX_JSON_DEPTH` levels. Raises `CheckpointDamagedError` for these and
    for what is no JSON at all.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=None if 0 < _interpreters_digits() <= _MAX_DIGITS else _bounded_int,  # its own check is faster
        )
        _check_depth(value)
        if _SURROGATE_ESCAPE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (RecursionError, ValueError) as error:
        message = f"{source}: expected strict JSON, found {len(data)} bytes that are not: {error}."
        raise CheckpointDamagedError(message) from error
    return value


def _object_without_duplicates(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice[:80]!r} stands twice in one object")
    return result


def _refuse_constant(text: str) -> JSON:
    raise ValueError(f"{text} is no JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:40]} is beyond a float's range")
    return number


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _check_depth(value: JSON) -> None:
    level: list[JSON] = [[value]]
    depth = 0
    while level := [
        child
        for item in level
        for child in (item.values() if type(item) is dict else item)
        if type(child) is dict or type(child) is list
    ]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"more than {MAX_JSON_DEPTH} levels deep")


def _check_writable(value: JSON, where: str = "value", depth: int = 0) -> None:
    if depth == MAX_JSON_DEPTH and isinstance(value, (dict, list, tuple)):
        raise ConfigurationError(f"{where}: more than {MAX_JSON_DEPTH} levels deep, which our readers refuse.")
    if isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigurationError(f"{where}: JSON has no {value}; leave it out, or write it as a string.")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                found = f"{key!r} of type {type(key).__name__}"
                raise ConfigurationError(f"{where}: keys of a JSON object are strings, found {found}.")
            _check_text(key, where)
            _check_writable(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _check_writable(item, f"{where}[{position}]", depth + 1)
    elif not (value is None or isinstance(value, int)):
        found = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConfigurationError(f"{where}: JSON holds no {found}; convert it to a plain number, string or list.")


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{where}: {text!r} holds half a surrogate pair, which is no text.") from error
