"""Runs real megatron-core on machines without a CUDA device: laptops, CI, dry runs of a topology.

megatron-core names CUDA in a few dozen places (`device="cuda"`, streams, events, the device's random numbers, the type
names its optimizer checks). The stand-in answers each of them from the CPU and changes nothing else: model, optimizer,
schedules and collectives (gloo) are megatron-core's own. Build the model with `use_cpu_initialization=True` and
`get_gpt_layer_local_spec()`, without gradient accumulation fusion. Knows nothing of checkpoints.

With it on, the device's default random stream IS torch's CPU stream: two streams that differ on a GPU are one here.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

from megaresume.errors import ConfigurationError, UnsupportedError

logger = logging.getLogger("megaresume.megatron.cpu")

_CPU = torch.device("cpu")

# What replaced torch's autograd engine, once the stand-in is on in this process.
_installed: _RedirectedEngine | None = None


def use_cpu(force: bool = False) -> bool:
    """Turn the stand-in on where this process sees no CUDA device; return whether it is on. Repeated calls do nothing.

    A process that sees a CUDA device is never touched: the answer there is False, or, with `force` (the stand-in or
    nothing), a ConfigurationError that says how to hide the device. torch keeps the redirection of `device="cuda"` per
    thread: a thread of one's own that builds tensors for megatron-core calls this once more. Not collective.
    """
    global _installed
    if _installed is None:
        if torch.cuda.is_available():
            if force:
                raise ConfigurationError(
                    "the CPU stand-in was asked for, but this process sees a CUDA device "
                    f"({torch.cuda.device_count()} of them), which it never touches: start the process with "
                    'CUDA_VISIBLE_DEVICES="" to run on the CPU'
                )
            return False
        _replace_cuda_functions()
        _replace_rng_functions()
        _replace_compiled_functions()
        _installed = _RedirectedEngine()
        torch.autograd.Variable._execution_engine = _installed
        # One line per run, not per rank; WARNING, because a run that should have had GPUs must not miss it.
        level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.DEBUG
        logger.log(level, "no CUDA device: megatron-core runs on the CPU behind megaresume's stand-in")
    if not _redirected():
        _RedirectToCPU().__enter__()  # type: ignore[no-untyped-call]  # and never left
    return True


def is_installed() -> bool:
    """Whether `use_cpu` turned the stand-in on in this process."""
    return _installed is not None


class _RedirectToCPU(TorchFunctionMode):
    """Sends tensors meant for a CUDA device to the CPU, and lets them say they are CUDA's where that is checked."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type:
            return _type(func, *args, **kwargs)
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:2]), *args[2:])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        return func(*args, **kwargs)


def _redirected() -> bool:
    """Whether the redirection is active in the calling thread, at this point of the call stack."""
    return torch.empty(0).type().startswith("torch.cuda.")


def _on_cpu(device: Any) -> Any:
    """The CPU for anything that names a CUDA device ("cuda", "cuda:1", torch.device, an index); all else unchanged."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.split(":")[0] == "cuda" else device
    return _CPU if type(device) is int else device


def _type(func: Callable[..., Any], tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`Tensor.type`: its name were it on a CUDA device (megatron's optimizers check that), or the cast asked for."""
    if dtype is None:
        return func(tensor).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    return func(tensor, dtype, *args, **kwargs)


class _RedirectedEngine(type(torch.autograd.Variable._execution_engine)):  # type: ignore[misc]
    """torch's autograd engine with the redirection kept on during the backward pass.

    torch suspends function modes while `Tensor.backward` runs, hooks and recomputed forward passes included.
    """

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if _redirected() else _RedirectToCPU():
            return super().run_backward(*args, **kwargs)


class _Stream:
    """A CUDA stream: the CPU works in order, so there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    """A CUDA event: it has always happened already, and no time passed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    yield


def _nothing() -> Callable[..., None]:
    """A function that does nothing, a new one at each call: torch's compiler refuses one that goes by two names."""
    return lambda *args, **kwargs: None


def _replace_cuda_functions() -> None:
    only_stream = _Stream()
    replacements: dict[str, Any] = {
        # A torch.device, not an index: it stays right where the redirection is not active (other threads).
        "current_device": lambda: _CPU,
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        "set_device": _nothing(),
        "set_stream": _nothing(),
        "Stream": _Stream,
        "Event": _Event,
        "stream": _stream_context,
        "current_stream": lambda device=None: only_stream,
        "default_stream": lambda device=None: only_stream,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


def _replace_rng_functions() -> None:
    """Point the device's random numbers, megatron's named trackers included, to the CPU generator."""

    def get_state(device: Any = "cuda") -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        torch.default_generator.set_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    for function, name in (
        (get_state, "get_rng_state"),
        (set_state, "set_rng_state"),
        (manual_seed, "manual_seed"),
        (manual_seed_all, "manual_seed_all"),
    ):
        setattr(torch.cuda, name, function)
        setattr(torch.cuda.random, name, function)

    def tracker_get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        _refuse_graphs(graph_safe)
        return get_state()

    def tracker_set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        _refuse_graphs(graph_safe)
        set_state(new_state)

    megatron_random._get_cuda_rng_state = tracker_get_state
    megatron_random._set_cuda_rng_state = tracker_set_state
    # Leaving a tracker's stream, megatron warns if the CPU stream moved; here it must, at every dropout.
    logging.getLogger(megatron_random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _refuse_graphs(graph_safe: bool) -> None:
    if graph_safe:
        raise UnsupportedError(
            "CUDA-graph-safe random numbers (use_cudagraphable_rng) were asked for, but there is no CUDA device: "
            "leave use_cudagraphable_rng off on the CPU"
        )


def _replace_compiled_functions() -> None:
    # megatron compiles some small functions when first called: seconds per rank, and a C++ compiler, for nothing.
    torch.compiler.set_stance("force_eager")

    # The MoE router asks for this name without regard to whether Transformer Engine is there (0.14 to 0.16).
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
