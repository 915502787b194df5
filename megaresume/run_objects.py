"""The live objects of a run as the manager got them, and what saving and restoring both ask of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megaresume.errors import ConfigurationError
from megaresume.megatron.live import describe, device_of, model_facts, rank_facts, trainable_names
from megaresume.megatron.parallel import (
    global_rank,
    read_coordinate,
    read_topology,
    update_microbatches,
    world_size,
)
from megaresume.megatron.rerun import rerun_state
from megaresume.megatron.rng import random_streams
from megaresume.state.description import Live
from megaresume.state.registered import Registered
from megaresume.state.rng import Stream
from megaresume.topology import Coordinate, RunShape, Topology, file_stem

if TYPE_CHECKING:
    from pathlib import Path

    from megaresume.data.sampler import DataParallelBatchSampler
    from megaresume.store.control import ControlPlane
    from megaresume.watch import Watch

TRAIN = "train"


@dataclass(frozen=True)
class RunObjects:
    """Model chunks, optimizer, scheduler, samplers by name ("train", "valid", ...) and registered objects of one
    rank."""

    chunks: Sequence[torch.nn.Module]
    optimizer: Any | None
    scheduler: Any | None
    data: Mapping[str, DataParallelBatchSampler]
    registered: Registered

    @property
    def positions(self) -> Mapping[str, DataParallelBatchSampler]:
        """The data whose position is the same on every rank, and so stands in trainer_state.json. A stream's is each
        rank's own, and is stored with the objects registered."""
        return {name: each for name, each in self.data.items() if not _per_rank(each)}

    def describe(self) -> Live:
        """A fresh description of model and optimizer; see `megatron.live.describe`."""
        return describe(self.chunks, self.optimizer)

    def streams(self) -> dict[str, Stream]:
        """This rank's random streams."""
        return random_streams(device_of(self.chunks))

    def facts(self) -> dict[str, Any]:
        """More facts, as JSON, that a checkpoint must share, besides those of every model."""
        return {}

    def admit(self, path: Path, control: ControlPlane) -> None:
        """Ask more of a checkpoint than that its shape is the run's; raise to refuse it. Collective; nothing live is
        touched."""

    def count(self, consumed_train_samples: int) -> None:
        """Tell megatron-core how many samples have been consumed."""
        update_microbatches(consumed_train_samples)

    def learning_rate(self) -> float | None:
        """The learning rate of the first parameter group, as the optimizer holds it now."""
        optimizers = self.optimizer if isinstance(self.optimizer, (list, tuple)) else [self.optimizer]
        groups = getattr(optimizers[0], "param_groups", None) if optimizers else None
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None


def gather_objects(
    *,
    model: Any,
    optimizer: Any | None,
    scheduler: Any | None,
    data: Mapping[str, DataParallelBatchSampler] | None,
    register: Mapping[str, Any] | None,
) -> RunObjects:
    """The objects of a run from a manager's arguments of these names; megatron-core's own global state is registered
    with the user's."""
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            raise ConfigurationError(f"model must be a torch.nn.Module or a list of them, found {type(chunk).__name__}")
    streams = {f"data.{name}": each for name, each in (data or {}).items() if _per_rank(each)}
    registered = Registered({**(register or {}), **streams, **rerun_state()})
    return RunObjects(chunks, optimizer, scheduler, dict(data or {}), registered)


def _per_rank(data: Any) -> bool:
    return getattr(data, "per_rank_state", False)


@dataclass(frozen=True)
class Place:
    """This rank in this run."""

    topology: Topology
    coordinate: Coordinate

    @property
    def stem(self) -> str:
        """The name of this rank's shard file, without its ending."""
        return file_stem(self.coordinate, self.topology)

    @property
    def rank(self) -> int:
        """This rank's global number."""
        return global_rank()


def find_place(extra_axes: Mapping[str, int] | None) -> Place:
    """Read this rank's place from megatron-core. ConfigurationError where the sizes do not make up the world."""
    topology = read_topology(dict(extra_axes or {}))
    if topology.world_size != world_size():
        raise ConfigurationError(
            f"tensor x pipeline x data x context parallel sizes make {topology.world_size} ranks ({topology}), "
            f"but {world_size()} are running; initialise model parallelism before the ResumeManager"
        )
    return Place(topology, read_coordinate(topology))


def agree_on_shape(control: ControlPlane, place: Place, objects: RunObjects) -> RunShape:
    """The run's topology and model facts, the same on every rank. Collective over the control plane."""
    box: list[Live] = []

    def describe_rank() -> dict[str, Any]:
        box.append(objects.describe())
        return {"pp": place.coordinate.pp, **rank_facts(objects.chunks, box[0])}

    answers = control.together("describe the model", describe_rank)
    # Most ranks hold the same parameters as another: names are asked of one of each kind.
    kinds = {answer["trainable"]: rank for rank, answer in reversed(list(enumerate(answers or ())))}
    asked = control.announce("ask for the trainable parameters", sorted(kinds.values()))
    names = control.together(
        "name the trainable parameters", lambda: trainable_names(box[0]) if place.rank in asked else []
    )
    facts = None
    if answers is not None and names is not None:
        facts = {**model_facts(answers, [answer["pp"] for answer in answers], names), **objects.facts()}
    return RunShape(place.topology, control.announce("model facts", facts))


@dataclass(frozen=True)
class Shared:
    """What the managers of one process have in common where it has several, all used from one thread."""

    place: Place
    control: ControlPlane
    watch: Watch
