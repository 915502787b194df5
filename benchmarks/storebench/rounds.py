"""One mode (so many ranks) of the benchmark, on one rank: contenders and limits in turn, round after round."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.storebench import limits
from benchmarks.storebench.contenders import Contender, all_contenders, state_of
from benchmarks.storebench.measuring import drop_from_cache, files_below, memory_peak, slowest, timed
from megaresume.megatron.live import describe
from megaresume.megatron.rng import random_streams
from megaresume.state.rank_state import capture
from megaresume.state.registered import Registered
from tests.small_models import SmallModel, build

SCRATCH_STEPS = 2  # before anything is measured: the optimizer's state exists from the first on
STEPS_DURING = 20
STEP_ROUNDS = 3


@dataclass
class Results:
    """Seconds (or bytes) of every round, by contender and by row; what failed, in words."""

    state_bytes: int = 0
    file_bytes: int = 0
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def add(self, row: str, name: str, value: float) -> None:
        self.rows.setdefault(row, {}).setdefault(name, []).append(value)


def measure(config: SmallModel, directory: Path, rounds: int, *, seed: int) -> dict[str, Any]:
    """All of a mode, or of its first saves alone where there are no rounds; the same result on every rank. Collective.

    `seed` is that of the order in which the contenders take turns.
    """
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    run = build(config)
    for step in range(SCRATCH_STEPS):
        run.train_step(step)
    live = describe(run.chunks, run.optimizer)
    ours = capture(live, random_streams(None), Registered({})).tensors
    whole = state_of(live, ours)
    results = Results(state_bytes=_total(sum(tensor.nbytes for tensor in ours.values())))
    contenders = all_contenders(run, whole, directory)
    results.settings = {each.name: each.settings for each in contenders}
    run.train_step(0)  # memory for copies is made ready behind a step, as in a training run
    order = random.Random(seed)  # the same on every rank
    raw = directory / "raw" / f"{dist.get_rank()}"
    raw.parent.mkdir(parents=True, exist_ok=True)
    limits.write_limit(
        raw, sum(tensor.nbytes for tensor in ours.values())
    )()  # so that nobody's write is the very first
    raw.unlink()
    own_bytes = _measure_first(order.sample(contenders, len(contenders)), directory, results)
    if not rounds:
        return vars(results)
    results.file_bytes = _total(own_bytes)
    copies = dict(zip(("copy", "copy of all"), limits.copy_limits(ours, whole), strict=True))
    turns: list[Contender | None] = [None, *contenders]  # None: the limits
    for _ in range(rounds):
        # What one leaves behind (a disk that is still busy, pages that a fork has made read-only) is not always borne
        # by the same one.
        order.shuffle(turns)
        for turn in turns:
            if turn is None:
                _measure_limits(results, copies, raw, own_bytes)
            else:
                _one_round(turn, directory, results)
    with _plain_torch():
        _measure_steps(contenders, directory, results)
    return vars(results)


def _total(mine: int) -> int:
    tensor = torch.tensor([mine])
    dist.all_reduce(tensor)
    return int(tensor)


def _measure_first(contenders: list[Contender], directory: Path, results: Results) -> int:
    """The first save of each in this process, and the memory that it takes; returns this rank's bytes of ours."""
    own_bytes = 0
    for contender in contenders:
        path, peak = directory / contender.name.replace(" ", "-"), list[int]()
        gc.collect()

        def save(contender: Contender = contender, path: Path = path, peak: list[int] = peak) -> None:
            with memory_peak(peak):
                contender.save(path).wait()

        seconds = _attempt(contender, "first save", results, lambda save=save: timed(save))  # type: ignore[misc]
        if seconds is not None:
            results.add("first save", contender.name, seconds)
            results.add("memory of a save", contender.name, slowest(peak[0]))
            sizes = [file.stat().st_size for file in files_below(contender.where(path))]
            results.add("bytes written", contender.name, sum(sizes))
            if contender.ours and not own_bytes:
                shards = sorted(contender.where(path).glob("*.safetensors"))
                own_bytes = shards[dist.get_rank()].stat().st_size
        _remove(contender, path)
    return own_bytes


def _measure_limits(results: Results, copies: Mapping[str, Callable[[], None]], raw: Path, size: int) -> None:
    with _plain_torch():
        for name, copy in copies.items():  # the first into idle memory
            results.add("limits", name, timed(copy))
    results.add("limits", "write", timed(limits.write_limit(raw, size)))
    for threads in (1, 2):
        drop_from_cache(raw.parent)
        results.add("limits", f"read cold, {threads} threads", timed(limits.read_limit(raw, threads=threads)))
    raw.unlink()


def _one_round(contender: Contender, directory: Path, results: Results) -> None:
    path = directory / contender.name.replace(" ", "-")
    box: list[Any] = []

    def save() -> tuple[float, float]:
        dist.barrier()
        started = time.perf_counter()
        box.append(contender.save(path))
        blocked = time.perf_counter() - started
        box[0].wait()
        return slowest(blocked), slowest(time.perf_counter() - started)

    times = _attempt(contender, "save", results, save)
    if times is not None:
        results.add("blocking", contender.name, times[0])
        results.add("durable", contender.name, times[1])
        if contender.load is not None:
            _load_rounds(contender, contender.load, path, results)
    _remove(contender, path)


def _load_rounds(contender: Contender, load: Callable[[Path], None], path: Path, results: Results) -> None:
    def load_it() -> float | None:
        return _attempt(contender, "load", results, lambda: timed(lambda: load(path)))

    warm = load_it()
    if warm is None:
        return
    results.add("load warm", contender.name, warm)
    drop_from_cache(contender.where(path))
    cold = load_it()
    if cold is None:
        return
    results.add("load cold", contender.name, cold)
    if contender.name not in results.rows.get("memory of a load", {}):
        peak: list[int] = []
        with memory_peak(peak):  # which takes time itself
            load_it()
        results.add("memory of a load", contender.name, slowest(peak[0]))


def _attempt(contender: Contender, what: str, results: Results, function: Callable[[], Any]) -> Any | None:
    key = f"{contender.name}: {what}"
    if key in results.failures:
        return None
    try:
        with contextlib.nullcontext() if contender.needs_stand_in else _plain_torch():
            return function()
    except Exception as error:
        if contender.ours:
            raise
        results.failures[key] = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
        return None


def _plain_torch() -> AbstractContextManager[None]:
    """Without the stand-in that redirects every call of torch to the CPU: machines with accelerators have none."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def _remove(contender: Contender, path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(contender.where(path), ignore_errors=True)
    dist.barrier()


def _measure_steps(contenders: list[Contender], directory: Path, results: Results) -> None:
    """How long training steps take while a save is being written, and while none is; and what a save costs training
    altogether, waiting included."""
    step = _training_step()
    for _ in range(STEPS_DURING):
        step()
    for _ in range(STEP_ROUNDS):
        alone = [timed(step) for _ in range(STEPS_DURING)]
        for contender in (each for each in contenders if each.asynchronous):
            path = directory / contender.name.replace(" ", "-")
            dist.barrier()
            started = time.perf_counter()
            saving = _attempt(contender, "save", results, lambda c=contender, p=path: c.save(p))  # type: ignore[misc]
            if saving is None:
                continue
            cost, during = slowest(time.perf_counter() - started), []
            while _total(int(not saving.done())):
                during.append(timed(step))
            saving.wait()
            for seconds in during:
                results.add("step", contender.name, seconds)
            results.add("lost to a save", contender.name, cost + sum(during) - len(during) * statistics.median(alone))
            _remove(contender, path)
        for seconds in alone:
            results.add("step", "no save", seconds)


def _training_step() -> Callable[[], None]:
    """A step in fp32, its gradients reduced over all ranks: one of the model above, in bf16 on a CPU, would outlast a
    save."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(12)])
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.randn(128, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        gradients = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
        dist.all_reduce(gradients)
        optimizer.step()
        sum(range(100_000))  # the Python of a training loop, which holds the interpreter's lock

    return step
