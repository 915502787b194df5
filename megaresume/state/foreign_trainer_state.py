"""A `trainer_state.json` that this release did not write: Twinkle's, Hugging Face's, or an older one of few fields.

Turns each into a `TrainerState`, and says in words what it derived and what it could not. A position that cannot be
derived is refused, never guessed. Knows the files' fields only: neither the weights beside them nor any pickle.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from megaresume.errors import ConfigurationError, TrainerStateError
from megaresume.state.document import parse_document, read_bytes, wrong_field
from megaresume.state.trainer_state import (
    SCHEMA_VERSION,
    TrainerState,
    amount,
    dumps,
    from_document,
    number,
    whole_number,
)
from megaresume.topology import JSON

logger = logging.getLogger("megaresume.state.foreign_trainer_state")

MAX_FOREIGN_BYTES = 64 << 20  # Hugging Face's holds the log of every step

# step-00001200 (ours), checkpoint-500 (Hugging Face, ms-swift), iter_0000100 (Megatron), epoch_1_step_40 (SpecForge)
_STEP_IN_NAME = re.compile(r"(?:^|[-_])(?:step|checkpoint|iter)[-_]?([0-9]{1,18})$", re.ASCII)


@dataclass(frozen=True)
class ForeignTrainerState:
    """What was read. shape: whose form it is ("megaresume" for our own). notes: what was derived or is not known."""

    state: TrainerState
    shape: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Asked:
    """A foreign document, and what the caller knows about the run that wrote it."""

    document: Mapping[str, JSON]
    source: str
    directory: str
    samples_per_epoch: int | None
    global_batch_size: int | None


def read_any_trainer_state(
    path: str | PathLike[str], *, samples_per_epoch: int | None = None, global_batch_size: int | None = None
) -> ForeignTrainerState:
    """Read a `trainer_state.json` of any known shape; what was derived is in `notes` and logged in one line.

    samples_per_epoch: training samples that one epoch uses (the dataset's size, less a dropped tail); gives the epoch
    where the file has none. global_batch_size: samples per step; gives the consumed samples where the file has none.
    Raises TrainerStateError naming file and field, ConfigurationError for a size below 1.
    """
    for name, size in (("samples_per_epoch", samples_per_epoch), ("global_batch_size", global_batch_size)):
        if size is not None and size < 1:
            raise ConfigurationError(f"{name} must be at least 1, found {size}")
    path = Path(path)
    source = str(path)
    data = read_bytes(path, max_bytes=MAX_FOREIGN_BYTES)
    document = parse_document(data, source=source, max_bytes=MAX_FOREIGN_BYTES)
    asked = _Asked(document, source, path.absolute().parent.name, samples_per_epoch, global_batch_size)
    if "schema_version" in document:
        return ForeignTrainerState(from_document(document, source=source), "megaresume", ())
    notes: list[str] = []
    if "cur_step" in document:
        shape, state = "Twinkle", _from_twinkle(asked, notes)
    elif {"log_history", "max_steps"} & document.keys():
        shape, state = "Hugging Face", _from_hugging_face(asked, notes)
    elif {"global_step", "consumed_train_samples"} & document.keys():
        shape, state = "an older one", _from_older(asked, notes)
    else:
        raise TrainerStateError(
            f"{source}: schema_version: is missing, and so are the fields of the other shapes that can be read "
            "(cur_step of Twinkle, log_history of Hugging Face, global_step or consumed_train_samples of older files): "
            "this is not a trainer state"
        )
    logger.warning("%s: trainer state read as %s: %s", source, shape, "; ".join(notes))
    return ForeignTrainerState(state, shape, tuple(notes))


def _from_twinkle(asked: _Asked, notes: list[str]) -> TrainerState:
    names = ("checkpoint_version", "cur_step", "consumed_train_samples", "gradient_accumulation_steps")
    version, calls, consumed, accumulation = (_required(asked, name) for name in names)
    if version != 1:
        raise wrong_field(asked.source, names[0], "version 1, the only one of Twinkle's known here", version)
    if accumulation < 1:
        raise wrong_field(asked.source, names[3], "a whole number of at least 1", accumulation)
    step, rest = divmod(calls, accumulation)
    notes.append(f"global_step {step} = {calls} forward-backward calls / {accumulation} accumulated")
    if rest:
        notes.append(f"{rest} calls of an unfinished step are not counted")
    if consumed == 0 and step > 0:
        consumed = _consumed_from_step(asked, step, notes, "0 stands there, which is what Twinkle writes when not told")
    kept = {name: value for name, value in asked.document.items() if name not in names}
    return TrainerState(
        global_step=step,
        consumed_train_samples=consumed,
        gradient_accumulation_steps=accumulation,
        global_batch_size=asked.global_batch_size,
        epoch=_epoch_from_consumed(asked, consumed, notes),
        extra={"twinkle": kept} if kept else {},
    )


def _from_hugging_face(asked: _Asked, notes: list[str]) -> TrainerState:
    document, source = asked.document, asked.source
    step, max_steps = _required(asked, "global_step"), _required(asked, "max_steps")
    consumed = _consumed_from_step(asked, step, notes, "Hugging Face's file has none")
    epochs = document.get("epoch")
    if epochs is None:
        epoch = _epoch_from_consumed(asked, consumed, notes)
    else:
        epoch = math.floor(amount(epochs, "epoch", source))
        notes.append(f"epoch {epoch} = {epochs} rounded down")
    finished = step >= max_steps > 0
    notes.append(f"finished {str(finished).lower()}: step {step} of {max_steps}")
    flops, tokens, best = (document.get(name) for name in ("total_flos", "num_input_tokens_seen", "best_metric"))
    history = document.get("log_history")
    if isinstance(history, list) and history:
        notes.append(f"log_history ({len(history)} entries) is left behind")
    known = ("global_step", "epoch", "log_history", "total_flos", "num_input_tokens_seen", "best_metric")
    return TrainerState(
        global_step=step,
        consumed_train_samples=consumed,
        global_batch_size=asked.global_batch_size,
        epoch=epoch,
        flops=None if flops is None else amount(flops, "total_flos", source),
        # 0 is what the Trainer writes when it was not asked to count.
        tokens=None if tokens is None else whole_number(0)(tokens, "num_input_tokens_seen", source) or None,
        best_metric=None if best is None else number(best, "best_metric", source),
        finished=finished,
        extra={"hugging_face": {name: value for name, value in document.items() if name not in known}},
    )


def _from_older(asked: _Asked, notes: list[str]) -> TrainerState:
    document = dict(asked.document)
    if "global_step" not in document:
        document["global_step"] = _step_from_directory(asked, notes)
    if "consumed_train_samples" not in document:
        step = whole_number(0)(document["global_step"], "global_step", asked.source)
        document["consumed_train_samples"] = _consumed_from_step(asked, step, notes, "not recorded")
    if document.get("epoch") is None:
        consumed = whole_number(0)(document["consumed_train_samples"], "consumed_train_samples", asked.source)
        document["epoch"] = _epoch_from_consumed(asked, consumed, notes)
    blank = dumps(TrainerState(global_step=0, consumed_train_samples=0))
    defaults = parse_document(blank, source=asked.source)
    absent = [name for name in defaults if name not in document and name != "schema_version"]
    if absent:
        notes.append(f"not recorded, so zero, empty or unknown: {', '.join(absent)}")
    return from_document({**defaults, **document, "schema_version": SCHEMA_VERSION}, source=asked.source)


def _required(asked: _Asked, name: str) -> int:
    if name not in asked.document:
        raise TrainerStateError(f"{asked.source}: {name}: is missing")
    count: int = whole_number(0)(asked.document[name], name, asked.source)
    return count


def _step_from_directory(asked: _Asked, notes: list[str]) -> int:
    match = _STEP_IN_NAME.search(asked.directory)
    if match is None:
        raise TrainerStateError(
            f"{asked.source}: global_step: is missing, and the directory's name {asked.directory!r} does not tell it; "
            "give the directory back a name such as step-00001200 or checkpoint-1200"
        )
    notes.append(f"global_step {int(match[1])} is from the directory's name {asked.directory!r}")
    return int(match[1])


def _consumed_from_step(asked: _Asked, step: int, notes: list[str], why: str) -> int:
    if step == 0:
        return 0
    recorded = asked.document.get("global_batch_size")
    batch = asked.global_batch_size
    if recorded is not None:
        size: int = whole_number(1)(recorded, "global_batch_size", asked.source)
        if batch is not None and batch != size:
            raise wrong_field(asked.source, "global_batch_size", f"{batch}, the size that was given", size)
        batch = size
    if batch is None:
        raise TrainerStateError(
            f"{asked.source}: consumed_train_samples: cannot be told ({why}); "
            "give the global batch size of the run that wrote it (global_batch_size=)"
        )
    notes.append(f"consumed_train_samples {step * batch} = {step} steps x {batch} samples ({why})")
    return step * batch


def _epoch_from_consumed(asked: _Asked, consumed: int, notes: list[str]) -> int | None:
    size = asked.samples_per_epoch
    if size is None and "dataset_size" in asked.document:
        size = whole_number(1)(asked.document["dataset_size"], "dataset_size", asked.source)
    if size is None:
        notes.append("epoch is not known: neither it nor the size of the dataset was given")
        return None
    notes.append(f"epoch {consumed // size} = {consumed} consumed samples / {size} per epoch")
    return consumed // size
