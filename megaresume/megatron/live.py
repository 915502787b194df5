"""Everything on this rank that has state, as one description; and the facts about it that a checkpoint must share."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megaresume.errors import UnsupportedError
from megaresume.megatron.optimizers import describe_optimizers, mastered_shares
from megaresume.megatron.parallel import replica_groups
from megaresume.megatron.parameters import describe_extra_states, describe_parameters, synchronise, unwrap
from megaresume.state.description import ExtraState, Live, Parameter

_VERSIONED = ("megaresume", "torch", "megatron-core", "numpy", "transformer-engine")


def describe(chunks: Sequence[torch.nn.Module], optimizer: Any | None) -> Live:
    """Describe this rank's model chunks and optimizer as they are now.

    Collective (over data parallelism) only where a parameter all-gather was left to overlap with the next forward pass.
    Raises UnsupportedError naming what cannot be captured.
    """
    chunks = list(chunks)
    synchronise(chunks)
    parameters, buffers = describe_parameters(chunks, replica_groups())
    return describe_part(parameters, buffers, describe_extra_states(chunks), optimizer)


def describe_part(
    parameters: dict[str, Parameter],
    buffers: dict[str, torch.Tensor],
    extra_states: tuple[ExtraState, ...],
    optimizer: Any | None,
) -> Live:
    """Describe these parts of a model, and the optimizer that trains them and nothing else. Not collective."""
    return Live(
        parameters=parameters,
        buffers=buffers,
        extra_states=extra_states,
        optimizers=describe_optimizers(optimizer, parameters),
        replicas=replica_groups(),
        reload_masters=lambda: reload_masters(optimizer),
        shares=mastered_shares(optimizer, parameters),
    )


def device_of(chunks: Sequence[torch.nn.Module]) -> torch.device:
    """The device this rank trains on: that of its first parameter, the CPU where it has none."""
    return next((parameter.device for chunk in chunks for parameter in chunk.parameters()), torch.device("cpu"))


def rank_facts(chunks: Sequence[torch.nn.Module], live: Live) -> dict[str, Any]:
    """What this rank knows of the model's shape, as JSON; `model_facts` joins the ranks' answers."""
    modules = [unwrap(chunk) for chunk in chunks]
    config = getattr(modules[0], "config", None)
    embedding = next((p for n, p in live.parameters.items() if n.endswith("word_embeddings.weight")), None)
    return {
        "hidden_size": getattr(config, "hidden_size", None),
        "num_layers": getattr(config, "num_layers", None),
        "layers": [len(getattr(getattr(module, "decoder", None), "layers", ())) for module in modules],
        "padded_vocab_size": None if embedding is None else embedding.global_shape[0],
        "params_dtype": sorted({str(p.tensor.dtype).removeprefix("torch.") for p in live.parameters.values()}),
        "trainable": _digest(trainable_names(live)),
        "optimizers": [optimizer.kind for optimizer in live.optimizers],
    }


def trainable_names(live: Live) -> list[str]:
    """The global names of this rank's parameters that are trained."""
    return sorted(name for name, parameter in live.parameters.items() if parameter.trainable)


def model_facts(
    answers: Sequence[dict[str, Any]], stages: Sequence[int], trainable: Iterable[Sequence[str]]
) -> dict[str, Any]:
    """One set of facts for the run from every rank's `rank_facts`; `stages[i]` is the pipeline stage of rank i, and
    `trainable` are the names of all ranks, or of one of those whose digests are equal. Pure."""
    first_of_stage = dict(reversed(list(zip(stages, answers, strict=True))))
    layers = [first_of_stage[stage]["layers"] for stage in sorted(first_of_stage)]
    return {
        "hidden_size": answers[0]["hidden_size"],
        "num_layers": answers[0]["num_layers"],
        "layers_per_stage": layers,
        "model_chunks": len(layers[0]),
        "padded_vocab_size": next(
            (a["padded_vocab_size"] for a in answers if a["padded_vocab_size"] is not None), None
        ),
        "params_dtype": "+".join(sorted({dtype for answer in answers for dtype in answer["params_dtype"]})),
        # Of all names together, so that it is the same however the model is split over ranks.
        "trainable": _digest({name for names in trainable for name in names}),
    }


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


@functools.cache  # looked for in the file system, at every save
def library_versions() -> dict[str, str]:
    """Versions of the libraries whose behaviour a checkpoint depends on; those not installed are left out."""
    versions = {}
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def reload_masters(optimizer: Any | None) -> None:
    """Refresh the optimizer's higher-precision copies from the model's weights, where it keeps such copies."""
    for leaf in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        if leaf is None or isinstance(leaf, torch.optim.Optimizer):
            continue
        if not hasattr(leaf, "reload_model_params"):
            raise UnsupportedError(
                f"{type(leaf).__name__} has no reload_model_params(): its masters would overwrite the restored weights"
            )
        leaf.reload_model_params()
