"""A cheap fingerprint of a dataset: enough to notice that sample 17 is no longer the sample 17 that was trained.

Not a checksum of the data: it reads a few samples and believes names and hashes it is told. Knows nothing of order.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaresume.data.checks import as_count
from megaresume.data.seeding import seeded

logger = logging.getLogger("megaresume.data")


def dataset_fingerprint(
    dataset: Any, *, name: str | None = None, files: Iterable[str | Path] = (), samples: int = 3
) -> dict[str, Any]:
    """JSON values that tell one dataset from another, for `DataParallelBatchSampler(fingerprint=...)`.

    Holds the length, `name`, the order and sizes of `files` (their base names, so that data may move to another
    directory), digests of `samples` samples spread from the first to the last, and the `unique_description_hash` of
    Megatron's indexed datasets. A sample that reads differently twice, or of a type that has no canonical bytes, is
    left out, which is logged. Random states are as before afterwards. Errors of reading a sample are the dataset's own.
    """
    size = as_count("len(dataset)", len(dataset))
    fingerprint: dict[str, Any] = {"length": size}
    if name is not None:
        fingerprint["name"] = name
    listed = [(Path(file).name, Path(file).stat().st_size) for file in files]
    if listed:
        fingerprint["files"] = _digest([part for entry in listed for part in entry])
    description = getattr(dataset, "unique_description_hash", None)
    if isinstance(description, str):
        fingerprint["description"] = description
    number = min(as_count("samples", samples, minimum=0), size)
    indices = sorted({place * (size - 1) // max(1, number - 1) for place in range(number)})
    digests = {str(index): _sample_digest(dataset, index) for index in indices}
    fingerprint["samples"] = {index: digest for index, digest in digests.items() if digest is not None}
    return fingerprint


def _sample_digest(dataset: Any, index: int) -> str | None:
    try:
        # Two seeds: a sample that follows the random state tells nothing about the data.
        digests = set()
        for seed in (0, 1):
            with seeded(seed, 0, index):
                sample = dataset[index]
            digests.add(_digest(sample))
    except TypeError as error:
        logger.info("fingerprint: sample %d is left out: %s", index, error)
        return None
    if len(digests) > 1:
        logger.info("fingerprint: sample %d is left out: it reads differently twice", index)
        return None
    return digests.pop()


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterable[bytes]:
    """Canonical bytes of a sample. Raises TypeError for a type that has none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        yield f"{type(value).__name__}:{value!r}".encode()
    elif isinstance(value, bytes):
        yield b"bytes"
        yield value
    elif isinstance(value, torch.Tensor):
        yield f"tensor:{value.dtype}:{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        yield f"array:{value.dtype.str}:{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping:{len(value)}".encode()
        for key in sorted(value, key=repr):
            yield from _parts(key)
            yield from _parts(value[key])
    elif isinstance(value, Sequence):
        yield f"sequence:{len(value)}".encode()
        for entry in value:
            yield from _parts(entry)
    else:
        raise TypeError(f"a {type(value).__name__} has no canonical bytes")
