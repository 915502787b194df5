"""Memory that a save's bytes are copied to, so that training may change the tensors while they are being written.

One block per rank, as large as what the rank saves, kept from save to save: copying into memory that is there already
runs several times faster than into fresh one. On an accelerator it is page-locked, and the optimizer's state, which
nothing but the optimizer's step changes, is copied on a stream of its own. Knows tensors, no files.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from megaresume.state.tensors import HOST, byte_view

logger = logging.getLogger("megaresume.state.staging")

_PAGE_BYTES = 4096
_ROOM_FOR_MORE = 1 << 20  # what is not known yet when memory is made ready: random streams


@dataclass(frozen=True)
class Staged:
    """Copies of tensors by name, in their order. `wait()` returns when the bytes are there; any thread may call it."""

    copies: dict[str, torch.Tensor]
    wait: Callable[[], None]


class Staging:
    """Grows to the largest save and stays. Used from one thread; one set of copies is valid at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copies: dict[str, torch.Tensor] = {}
        self._forms: list[tuple[str, torch.dtype, torch.Size]] = []
        self._preparation: threading.Thread | None = None
        self._preparing = 0
        self._stream: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []

    @property
    def size(self) -> int:
        """Bytes held, or about to be."""
        return self._memory.numel() or self._preparing

    def prepare(self, tensors: Collection[torch.Tensor]) -> None:
        """Make room for `tensors` behind the training, so that the first save need not wait for the memory either."""
        size, pinned = _size(tensors), _on_accelerator(tensors)
        self._preparing = size

        def make_room() -> None:
            self._memory = _reserve(size + _ROOM_FOR_MORE, pinned=pinned)

        self._preparation = threading.Thread(target=make_room, name="staging")
        self._preparation.start()

    def copy(self, tensors: Mapping[str, torch.Tensor], *, settled: Callable[[str], bool]) -> Staged:
        """Copy `tensors`; they may change once this returns, except on an accelerator those whose name is `settled`:
        these may change only after `fence`."""
        if self._preparation is not None:
            self._preparation.join()
            self._preparation = None
        size, pinned = _size(tensors.values()), _on_accelerator(tensors.values())
        if self._memory.numel() < size:
            started = time.monotonic()
            self._memory, self._copies, self._forms = torch.empty(0, dtype=torch.uint8), {}, []  # given back first
            self._memory = _reserve(size, pinned=pinned)
            logger.info("%.3f GB of memory for copies of the state, in %.2f s", size / 1e9, time.monotonic() - started)
        copies = self._room_for(tensors)
        if pinned:
            return Staged(copies, self._copy_from_accelerator(tensors, copies, settled))
        with torch.no_grad():
            torch._foreach_copy_(list(copies.values()), list(tensors.values()))
        return Staged(copies, lambda: None)

    def _room_for(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the same form in the memory; those of the save before, where all are the same again."""
        forms = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if forms != self._forms:
            self._copies, begin = {}, 0
            for name, tensor in tensors.items():
                end = begin + tensor.nbytes
                self._copies[name] = self._memory[begin:end].view(tensor.dtype).view(tensor.shape)
                begin = _aligned(end)
            self._forms = forms
        return self._copies

    def fence(self, *_: object) -> None:
        """Let the work that is queued from now on wait for the copies under way; call it before an optimizer's step.

        Returns at once: it is the accelerator that waits.
        """
        for event in self._copied:
            torch.cuda.current_stream().wait_event(event)
        self._copied.clear()

    def _copy_from_accelerator(
        self, tensors: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor], settled: Callable[[str], bool]
    ) -> Callable[[], None]:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        training = torch.cuda.current_stream()
        # What anyone may change next is copied in the order of the training's own work.
        for name, tensor in tensors.items():
            if not settled(name):
                copies[name].copy_(tensor.detach(), non_blocking=True)
        first = torch.cuda.Event()  # type: ignore[no-untyped-call]
        first.record(training)
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                if settled(name):
                    copies[name].copy_(tensor.detach(), non_blocking=True)
            last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            last.record(self._stream)
        self._copied = [last]

        def wait() -> None:
            first.synchronize()
            last.synchronize()

        return wait


def _on_accelerator(tensors: Collection[torch.Tensor]) -> bool:
    return any(tensor.device != HOST for tensor in tensors)


def _size(tensors: Collection[torch.Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(size: int) -> int:
    return math.ceil(size / 8) * 8  # of the widest dtype, or a view of another dtype is refused


def _reserve(size: int, *, pinned: bool) -> torch.Tensor:
    """`size` bytes that the system has really given, page by page."""
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)  # copies into large pages run twice as fast
    memory = torch.frombuffer(block, dtype=torch.uint8)
    byte_view(memory).numpy()[::_PAGE_BYTES] = 0  # one write makes the system give a page; numpy lets other threads run
    return memory
