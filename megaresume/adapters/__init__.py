"""Many adapters on one frozen base in one process, each with a life of its own: saved, resumed, added, dropped alone.

An adapter is a run whose description is restricted to its own parameters. Its root, attempts, manifests, topology rules
and replay audit are those of every run; what is the adapters' own is here.
"""

from megaresume.adapters.manager import AdapterManager, AdapterReport
from megaresume.megatron.lora import LoraConfig

__all__ = ["AdapterManager", "AdapterReport", "LoraConfig"]
