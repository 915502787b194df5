"""Tensors as bytes: dtype codes of the safetensors format, byte views of live tensors, and sinks that write into them.

Knows torch and the byte layout, nothing of models, optimizers or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from megaresume.errors import FormatError, UnsupportedError
from megaresume.store.shard import Filled, Sink, Target

HOST = torch.device("cpu")

# Torch's own threads take part in an operation on more elements than these (ATen's GRAIN_SIZE). Threads of ours that
# work beside the training do without them: each would start a team of its own, whose members wait by spinning.
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


# Flat weights that take the rounded values of a master's elements, and the element of it that each begins at.
RoundedInto: TypeAlias = Sequence[tuple[torch.Tensor, int]]


def targets_for(
    destinations: Mapping[str, torch.Tensor], rounded: Mapping[str, RoundedInto] = MappingProxyType({})
) -> dict[str, Target]:
    """What `stream_tensors` fills the contiguous `destinations` through: their own bytes where they lie on the host,
    else a sink. `rounded` says by the name of a master, which need not be among them, what takes its rounded values."""
    targets: dict[str, Target] = {}
    for name in destinations.keys() | rounded.keys():
        tensor, weights = destinations.get(name), rounded.get(name, ())
        if tensor is None:
            targets[name] = sink_rounding_into(weights)
        elif tensor.device != HOST:
            targets[name] = sink_into(tensor, weights)
        else:
            memory = memoryview(byte_view(tensor).numpy())  # type: ignore[arg-type]  # numpy's stubs hide its buffer
            targets[name] = Filled(memory, sink_rounding_into(weights)) if weights else memory
    return targets


def page_locked_chunk(destinations: Iterable[torch.Tensor], size: int) -> memoryview | None:
    """`size` bytes of page-locked memory to read through where a destination is on an accelerator, else None."""
    if all(tensor.device == HOST for tensor in destinations):
        return None
    return memoryview(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy())  # type: ignore[arg-type]


def sink_rounding_into(weights: RoundedInto) -> Sink:
    """A function (byte offset, bytes of an F32 tensor) that puts the rounded numbers into `weights`, on any device. The
    bytes must be whole numbers, as those of an aligned tensor in whole chunks are; FormatError otherwise."""

    def sink(offset: int, data: memoryview) -> None:
        _round_into(weights, offset, torch.frombuffer(data, dtype=torch.uint8))

    return sink


def sink_into(tensor: torch.Tensor, weights: RoundedInto = ()) -> Sink:
    """A function (byte offset, bytes) that copies the bytes into `tensor`'s memory, on whatever device it lives, and
    rounds them into `weights` from there."""
    target = byte_view(tensor)

    def sink(offset: int, data: memoryview) -> None:
        part = target[offset : offset + len(data)]
        part.copy_(torch.frombuffer(data, dtype=torch.uint8))
        if weights:
            _round_into(weights, offset, part)

    return sink


def _round_into(weights: RoundedInto, offset: int, data: torch.Tensor) -> None:
    if offset % 4 or data.numel() % 4:
        raise FormatError("a master that weights are rounded from does not lie at a multiple of its element's size")
    first, full = offset // 4, data.view(torch.float32)
    step = SERIAL_ELEMENTS if data.device == HOST else full.numel()
    for weight, begin in weights:
        low, high = max(first, begin), min(first + full.numel(), begin + weight.numel())
        for start in range(low, high, step):
            stop = min(start + step, high)
            weight[start - begin : stop - begin].copy_(full[start - first : stop - first])
