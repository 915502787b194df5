"""Tensors as bytes: dtype codes of the safetensors format, byte views of live tensors, and sinks that write into them.

Knows torch and the byte layout, nothing of models and optimizers, and of files what a reader is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megaresume.errors import FormatError, UnsupportedError
from megaresume.store.shard import Target

HOST = torch.device("cpu")
# Torch works on so many elements in the thread that asks. For more it starts threads of its own, for every thread that
# asks, and they wait in a spin: beside a training, or beside each other, that costs more than it saves.
SERIAL_ELEMENTS = 1 << 15

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def check_storable(tensor: torch.Tensor, what: str) -> None:
    """Raise UnsupportedError naming `what` unless the tensor is plain memory of a dtype that the format has.

    Tensor subclasses (DTensor, torchao's quantised states) and sparse tensors keep their data elsewhere: their own
    bytes are not all there is.
    """
    kind = type(tensor.detach())
    if kind is not torch.Tensor or tensor.layout is not torch.strided:
        raise UnsupportedError(f"{what} is a {kind.__name__} ({tensor.layout}): only plain tensors can be stored")
    dtype_code(tensor.dtype, what)


def dtype_code(dtype: torch.dtype, what: str) -> str:
    """The safetensors code of `dtype`; UnsupportedError naming `what` where the format has none (complex, qint8)."""
    if dtype not in _CODES:
        raise UnsupportedError(f"{what} has dtype {dtype}, which the file format cannot hold")
    return _CODES[dtype]


def dtype_of(code: str, what: str) -> torch.dtype:
    """The torch dtype of a safetensors code; FormatError naming `what` for one this release does not know."""
    if code not in _DTYPES:
        raise FormatError(f"{what} has dtype {code!r}, which this release does not know")
    return _DTYPES[code]


def empty_for(name: str, spans: Mapping[str, Any], device: torch.device = HOST) -> torch.Tensor:
    """A fresh tensor of the form that the file's tensor `name` has; `spans[name]` has `.dtype` (a code) and `.shape`.

    Raises FormatError where the file holds no such tensor. The device is explicit: a default one set by the user is for
    the model, not for what is read from a file.
    """
    if name not in spans:
        raise FormatError(f"the index refers to tensor {name!r}, which the file does not hold")
    span = spans[name]
    return torch.empty(tuple(span.shape), dtype=dtype_of(span.dtype, name), device=device)


def same_form(tensor: torch.Tensor, name: str, spans: Mapping[str, Any]) -> bool:
    """Whether the file's tensor `name` has the dtype and shape of `tensor`."""
    span = spans.get(name)
    return span is not None and (span.dtype, tuple(span.shape)) == (_CODES.get(tensor.dtype), tuple(tensor.shape))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s own memory as a flat uint8 tensor (no copy); it must be contiguous."""
    flat = tensor.detach().view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of `tensor` in C order: a view of its memory where that is contiguous and on the host, else a copy."""
    host = tensor.detach().contiguous().cpu()
    return memoryview(byte_view(host).numpy())  # type: ignore[arg-type]  # numpy's stubs hide its buffer


def target_for(tensor: torch.Tensor, weights: Sequence[tuple[torch.Tensor, int]] = ()) -> Target:
    """What `stream_tensors` fills a contiguous `tensor` through, on whatever device it lives.

    Where it is a master, `weights` (flat, on its device) take its rounded numbers, each from that element of it on.
    """
    full = tensor.detach().view(-1)
    if tensor.device == HOST:

        def follow(begin: int, end: int) -> Callable[[], object]:
            first, last = _elements(begin, end)
            return _rounding(weights, full[first:last], first)

        memory = memoryview(byte_view(tensor).numpy())  # type: ignore[arg-type]  # numpy's stubs hide its buffer
        return Target(memory, follow=follow if weights else None)
    copy = sink_into(tensor)

    def sink(offset: int, data: memoryview) -> None:
        copy(offset, data)
        if weights:
            first, last = _elements(offset, offset + len(data))
            _rounding(weights, full[first:last], first)()

    return Target(sink=sink)


def sink_rounding_into(weights: Sequence[tuple[torch.Tensor, int]]) -> Callable[[int, memoryview], None]:
    """A function (byte offset, bytes of an F32 tensor) that puts the rounded numbers into each of `weights` (flat, on
    any device), which begins at that element of the tensor. The bytes must be whole numbers, as those of an aligned
    tensor in whole chunks are; FormatError otherwise."""

    def sink(offset: int, data: memoryview) -> None:
        first, _ = _elements(offset, offset + len(data))
        _rounding(weights, torch.frombuffer(data, dtype=torch.float32), first)()

    return sink


def _elements(begin: int, end: int) -> tuple[int, int]:
    """The elements that these bytes of an F32 tensor are."""
    if begin % 4 or end % 4:
        raise FormatError("a master that weights are rounded from does not lie at a multiple of its element's size")
    return begin // 4, end // 4


def _rounding(weights: Sequence[tuple[torch.Tensor, int]], full: torch.Tensor, first: int) -> Callable[[], object]:
    """What puts the numbers of `full`, a master's from its element `first` on, into the weights: in one call, for it is
    done by threads that wait for one another at each call of torch."""
    rounded: list[torch.Tensor] = []
    exact: list[torch.Tensor] = []
    for weight, begin in weights:
        low, high = max(first, begin), min(first + full.numel(), begin + weight.numel())
        if low < high:
            rounded += torch.split(weight[low - begin : high - begin], SERIAL_ELEMENTS)
            exact += torch.split(full[low - first : high - first], SERIAL_ELEMENTS)
    return functools.partial(torch._foreach_copy_, rounded, exact) if rounded else lambda: None


def sink_into(tensor: torch.Tensor) -> Callable[[int, memoryview], None]:
    """A function (byte offset, bytes) that copies the bytes into `tensor`'s memory, on whatever device it lives."""
    target = byte_view(tensor)

    def sink(offset: int, data: memoryview) -> None:
        source = torch.frombuffer(data, dtype=torch.uint8)
        target[offset : offset + len(data)].copy_(source)

    return sink


def room_beside(tensors: Iterable[torch.Tensor]) -> Callable[[int], bytearray | memoryview]:
    """What gives so many bytes of memory for what is read on the way to `tensors`: page-locked, where one of them is on
    an accelerator, which copies from such memory at its full speed."""
    return bytearray if all(tensor.device == HOST for tensor in tensors) else _page_locked


def _page_locked(size: int) -> memoryview:
    return memoryview(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy())  # type: ignore[arg-type]
