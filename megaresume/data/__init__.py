"""Where in the data: a sampler and a loader that go on exactly where training stopped.

Names are resolved on first use, so that the sampler and its arithmetic can be had without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaresume.data.fingerprint import dataset_fingerprint as dataset_fingerprint
    from megaresume.data.loader import ResumableDataLoader as ResumableDataLoader
    from megaresume.data.sampler import DataParallelBatchSampler as DataParallelBatchSampler
    from megaresume.data.schedule import BatchSizeSchedule as BatchSizeSchedule

_HOMES = {
    "BatchSizeSchedule": "megaresume.data.schedule",
    "DataParallelBatchSampler": "megaresume.data.sampler",
    "ResumableDataLoader": "megaresume.data.loader",
    "dataset_fingerprint": "megaresume.data.fingerprint",
}

__all__ = ["BatchSizeSchedule", "DataParallelBatchSampler", "ResumableDataLoader", "dataset_fingerprint"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
