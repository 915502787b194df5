"""Which data-parallel rank this is, of how many, and whether a global batch can be cut for that many.

Knows nothing of order or position.
"""

from __future__ import annotations

from math import isqrt

from megaresume.data.checks import as_count
from megaresume.errors import ConfigurationError


def data_parallel_place(rank: int | None, size: int | None) -> tuple[int, int]:
    """(rank, size) as given, or those of the running parallel layout. Raises TypeError or ConfigurationError."""
    if (rank is None) != (size is None):
        raise ConfigurationError(
            f"give data_parallel_rank and data_parallel_size both or neither, got rank {rank!r} and size {size!r}"
        )
    if rank is None:
        from megaresume.megatron.parallel import data_parallel_coordinate  # the one arrow that points up

        rank, size = data_parallel_coordinate()
    width = as_count("data_parallel_size", size)
    place = as_count("data_parallel_rank", rank, minimum=0)
    if place >= width:
        raise ConfigurationError(
            f"data_parallel_rank must be from 0 to {width - 1} with data_parallel_size {width}, got {place}"
        )
    return place, width


def check_divides(size: int, micro: int, width: int) -> None:
    """Raise ConfigurationError unless a global batch of `size` is whole micro-batches of `micro` on `width` ranks."""
    block = micro * width
    if size % block == 0:
        return
    nearest = [number for number in (size - size % block, size - size % block + block) if number]
    widths = _divisors(size // micro) if size % micro == 0 else "none"
    micros = _divisors(size // width) if size % width == 0 else "none"
    raise ConfigurationError(
        f"global_batch_size {size} is not a multiple of micro_batch_size {micro} x data_parallel_size {width} = "
        f"{block}. What would do: global_batch_size {' or '.join(map(str, nearest))}; with micro_batch_size {micro}, "
        f"data_parallel_size of {widths}; with data_parallel_size {width}, micro_batch_size of {micros}"
    )


def _divisors(number: int) -> list[int]:
    """The divisors of `number`, rising."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
