"""megaresume: Megatron-core training runs that stop anywhere and go on bit for bit.

This file says which names are public and where each lives; it imports a module only when a name of it is asked for, so
that `import megaresume` loads neither torch nor megatron-core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megaresume import errors

if TYPE_CHECKING:
    from megaresume.adapters import AdapterManager, LoraConfig
    from megaresume.data import DataParallelBatchSampler, ResumableDataLoader
    from megaresume.manager import ResumeManager
    from megaresume.one_call import resume_from_checkpoint
    from megaresume.progress import read_progress
    from megaresume.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "AdapterManager",
    "DataParallelBatchSampler",
    "LoraConfig",
    "ResumableDataLoader",
    "ResumeManager",
    "Topology",
    "errors",
    "read_progress",
    "resume_from_checkpoint",
]

_HOME_OF = {
    "AdapterManager": "megaresume.adapters",
    "DataParallelBatchSampler": "megaresume.data",
    "LoraConfig": "megaresume.adapters",
    "ResumableDataLoader": "megaresume.data",
    "ResumeManager": "megaresume.manager",
    "Topology": "megaresume.topology",
    "read_progress": "megaresume.progress",
    "resume_from_checkpoint": "megaresume.one_call",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'megaresume' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next access does not come through here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
