"""The pool of ranks does what tests rely on: results by rank, errors with their traceback, and no hang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed

from tests.ranks import RankDied, Ranks, RankTraceback


def _describe(greeting: str) -> tuple[str, int, int, str, str]:
    """What a rank sees of its world."""
    total = torch.tensor([torch.distributed.get_rank()])
    torch.distributed.all_reduce(total)
    return greeting, torch.distributed.get_rank(), int(total), os.environ["RANK"], os.environ["WORLD_SIZE"]


def _fail_on_one(index: int) -> None:
    rank = torch.distributed.get_rank()
    if rank == index:
        expected = rank + 40
        assert rank == expected
    torch.distributed.barrier()


def _raise_unpicklable() -> None:
    class Local(Exception):
        pass

    raise Local("made here")


def _die(code: int) -> None:
    if torch.distributed.get_rank() == 1:
        os._exit(code)
    torch.distributed.barrier()


def _kill_all() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang_on_one(index: int) -> None:
    if torch.distributed.get_rank() == index:
        _sleep_here()


def _sleep_here() -> None:
    time.sleep(600)


def _pid() -> int:
    return os.getpid()


def _cpu_seconds() -> float:
    return float(psutil.Process().cpu_times().user)


def _square(value: Any) -> Any:
    return value**2


@pytest.mark.parametrize("world_size", [8, 1, 2, 8])
def test_results_come_back_by_rank_for_any_world_size(ranks: Ranks, world_size: int) -> None:
    results = ranks.run(_describe, "hello", world_size=world_size)
    total = sum(range(world_size))
    assert results == [("hello", rank, total, str(rank), str(world_size)) for rank in range(world_size)]


def test_processes_are_used_again(ranks: Ranks) -> None:
    assert ranks.run(_pid, world_size=4) == ranks.run(_pid, world_size=4)


def test_processes_are_fresh_after_close(ranks: Ranks) -> None:
    before = ranks.run(_pid, world_size=2)
    ranks.close()
    assert not set(before) & set(ranks.run(_pid, world_size=2))


def test_megatron_is_imported_before_a_rank_starts(ranks: Ranks) -> None:
    ranks.close()
    (seconds,) = ranks.run(_cpu_seconds, world_size=1)
    assert seconds < 2.0, "importing torch and megatron-core takes more: the forkserver did not preload them"


def test_tensors_travel(ranks: Ranks) -> None:
    (result,) = ranks.run(_square, torch.tensor([2.0, 3.0]), world_size=1)
    assert result.tolist() == [4.0, 9.0]


def test_an_exception_is_raised_with_its_traceback_and_the_pool_lives_on(ranks: Ranks) -> None:
    pids = ranks.run(_pid, world_size=4)
    with pytest.raises(AssertionError, match="assert rank == expected") as caught:
        ranks.run(_fail_on_one, 2, world_size=4)
    assert isinstance(caught.value.__cause__, RankTraceback)
    text = str(caught.value.__cause__)
    assert text.startswith("\nrank 2:\n"), "the others' broken collectives are echoes"
    assert "in _fail_on_one" in text
    assert "expected = 42" in text
    assert ranks.run(_pid, world_size=4) == pids


def test_an_exception_that_cannot_be_pickled_is_shown_all_the_same(ranks: Ranks) -> None:
    with pytest.raises(RankTraceback, match="Local: made here"):
        ranks.run(_raise_unpicklable, world_size=1)


def test_a_death_is_told_at_once_and_the_next_run_has_new_ranks(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RankDied, match="rank 1 ended with exit code 7") as caught:
        ranks.run(_die, 7, world_size=4)
    assert caught.value.exit_codes[1] == 7
    assert time.monotonic() - began < 30
    assert len(ranks.run(_pid, world_size=4)) == 4


def test_all_ranks_may_kill_themselves(ranks: Ranks) -> None:
    with pytest.raises(RankDied) as caught:
        ranks.run(_kill_all, world_size=2)
    assert caught.value.exit_codes == [-signal.SIGKILL] * 2


def test_a_hang_ends_at_the_time_limit_and_shows_where(ranks: Ranks) -> None:
    ranks.run(_pid, world_size=2)
    with pytest.raises(RankDied, match="rank 1 did not come back from _hang_on_one") as caught:
        ranks.run(_hang_on_one, 1, world_size=2, timeout_s=2.0)
    assert "in _sleep_here" in str(caught.value)
    assert "rank 0" not in str(caught.value)
