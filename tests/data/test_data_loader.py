"""The loader over map-style datasets: prefetching, workers, random numbers, failing samples."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, get_worker_info

from megaresume.data import DataParallelBatchSampler, ResumableDataLoader
from megaresume.data.samples import SampleError
from megaresume.errors import ConfigurationError

# Three workers on a machine with two cores are slow, which is no matter here.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Ids(Dataset[int]):
    """Sample i is i; counts reads in this process."""

    def __init__(self, size: int) -> None:
        self.size, self.reads = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


class Augmented(Ids):
    """A sample drawn from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class Faulty(Ids):
    """Samples 3, 13, 23, ... raise, 5, 15, ... are None, 7, 17, ... raise StopIteration."""

    def __getitem__(self, index: int) -> Any:
        if index % 10 == 3:
            raise OSError(f"cannot read {index}")
        if index % 10 == 7:
            raise StopIteration
        return None if index % 10 == 5 else index


class Worker(Ids):
    """What the worker does with signals."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        ignored = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGTERM, signal.SIGUSR1)]
        os.kill(os.getpid(), signal.SIGTERM), os.kill(os.getpid(), signal.SIGUSR1)
        return torch.tensor([info is not None, *ignored, int(os.environ.get("MEGARESUME_TEST_INIT", "-1"))])


class Stuck(Ids):
    """Reads its first two samples, and then never comes back."""

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        if self.reads > 2:
            time.sleep(3600)
        return index


def note_worker(worker_id: int) -> None:
    os.environ["MEGARESUME_TEST_INIT"] = str(worker_id)


def sampler(size: int, **changed: Any) -> DataParallelBatchSampler:
    arguments = dict(micro_batch_size=2, global_batch_size=4, data_parallel_rank=0, data_parallel_size=1, seed=2)
    return DataParallelBatchSampler(size, **{**arguments, **changed})  # type: ignore[arg-type]


def lists(batches: Any, number: int | None = None) -> list[list[Any]]:
    if number is None:
        return [batch.tolist() for batch in batches]
    iterator = iter(batches)
    return [next(iterator).tolist() for _ in range(number)]


def expected(size: int, number: int, **changed: Any) -> list[list[int]]:
    batches = iter(sampler(size, **changed))
    return [next(batches) for _ in range(number)]


def test_d24_wrong_order_of_restore_and_iter_raises() -> None:
    ahead = sampler(100, consumed_samples=20).state_dict()
    order = sampler(100)
    loader = ResumableDataLoader(Ids(100), batch_sampler=order, num_workers=2, prefetch_factor=4)
    iterator = iter(loader)
    for restore in (
        lambda: order.load_state_dict(ahead),
        lambda: loader.load_state_dict(ahead),
        lambda: loader.resume_from_checkpoint(20),
        lambda: loader.skip_consumed_samples(4),
    ):
        with pytest.raises(ConfigurationError, match=r"live .*Restore first"):
            restore()
    assert next(iterator).tolist() == expected(100, 1)[0]
    del iterator
    order.load_state_dict(ahead)
    assert lists(loader, 3) == expected(100, 3, consumed_samples=20)


def test_d25_prefetched_is_not_consumed_whatever_the_workers() -> None:
    whole, state, read = expected(60, 40), None, []
    for workers, steps in ((2, 3), (0, 1), (3, 2), (1, 2)):  # fewer steps than batches in flight
        order = sampler(60)
        if state is not None:
            order.load_state_dict(state)
        prefetch = {"prefetch_factor": 4} if workers else {}
        loader = ResumableDataLoader(Ids(60), batch_sampler=order, num_workers=workers, **prefetch)
        iterator = iter(loader)
        for _ in range(steps):
            read += [next(iterator).tolist() for _ in range(loader.num_microbatches)]
            assert loader.advance() == 4
        state = loader.state_dict()
        assert loader.get_state()["consumed_train_samples"] == 2 * len(read)
    assert read == whole[: len(read)]


def test_d30_another_sampler_is_refused_not_half_skipped() -> None:
    foreign = BatchSampler(RandomSampler(range(10)), 2, drop_last=False)
    with pytest.raises(ConfigurationError, match="type BatchSampler .*cannot be resumed"):
        ResumableDataLoader(Ids(10), batch_sampler=foreign)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="type NoneType"):
        ResumableDataLoader(Ids(10))


def test_d31_no_skipped_sample_is_read() -> None:
    dataset = Ids(2_000_000)
    order = sampler(2_000_000, consumed_samples=1_000_000)
    batches = iter(ResumableDataLoader(dataset, batch_sampler=order))
    assert next(batches).tolist() == expected(2_000_000, 1, consumed_samples=1_000_000)[0]
    assert dataset.reads == 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("counted", [True, False])
def test_exhausted_passes_follow_each_other(workers: int, counted: bool) -> None:
    """A short epoch is fetched whole at once: only what was handed out may count as served."""
    order = sampler(8, epoch_tail="drop", epochs=3)
    loader = ResumableDataLoader(Ids(8), batch_sampler=order, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    del iterator  # thrown away, though the workers had fetched the epoch to its end
    epochs = []
    for _ in range(4):
        batches = []
        for number, batch in enumerate(loader, start=1):
            batches.append(batch.tolist())
            if counted and number % 2 == 0:
                loader.advance()
        epochs.append(batches)
    other = sampler(8, epoch_tail="drop", epochs=3)
    assert epochs == [list(other) for _ in range(4)] and epochs[3] == []
    if counted:
        assert loader.consumed_samples == 24 and order.finished


def test_persistent_workers_follow_a_moved_position() -> None:
    order = sampler(40)
    loader = ResumableDataLoader(
        Ids(40), batch_sampler=order, num_workers=2, persistent_workers=True, prefetch_factor=3
    )
    assert lists(loader, 2) == expected(40, 2)
    loader.resume_from_checkpoint(20)
    loader.resume_from_checkpoint(20)
    assert lists(loader, 2) == expected(40, 2, consumed_samples=20)
    loader.skip_consumed_samples(8)
    assert lists(loader, 2) == expected(40, 2, consumed_samples=28)


def test_a_skip_beyond_the_end_is_refused_and_moves_nothing() -> None:
    loader = ResumableDataLoader(Ids(40), batch_sampler=sampler(40, epochs=1))
    loader.skip_consumed_samples(36)
    with pytest.raises(ConfigurationError, match="consumed_samples 44 lies beyond the end"):
        loader.skip_consumed_samples(8)
    assert loader.get_state() == {"consumed_train_samples": 36, "replaced_samples": 0}
    assert len(loader) == 2 and lists(loader) == list(sampler(40, epochs=1, consumed_samples=36))
    with pytest.raises(TypeError, match="n must be an integer, got 1.5"):
        loader.skip_consumed_samples(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_augmentation_does_not_depend_on_where_the_run_stopped(workers: int) -> None:
    whole = lists(ResumableDataLoader(Augmented(24), batch_sampler=sampler(24)), 24)
    rows = [tuple(row) for batch in whole for row in batch]
    assert len(set(rows)) == len(rows) == 48  # other numbers for every sample, and in every epoch
    loader = ResumableDataLoader(Augmented(24), batch_sampler=sampler(24, consumed_samples=12), num_workers=workers)
    assert lists(loader, 18) == whole[6:]


@pytest.mark.parametrize("workers", [0, 2])
def test_no_global_random_state_is_read_or_moved(workers: int) -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    loader = ResumableDataLoader(Augmented(24), batch_sampler=sampler(24), num_workers=workers)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    before = states()
    first = lists(loader, 3)
    assert states() == before
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    assert lists(loader, 3) == first


def test_workers_ignore_the_signals_of_a_stop() -> None:
    loader = ResumableDataLoader(
        Worker(8), batch_sampler=sampler(8), num_workers=2, worker_init_fn=note_worker, timeout=60
    )
    batches = lists(loader, 4)
    assert [row for batch in batches for row in batch] == [[1, 1, 1, worker] for worker in (0, 0, 1, 1) * 2]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "the training process keeps its own handlers"


def test_a_worker_that_does_not_answer_cannot_hold_up_the_exit() -> None:
    """After an error torch may have to terminate a worker; one that ignored even that would hang the rank for ever."""
    code = (
        "import test_data_loader as t\n"
        "loader = t.ResumableDataLoader(t.Stuck(8), batch_sampler=t.sampler(8), num_workers=1, prefetch_factor=2)\n"
        "iterator = iter(loader)\n"
        "next(iterator)\n"
        "raise SystemExit(5)\n"
    )
    places = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    started = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120)
    assert started.returncode == 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinning memory needs a device")
def test_pinned_batches() -> None:
    loader = ResumableDataLoader(Augmented(24), batch_sampler=sampler(24), num_workers=1, pin_memory=True)
    assert next(iter(loader)).is_pinned()


def test_collate_gets_the_plain_samples() -> None:
    loader = ResumableDataLoader(Ids(12), batch_sampler=sampler(12), collate_fn=tuple, num_workers=1)
    assert next(iter(loader)) == tuple(expected(12, 1)[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_failing_samples_are_replaced_alike_everywhere(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    def loader(consumed: int, workers: int) -> ResumableDataLoader:
        return ResumableDataLoader(
            Faulty(40),
            batch_sampler=sampler(40, consumed_samples=consumed, epochs=2),
            num_workers=workers,
            max_replacements=6,
            none_fails=True,
        )

    plain = list(sampler(40, epochs=2))
    whole = lists(loader(0, 0))
    for batch, asked in zip(whole, plain, strict=True):
        for used, wanted in zip(batch, asked, strict=True):
            assert used == wanted if wanted % 10 not in (3, 5, 7) else used != wanted
            assert 0 <= used < 40 and used % 10 not in (3, 5, 7)
    again = loader(36, workers)
    assert lists(again) == whole[18:]
    assert "cannot read" in caplog.text and "StopIteration" in caplog.text and "is None" in caplog.text
    used_for = [dict(zip(sum(plain[at : at + 20], []), sum(whole[at : at + 20], []), strict=True)) for at in (0, 20)]
    assert any(used_for[0][wanted] != used_for[1][wanted] for wanted in (3, 5, 7, 13)), "replaced alike in every epoch"


def test_replacements_are_counted_when_trained_and_over_a_resume() -> None:
    def make() -> ResumableDataLoader:
        return ResumableDataLoader(Faulty(40), batch_sampler=sampler(40, epochs=1), max_replacements=9, none_fails=True)

    loader, counts = make(), []
    iterator = iter(loader)
    for _ in range(10):
        next(iterator), next(iterator)
        ahead = loader.replaced_samples
        loader.advance()
        counts.append(loader.replaced_samples)
        assert ahead == (counts[-2] if len(counts) > 1 else 0), "counted before it was trained"
    assert counts[-1] == 12 and loader.consumed_samples == 40
    for stop in range(1, 10):
        resumed = make()
        for _ in range(2):
            resumed.resume_from_checkpoint(4 * stop, replaced_samples=counts[stop - 1])
        iterator = iter(resumed)
        next(iterator), next(iterator)
        resumed.advance()
        assert resumed.get_state() == {"consumed_train_samples": 4 * stop + 4, "replaced_samples": counts[stop]}


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_policy_errors_are_raised_and_stop_iteration_does_not_end_the_epoch(workers: int) -> None:
    def read(index: int) -> None:
        order = sampler(40, shuffle=False, consumed_samples=index, micro_batch_size=1, global_batch_size=1)
        next(iter(ResumableDataLoader(Faulty(40), batch_sampler=order, num_workers=workers)))

    if workers == 0:  # one error is enough to wait for: torch takes 5 s to end a worker after it
        with pytest.raises(OSError, match="cannot read 3"):
            read(3)
    with pytest.raises(SampleError, match="sample 7 of epoch 0 failed to load.*StopIteration"):
        read(7)


def test_an_iterator_that_failed_does_not_pass_over_the_batch() -> None:
    order = sampler(40, shuffle=False)
    loader = ResumableDataLoader(Faulty(40), batch_sampler=order, collate_fn=list)
    iterator = iter(loader)
    assert next(iterator) == [0, 1]
    with pytest.raises(OSError, match="cannot read 3"):
        next(iterator)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="ended with OSError: cannot read 3; going on would skip"):
            next(iterator)
    order.seek(8)  # and it is not live any more
    assert next(iter(loader)) == [8, 9]


def test_replacements_end_after_the_named_number() -> None:
    class Broken(Ids):
        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            raise OSError(f"no disk for {index}")

    for size, attempts in ((40, 3), (1, 2)):
        dataset = Broken(size)
        order = sampler(size, micro_batch_size=1, global_batch_size=1)
        loader = ResumableDataLoader(dataset, batch_sampler=order, max_replacements=attempts)
        with pytest.raises(SampleError, match=rf"all {attempts} replacements .*no disk"):
            next(iter(loader))
        assert dataset.reads == attempts + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generator": torch.Generator()}, "takes no generator=: the loader has one of its own"),
        ({"shuffle": True}, "takes no shuffle="),
        ({"sampler": [1]}, "takes no sampler="),
        ({"in_order": False}, "takes no in_order="),
        ({"max_replacements": -1}, "max_replacements must be at least 0"),
        ({"batch_size": 4}, "batch_size=4"),
        ({"on_iterable": "restart"}, "on_iterable='restart'"),
    ],
)
def test_arguments_that_would_break_the_order_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ResumableDataLoader(Ids(40), batch_sampler=sampler(40), **arguments)


def test_a_sampler_for_another_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="holds 41 samples, its sampler was made for dataset_size 40"):
        ResumableDataLoader(Ids(41), batch_sampler=sampler(40))


def test_batch_reads_that_are_not_used_are_said(caplog: pytest.LogCaptureFixture) -> None:
    class Batched(Ids):
        def __getitems__(self, indices: list[int]) -> list[int]:
            raise AssertionError("would read many samples under one seed")

    with caplog.at_level(logging.INFO, "megaresume.data"):
        loader = ResumableDataLoader(Batched(12), batch_sampler=sampler(12))
    assert "__getitems__ is not used" in caplog.text
    assert lists(loader, 1) == expected(12, 1)


def test_a_plain_torch_loader_takes_the_sampler_too() -> None:
    loader: DataLoader[Any] = DataLoader(Ids(40), batch_sampler=sampler(40), generator=torch.Generator())
    assert lists(loader, 5) == expected(40, 5)
