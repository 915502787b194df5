"""Files: every system call that changes the disk.

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
import os
import secrets
import signal
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from megaresume.errors import CheckpointDamagedError

Buffer: TypeAlias = bytes | bytearray | memoryview

_MAX_VECTORS = 1_024  # IOV_MAX of Linux and macOS
_LIBC = ctypes.CDLL(None, use_errno=True)  # for the two calls of Linux that Python has no name for
_SYNC_FILE_RANGE_WRITE = 2
_AHEAD_STEP = 1 << 20
_F_SETSIG = 10


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
