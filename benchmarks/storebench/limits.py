"""What the machine itself allows, measured in the same run and the same mode as the contenders: copying memory, writing
durably, reading from the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from megaresume.store import fs

_BLOCK = 4 << 20


def copy_limits(*groups: Mapping[str, torch.Tensor]) -> list[Callable[[], None]]:
    """For each group of this rank's tensors one copy of it into memory that is there already, in large pages.

    The memory is the same for all and kept from round to round, as a saver's buffers are: what nobody touched for a
    while may be slower to copy to.
    """
    from megaresume.state.staging import _reserve

    room = _reserve(max(sum(tensor.nbytes + 8 for tensor in group.values()) for group in groups), pinned=False)
    return [_copy_into(room, [tensor.detach() for tensor in group.values()]) for group in groups]


def _copy_into(room: torch.Tensor, sources: list[torch.Tensor]) -> Callable[[], None]:
    views, begin = [], 0
    for tensor in sources:
        views.append(room[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        begin += -(-tensor.nbytes // 8) * 8
    return lambda: torch._foreach_copy_(views, sources)


def write_limit(path: Path, size: int) -> Callable[[], None]:
    """A new file of `size` bytes written from memory that is in use, preallocated, written back early and fsynced."""
    data = memoryview(torch.ones(_BLOCK, dtype=torch.uint8).numpy())

    def write() -> None:
        path.unlink(missing_ok=True)
        with fs.open_for_writing(path) as descriptor:
            fs.reserve(descriptor, size)
            for begin in range(0, size, _BLOCK):
                fs.write_all(descriptor, data[: min(_BLOCK, size - begin)])
                if begin % (8 * _BLOCK) == 0:
                    fs.start_write_back(descriptor)
            fs.fsync_file(descriptor)
        fs.fsync_directory(path.parent)

    return write


def read_limit(path: Path, *, threads: int) -> Callable[[], None]:
    """Read a file into blocks of memory that are used again, by this many threads."""

    def read() -> None:
        size = path.stat().st_size
        blocks = iter(range(0, size, _BLOCK))

        def share() -> None:
            room = bytearray(_BLOCK)
            descriptor = os.open(path, os.O_RDONLY)
            for begin in blocks:
                os.preadv(descriptor, [room], begin)
            os.close(descriptor)

        readers = [threading.Thread(target=share) for _ in range(threads)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()

    return read
