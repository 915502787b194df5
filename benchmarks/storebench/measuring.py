"""Clocks, memory and the page cache: what a benchmark of saving and loading measures with. Knows no contender."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE = mmap.PAGESIZE


def slowest(seconds: float) -> float:
    """The largest of all ranks' times: a save or a load is done when the last rank is."""
    tensor = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def timed(function: Callable[[], object]) -> float:
    """Seconds that all ranks need to run `function`, begun together."""
    dist.barrier()
    started = time.perf_counter()
    function()
    return slowest(time.perf_counter() - started)


@contextmanager
def memory_peak(found: list[int]) -> Iterator[None]:
    """Appends how far this process's resident memory rose above what it was, in bytes."""
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    done.set()
    watcher.join()
    found.append(max(peak, process.memory_info().rss) - before)


def files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def fsync_share(directory: Path) -> None:
    """Make a directory's files durable, each by one of the ranks, and the directories."""
    mine = files_below(directory)[dist.get_rank() :: dist.get_world_size()]
    for path in [*mine, directory, directory.parent]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def drop_from_cache(directory: Path) -> None:
    """Put a directory's files out of the page cache, and make sure that they are."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in files_below(directory):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        left = sum(resident_bytes(path) for path in files_below(directory))
        assert left <= 0.01 * sum(path.stat().st_size for path in files_below(directory)), f"{left} bytes are cached"
    dist.barrier()


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by mincore."""
    size = path.stat().st_size
    if size == 0:
        return 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        pages = (size + _PAGE - 1) // _PAGE
        flags = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        result = _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags)
        assert result == 0, os.strerror(ctypes.get_errno())
        del address
        return sum(flag & 1 for flag in flags) * _PAGE
