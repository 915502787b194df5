"""The CPU stand-in: what it redirects and leaves alone, and that real megatron-core trains behind it, repeatably."""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from megatron.core import tensor_parallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from megaresume.errors import ConfigurationError, UnsupportedError
from megaresume.megatron.cpu import is_installed, use_cpu
from tests.ranks import Ranks
from tests.small_models import TOPOLOGIES, SmallModel, StepResult, build


def _on_one_rank(ranks: Ranks, function: Callable[..., Any], *args: Any) -> Any:
    """The stand-in changes the process for good, so even its unit tests run in a rank."""
    return ranks.run(function, *args, world_size=1)[0]


# --- When it is on ---


def _on_a_machine_with_cuda() -> None:
    torch.cuda.is_available = lambda: True
    before = dict(vars(torch.cuda))
    assert use_cpu() is False
    with pytest.raises(ConfigurationError, match='CUDA_VISIBLE_DEVICES=""'):
        use_cpu(force=True)
    assert not is_installed()
    assert vars(torch.cuda) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_machine_with_cuda_is_never_touched(ranks: Ranks) -> None:
    ranks.close()
    _on_one_rank(ranks, _on_a_machine_with_cuda)
    ranks.close()


def _messages_of_two_calls() -> list[str]:
    assert not is_installed()
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megaresume").addHandler(handler)
    assert [use_cpu(), use_cpu(force=True), is_installed()] == [True] * 3
    return messages


def test_it_says_in_one_line_that_it_is_on(ranks: Ranks) -> None:
    ranks.close()
    first, second = ranks.run(_messages_of_two_calls, world_size=2)
    assert len(first) == 1 and "\n" not in first[0] and "CPU" in first[0]
    assert second == [], "one line per run, not per rank"


# --- What it redirects ---


def _devices() -> None:
    use_cpu()
    parameter = torch.nn.Parameter(torch.ones(2))
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], dtype=torch.float, device="cuda:1"),
        torch.empty(2, device=torch.device("cuda")),
        torch.arange(2, device=torch.cuda.current_device()),
        torch.ones(2, device=0),
        torch.zeros_like(parameter, device="cuda"),
        parameter.new_zeros(2, device="cuda"),
        parameter.to("cuda", torch.bfloat16),
        parameter.to(device="cuda"),
        torch.nn.Linear(2, 2, device="cuda").cuda().to("cuda").weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert parameter.cuda() is parameter
    assert parameter.cuda(torch.cuda.current_device(), non_blocking=True) is parameter
    assert torch.empty(2, device="meta").device.type == "meta"
    assert parameter.to(torch.float64).dtype == torch.float64


def test_cuda_tensors_are_made_on_the_cpu(ranks: Ranks) -> None:
    _on_one_rank(ranks, _devices)


def _types() -> None:
    use_cpu()
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.float16).dtype == torch.float16
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype == torch.float16
    tensor = torch.arange(3.0, requires_grad=True)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    for twin in (torch.load(buffer), copy.deepcopy(tensor)):
        assert twin.tolist() == [0.0, 1.0, 2.0] and twin.requires_grad


def test_tensors_say_they_are_cuda_and_still_cast_copy_and_save(ranks: Ranks) -> None:
    _on_one_rank(ranks, _types)


def _streams() -> None:
    use_cpu()
    stream, event = torch.cuda.Stream(device=torch.cuda.current_device()), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        stream.record_event(event)
    torch.cuda.default_stream().wait_event(event)
    event.synchronize()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert event.query()
    assert torch.cuda.is_available() is False, "code that asks is told the truth"


def test_streams_and_events_do_nothing(ranks: Ranks) -> None:
    _on_one_rank(ranks, _streams)


def _backward() -> None:
    use_cpu()
    seen: list[str] = []
    tensor = torch.ones(2, requires_grad=True)
    tensor.register_hook(lambda gradient: seen.append(torch.zeros(1, device="cuda").type()))
    tensor.sum().backward()
    torch.autograd.backward(tensor.sum())
    torch.autograd.grad(tensor.sum(), tensor)
    assert seen == ["torch.cuda.FloatTensor"] * 3


def test_it_is_on_during_the_backward_pass(ranks: Ranks) -> None:
    _on_one_rank(ranks, _backward)


def _in_a_thread() -> None:
    use_cpu()
    seen: list[str] = []

    def body() -> None:
        use_cpu()
        seen.append(torch.zeros(1, device="cuda").type())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == ["torch.cuda.FloatTensor"]


def test_a_thread_of_ones_own_turns_it_on_for_itself(ranks: Ranks) -> None:
    _on_one_rank(ranks, _in_a_thread)


def _compiled() -> None:
    use_cpu()
    compiling: list[bool] = []

    @torch.compile
    def double(tensor: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return tensor * 2

    assert [double(torch.ones(1)).item() for _ in range(3)] == [2.0] * 3
    assert compiling == [False] * 3


def test_what_megatron_compiles_runs_as_it_is_written(ranks: Ranks) -> None:
    _on_one_rank(ranks, _compiled)


# --- Random numbers ---


def _device_generator_is_the_cpu_generator() -> None:
    use_cpu()
    torch.cuda.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)
    state = torch.cuda.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())
    after = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), after)


def test_the_device_generator_is_the_cpu_generator(ranks: Ranks) -> None:
    _on_one_rank(ranks, _device_generator_is_the_cpu_generator)


def _tracker() -> list[str]:
    use_cpu()
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    megatron_logger = logging.getLogger("megatron.core.tensor_parallel.random")
    megatron_logger.addHandler(handler)
    expected = {}
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        expected[seed] = torch.rand(6)
    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("two", 2)
    tracker.add("three", 3)
    default, two, three = [torch.rand(2)], [], []
    for _ in range(2):
        with tracker.fork("two"):
            two.append(torch.rand(1))
            with tracker.fork("three"):
                three.append(torch.rand(3))
            two.append(torch.rand(2))
        default.append(torch.rand(2))
    for seed, draws in {1: default, 2: two, 3: three}.items():
        assert torch.equal(torch.cat(draws), expected[seed]), f"the stream of seed {seed}"
    megatron_logger.warning("something else")
    return messages


def test_tracker_streams_are_swapped_in_and_out_without_a_warning(ranks: Ranks) -> None:
    assert _on_one_rank(ranks, _tracker) == ["something else"]


def _recomputation() -> None:
    run = build(SmallModel())
    assert run.chunks
    layer = torch.nn.Linear(8, 8)
    masks: list[torch.Tensor] = []

    def function(tensor: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            mask = torch.nn.functional.dropout(torch.ones(8, device="cuda"), 0.5)
        masks.append(mask)
        return layer(tensor) * mask

    tensor_parallel.checkpoint(function, False, torch.ones(8, requires_grad=True)).sum().backward()
    forward, recomputed = masks
    assert torch.equal(forward, recomputed)


def test_recomputed_activations_get_the_same_dropout(ranks: Ranks) -> None:
    _on_one_rank(ranks, _recomputation)


def _graph_safe_state() -> None:
    use_cpu()
    with pytest.raises(UnsupportedError, match="use_cudagraphable_rng"):
        megatron_random._get_cuda_rng_state(clone=True, graph_safe=True)


def test_graph_safe_random_numbers_are_refused_by_name(ranks: Ranks) -> None:
    _on_one_rank(ranks, _graph_safe_state)


# --- Real models ---


class Outcome(NamedTuple):
    """What a rank is left with after training."""

    steps: list[StepResult]
    state_digest: str
    """Of every weight and every random stream."""
    optimizers: int


def _train(config: SmallModel, steps: int) -> Outcome:
    run = build(config)
    results = [run.train_step(step) for step in range(steps)]
    digest = hashlib.sha256()
    for chunk in run.chunks:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            digest.update(parameter.detach().float().numpy().tobytes())
    for name, state in sorted(get_cuda_rng_tracker().get_states().items()):
        digest.update(name.encode())
        digest.update(state.numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    optimizers = run.optimizer.chained_optimizers if isinstance(run.optimizer, ChainedOptimizer) else [run.optimizer]
    return Outcome(results, digest.hexdigest(), len(optimizers))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_two_uninterrupted_runs_are_bit_equal(ranks: Ranks, name: str) -> None:
    config, steps = TOPOLOGIES[name], 5
    first = ranks.run(_train, config, steps, world_size=config.world_size)
    second = ranks.run(_train, config, steps, world_size=config.world_size)
    assert first == second

    norms = [[result.grad_norm for result in outcome.steps] for outcome in first]
    assert all(rank_norms == norms[0] for rank_norms in norms), "the gradient norm is of the whole model"
    losses = [result.loss for result in first[-1].steps]
    assert len(set(losses)) == steps, "every step trains on other samples"
    trained = [result for result in first[-1].steps if not result.skipped]
    assert trained and trained[-1].loss < trained[0].loss
    skipped = [result.skipped for result in first[-1].steps]
    assert any(skipped) == (config.precision == "fp16"), "fp16 starts with a loss scale that overflows"
    assert {outcome.optimizers for outcome in first} == {2 if config.moe else 1}
    assert sum(outcome.steps[0].loss is not None for outcome in first) == config.world_size // config.pp


def _losses(config: SmallModel) -> list[float | None]:
    run = build(config)
    return [run.train_step(step).loss for step in range(2)]


def test_dropout_and_samples_matter(ranks: Ranks) -> None:
    """Else bit-equality would hold for runs that lost their random numbers or their place in the data."""
    usual = ranks.run(_losses, SmallModel(), world_size=1)
    assert ranks.run(_losses, SmallModel(dropout=0.0), world_size=1) != usual
    assert ranks.run(_losses, SmallModel(seed=7), world_size=1) != usual


def _same_samples_given_twice() -> None:
    by_number = build(SmallModel()).train_step(3)
    run = build(SmallModel())
    micro_batches = run.micro_batches(3)
    assert micro_batches == [[sample_id] for sample_id in range(24, 32)]
    assert run.train_step(micro_batches) == by_number
    assert run.train_step([*micro_batches[1:], [99]]) != build(SmallModel()).train_step(4)


def test_a_step_is_named_by_number_or_by_sample_ids(ranks: Ranks) -> None:
    _on_one_rank(ranks, _same_samples_given_twice)


def _ids_of_step_0(config: SmallModel) -> list[list[int]]:
    return build(config).micro_batches(0)


def test_data_parallel_ranks_share_a_global_batch(ranks: Ranks) -> None:
    parts = ranks.run(_ids_of_step_0, SmallModel(dp=2, micro_batch_size=2), world_size=2)
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
