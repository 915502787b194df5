"""Beginning a new adapter with the weights of a PEFT directory, in any topology. All else of it stays fresh."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from megaresume.adapters.admission import Tally, nonfinite, tally
from megaresume.adapters.objects import AdapterObjects
from megaresume.adapters.peft import PeftAdapter, read_peft, with_key
from megaresume.errors import StateMismatchError
from megaresume.megatron.live import reload_masters
from megaresume.megatron.lora import put_whole
from megaresume.run_objects import Shared


def initialise_from(
    directory: Path, objects: AdapterObjects, key: str, shared: Shared, *, allow: Collection[str]
) -> Tally:
    """Put each rank's part of the whole matrices into the adapter's parameters, and refresh the optimizer's masters.

    Every rank reads the directory. Collective. Raises StateMismatchError, before anything live is touched, for another
    rank, alpha, targets or base, tensors that are missing, unexpected or of another shape, and NaN or Inf, unless
    `allow` names it ("missing" ones keep their fresh values, "unexpected" ones are left out).
    """
    what = f"read the adapter in {directory}"
    box: list[PeftAdapter] = []

    def read() -> dict[str, Any]:
        box.append(read_peft(directory))
        place = shared.place.coordinate
        names_stage = place.tp == 0 and place.dp == 0 and place.cp == 0
        parameters = objects.parameters if names_stage else {}
        return {name: list(parameter.global_shape) for name, parameter in parameters.items()}

    shapes = shared.control.together(what, read)
    weights = {with_key(name, key): tensor for name, tensor in box[0].weights.items()}
    told = shared.control.decide(
        what, lambda: _judge(directory, box[0], weights, objects, shapes or [], frozenset(allow))
    )

    def put() -> None:
        with torch.no_grad():
            for name, parameter in objects.parameters.items():
                if name in weights:
                    put_whole(parameter, weights[name])
        reload_masters(objects.optimizer)

    shared.control.together(f"begin with {directory}", put)
    return Tally(*(tuple(names) for names in told))


def _judge(
    directory: Path,
    found: PeftAdapter,
    weights: dict[str, torch.Tensor],
    objects: AdapterObjects,
    shapes: Sequence[dict[str, list[int]]],
    allow: frozenset[str],
) -> list[list[str]]:
    own, base = objects.own_facts["adapter"], objects.own_facts["base"]["fingerprint"]
    problems = [
        f"{field} is {theirs} there, {own.get(field)} in this run"
        for field, theirs in (("rank", found.rank), ("alpha", found.alpha), ("targets", found.targets))
        if theirs != own.get(field) and field not in allow
    ]
    if found.base_fingerprint not in (None, base) and "base" not in allow:
        problems.append(f"base: it was trained on {found.base_fingerprint}, this run's is {base}")
    live = {name: shape for answer in shapes for name, shape in answer.items()}
    counts = tally({name: list(tensor.shape) for name, tensor in weights.items()}, live)
    for kind in ("missing", "unexpected"):
        if getattr(counts, kind) and kind not in allow:
            problems.append(f"tensors are {kind}")
    if counts.other_shape:
        problems.append("tensors are of another shape")
    if (bad := nonfinite(weights.items())) and "nonfinite" not in allow:
        problems.append(f"NaN or Inf in {', '.join(bad[:8])}")
    if problems:
        raise StateMismatchError(
            f"{directory} is not adapter {own['name']!r}: {'; '.join(problems)} ({counts}); nothing was loaded."
            f"{counts.details()}\nWhat may differ can be named: allow={{'alpha', 'missing', ...}}."
        )
    return [list(counts.matched), list(counts.missing), list(counts.unexpected), []]
