"""A root that cannot be one, a full disk, a rank that fails or stalls: all ranks hear of it, and nothing hangs."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megaresume import errors as named
from megaresume import restoring
from megaresume.errors import ConfigurationError, MegaresumeError, SaveError
from megaresume.store import control, fs, layout
from tests.harness import (
    Outcome,
    assert_continues,
    differences,
    digest,
    open_manager,
    start,
    train_steps,
    tree,
)
from tests.ranks import Ranks
from tests.refusals import (
    CONFIG,
    SECOND,
    SOON_S,
    STEPS,
    Refusal,
    Waiting,
    all_refused,
    assert_refused,
    flip,
    refused,
    save_at_zero,
    whole_run,
)
from tests.small_models import SmallModel

FOUR_RANKS = SmallModel(tp=2, dp=2, num_layers=2, global_batch_size=4)


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    return whole_run(ranks, tmp_path_factory.mktemp("whole") / "root")


# --- a root that cannot be one ----------------------------------------------------------------------------------------


@contextmanager
def failing(module: Any, name: str, code: int, *, on_rank: int, where: str = "") -> Iterator[None]:
    """On one rank, the function of `module` fails as the system would, for paths that end with `where`."""
    usual = getattr(module, name)

    def fail(path: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == on_rank and str(path).endswith(where):
            raise OSError(code, os.strerror(code), str(path))
        return usual(path, *args, **kwargs)

    setattr(module, name, fail)
    try:
        yield
    finally:
        setattr(module, name, usual)


def refused_roots(config: SmallModel, directory: Path) -> dict[str, Refusal]:
    """This rank's refusal for each kind of root that is none. `directory` holds the file `file`."""
    loop = start(config)
    rank = dist.get_rank()
    outcomes = {
        "a file": refused(loop, directory / "file", {}, {}),
        "below a file": refused(loop, directory / "file" / "root", {}, {}),
        "t06 not shared": refused(loop, directory / f"of-rank-{rank}", {}, {}),
    }
    for name, code in {"full": errno.ENOSPC, "read-only": errno.EROFS, "not permitted": errno.EACCES}.items():
        with failing(fs, "write_file_durably", code, on_rank=0, where=".nonce"):
            outcomes[name] = refused(loop, directory / "root", {}, {})
    for scheme in ("s3://bucket/run", "hf://org/run", "file:///tmp/run", "abfs://x/y"):
        outcomes[scheme] = refused(loop, scheme, {}, {})
        outcomes[f"Path of {scheme}"] = refused(loop, Path(scheme), {}, {})
        outcomes[f"from {scheme}"] = refused(loop, directory / "root", {"resume_from": scheme}, {})
    return outcomes


def test_t06_u09_a_root_that_is_none(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    per_rank = ranks.run(refused_roots, CONFIG, tmp_path, world_size=2)
    for name, needles in {
        "a file": ("file: expected a directory, .* found a file", "Name another root"),
        "below a file": ("file/root", "Not a directory|not a directory", "another root"),
        "t06 not shared": ("of-rank-0", "of-rank-1", "not shared", "Give every rank the same path"),
        "full": ("cannot be written", "No space left", "free some space"),
        "read-only": ("cannot be written", "Read-only", "another root"),
        "not permitted": ("cannot be written", "Permission denied", "write permission"),
    }.items():
        assert_refused([each[name] for each in per_rank], named.RootError, *needles)
    for name in per_rank[0]:
        if ":/" in name:
            assert_refused([each[name] for each in per_rank], ConfigurationError, "URI|URL", re.escape(name[-4:]))
    assert [path.name for path in tmp_path.iterdir() if ":" in path.name] == []
    assert [path.name for path in Path.cwd().iterdir() if path.name.endswith(":")] == []


def save_with_a_full_disk(config: SmallModel, root: Path) -> tuple[list[str], Outcome]:
    """The disk is full for rank 1 at step 2's save and has room again at step 4's; training goes on in between."""
    loop = start(config)
    said, results = [], {}
    with open_manager(loop, root) as manager:
        report = manager.resume()
        for step, result in train_steps(loop, manager, STEPS):
            results[step] = result
            if step in (1, 4):
                manager.save()
            if step == 2:
                dist.barrier()
                files = tree(root)
                dist.barrier()
                with failing(fs, "write_vectors", errno.ENOSPC, on_rank=1):
                    try:
                        manager.save()
                    except SaveError as error:
                        said.append(f"{type(error).__name__}: {error}")
                dist.barrier()
                said += differences(files, tree(root))
                dist.barrier()
    return said, Outcome(report, results, digest(loop), manager.step, manager.should_stop)


def test_a23_a_full_disk_fails_the_save_and_not_the_run(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (first, outcome), (second, other) = ranks.run(save_with_a_full_disk, CONFIG, root, world_size=2)
    (text, *changed), (other_text, *_) = first, second
    assert text == other_text
    assert text.startswith("SaveError: ")
    for needle in ("rank 1", SECOND, "ENOSPC", r"while \d+ bytes", "What was committed before is untouched"):
        assert re.search(needle, text), text
    assert set(changed) <= {layout.EVENTS, layout.STEP_LOG}
    assert_continues([outcome, other], whole[1])
    assert sorted(path.name for path in root.glob("*step-*")) == [layout.step_directory(step) for step in (1, 4, 6)]


# --- a rank that fails or stalls --------------------------------------------------------------------------------------


def test_j10_one_ranks_reason_is_everyones(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_at_zero, FOUR_RANKS, tmp_path / "whole", world_size=4)
    file = "tp01-pp00-dp01.safetensors"
    roots = [tmp_path / name for name in ("missing", "pipe", "directory", "altered")]
    for root in roots:
        shutil.copytree(tmp_path / "whole", root)
    (roots[0] / "step-00000000" / file).unlink()
    (roots[1] / "step-00000000" / file).unlink()
    os.mkfifo(roots[1] / "step-00000000" / file)
    (roots[2] / "step-00000000" / file).unlink()
    (roots[2] / "step-00000000" / file).mkdir()
    flip(roots[3] / "step-00000000" / file, 200)
    tries = [(root, {"resume_from": "0"}, {}) for root in roots]
    per_rank = ranks.run(all_refused, FOUR_RANKS, tries, world_size=4)
    for i, needle in enumerate(("missing", "not a plain file|expected a plain file", "plain file", "altered")):
        refusal = [each[i] for each in per_rank]
        assert_refused(refusal, named.CheckpointDamagedError, r"rank 3 \(tp01-pp00-dp01\)", file, needle)


@contextmanager
def stalling(name: str, *, on_rank: int, seconds: float) -> Iterator[None]:
    """On one rank, a reading function of `restoring` hangs for a while, as a read from a dead file server does."""
    usual = getattr(restoring, name)

    def stall(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == on_rank:
            time.sleep(seconds)
        return usual(*args, **kwargs)

    setattr(restoring, name, stall)
    try:
        yield
    finally:
        setattr(restoring, name, usual)


def stall_and_resume(config: SmallModel, root: Path) -> tuple[dict[str, Refusal], list[str]]:
    loop = start(config)
    waiting = Waiting()
    logging.getLogger("megaresume.store.control").addHandler(waiting)
    usual, control.LOG_EVERY_S = control.LOG_EVERY_S, 1.0
    outcomes = {}
    try:
        for name in ("read_header", "stream_tensors"):
            with stalling(name, on_rank=1, seconds=4.5):
                outcomes[name] = refused(loop, root, {"timeout_s": 3.0}, {})
    finally:
        control.LOG_EVERY_S = usual
        logging.getLogger("megaresume.store.control").removeHandler(waiting)
    return outcomes, waiting.lines


def test_j09_a_stalled_read_is_named_on_all_ranks(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    before = tree(root)
    (first, lines), (second, _) = ranks.run(stall_and_resume, CONFIG, root, world_size=2)
    stalled = r"step-00000006: no answer from rank 1 \(tp01-pp00-dp00\) within 3 s"
    assert_refused([first["read_header"], second["read_header"]], MegaresumeError, stalled)
    for each in (first, second):
        # In phase 2 the other rank has read into its live tensors by then: nothing may go on from there.
        assert each["stream_tensors"].error == "PoisonedError"
        assert re.search(stalled, each["stream_tensors"].text)
        assert each["stream_tensors"].seconds < SOON_S
    assert first["stream_tensors"].text == second["stream_tensors"].text
    assert any(re.search(r"waiting for rank 1 .*of at most 3 s", line) for line in lines), lines
    assert tree(root) == before
