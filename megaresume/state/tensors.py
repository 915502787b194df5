"""Tensors as bytes: dtype codes of the safetensors format, byte views of live tensors, and sinks that write into them.

Knows torch and the byte layout, nothing of models, optimizers or files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megaresume.errors import FormatError, UnsupportedError

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


def dtype_code(dtype: torch.dtype, what: str) -> str:
    """The safetensors code of `dtype`; UnsupportedError naming `what` where the format has none (complex, quantised)."""
    if dtype not in _CODES:
        raise UnsupportedError(f"{what} has dtype {dtype}, which the file format cannot hold")
    return _CODES[dtype]


def dtype_of(code: str, what: str) -> torch.dtype:
    """The torch dtype of a safetensors code; FormatError naming `what` for one this release does not know."""
    if code not in _DTYPES:
        raise FormatError(f"{what} has dtype {code!r}, which this release does not know")
    return _DTYPES[code]


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`'s own memory as a flat uint8 tensor (no copy); it must be contiguous."""
    flat = tensor.detach().view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of `tensor` in C order. A view of its memory where that is contiguous and on the host, a copy otherwise."""
    host = tensor.detach().contiguous().cpu()
    return memoryview(byte_view(host).numpy())  # type: ignore[arg-type]  # numpy's stubs hide its buffer


def sink_into(tensor: torch.Tensor) -> Callable[[int, memoryview], None]:
    """A function (byte offset, bytes) that copies the bytes into `tensor`'s memory, on whatever device it lives."""
    target = byte_view(tensor)

    def sink(offset: int, data: memoryview) -> None:
        source = torch.frombuffer(data, dtype=torch.uint8)
        target[offset : offset + len(data)].copy_(source)

    return sink
