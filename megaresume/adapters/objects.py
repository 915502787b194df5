"""One adapter's live objects: a run's, restricted to the adapter's parameters, with random streams of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megaresume.megatron.live import describe_part
from megaresume.megatron.own_streams import OwnStreams
from megaresume.megatron.parameters import synchronise
from megaresume.run_objects import RunObjects
from megaresume.state.description import Live, Parameter
from megaresume.state.rng import Stream

if TYPE_CHECKING:
    from megaresume.store.control import ControlPlane


@dataclass(frozen=True)
class AdapterObjects(RunObjects):
    """What one adapter has on this rank, which may be nothing: a pipeline stage without targets still takes part.

    `parameters` and `buffers` are the adapter's part of the model's description. It is kept, unlike others: it names
    parameters and not their memory, and describing the whole base for each of many small saves would cost more than
    they do.
    """

    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, torch.Tensor]
    own_streams: OwnStreams
    own_facts: Mapping[str, Any]
    check: Callable[[Path, ControlPlane, AdapterObjects], None]

    def describe(self) -> Live:
        """The adapter's parameters, and the optimizer that trains them and nothing else.

        Raises UnsupportedError where the optimizer trains anything else.
        """
        for leaf in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            synchronise(list(getattr(leaf, "model_chunks", ())))
        parameters = {
            name: replace(parameter, trainable=parameter.tensor.requires_grad)
            for name, parameter in self.parameters.items()
        }
        return describe_part(parameters, dict(self.buffers), (), self.optimizer)

    def streams(self) -> dict[str, Stream]:
        """The adapter's own; the process's are neither saved nor restored with an adapter."""
        return self.own_streams.streams()

    def facts(self) -> dict[str, Any]:
        """Name and configuration of the adapter, and the base it belongs to."""
        return dict(self.own_facts)

    def admit(self, path: Path, control: ControlPlane) -> None:
        """Refuse what is not this adapter's by name and shape, and what cannot be a trained adapter."""
        self.check(path, control, self)

    def count(self, consumed_train_samples: int) -> None:
        """Megatron's micro-batch calculator is the process's; each adapter's sampler knows its own micro-batches."""
