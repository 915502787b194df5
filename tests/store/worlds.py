"""Worlds of ranks for the store's tests: threads over one key-value store, and a disk that fails where it is told to.

Imports neither torch nor pytest, so that a child process that is killed at every system call starts quickly.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from megaresume.store import fs, strict_json
from megaresume.store.attempts import Attempt, claim_attempt
from megaresume.store.commit import CommitText, SaveReport, save_checkpoint
from megaresume.store.control import ControlPlane
from megaresume.store.discovery import Candidate, check_files
from megaresume.store.shard import Entry, ShardIdentity, Target, check_identity, read_header, stream_tensors

WRITING = ("makedirs", "write", "pwrite", "writev", "fsync", "rename", "link", "unlink", "rmdir")


class MemoryStore:
    """What the control plane needs of `torch.distributed.Store`, for threads of one process and without torch."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode("utf-8")

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise RuntimeError("wait timeout")
            time.sleep(0.001)


def run_ranks(
    world_size: int,
    function: Callable[[ControlPlane], Any],
    *,
    timeout_s: float = 20.0,
    store: Any = None,
    stores: list[Any] | None = None,
) -> list[Any]:
    """`function(control)` on `world_size` ranks, each a thread; what each returned, or the exception that it raised."""
    shared = store or MemoryStore()
    outcomes: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        own = stores[rank] if stores else shared
        try:
            control = ControlPlane(own, rank, world_size, timeout_s=timeout_s, label=f"tp{rank:02d}-pp00-dp00")
            outcomes[rank] = function(control)
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


class FaultyOs:
    """Stands in for `os` inside `fs.py`: counts calls that change the disk; `act(count, name, path)` may raise.

    `act` may also return "half", where a write then does the first half of its work and `after_half` is called. Nothing
    is really synced: no test's disk has to outlive a power loss, and hundreds of saves would wait for it.
    """

    def __init__(
        self, act: Callable[[int, str, str], str | None], after_half: Callable[[], None] | None = None
    ) -> None:
        self._act = act
        self._after_half = after_half
        self._lock = threading.Lock()
        self.count = 0
        self.trace: list[tuple[str, str]] = []
        self._paths: dict[int, str] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != "open" and name not in WRITING:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & (os.O_CREAT | os.O_DIRECTORY):
                return real(*args, **kwargs)
            path = self._paths.get(args[0], "?") if isinstance(args[0], int) else str(args[0])
            with self._lock:
                self.count += 1
                count = self.count
                self.trace.append((name, path if name not in ("rename", "link") else f"{path} -> {args[1]}"))
            if self._act(count, name, path) == "half":
                if name in ("write", "pwrite"):
                    data = memoryview(args[1])
                    real(args[0], data[: len(data) // 2], *args[2:])
                assert self._after_half is not None
                self._after_half()
            result = real(*args, **kwargs) if name != "fsync" else None
            if name == "open":
                self._paths[result] = path
            return result

        return call

    def __enter__(self) -> FaultyOs:
        self._before: Any = fs.os
        fs.os = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        fs.os = self._before


def sound_disk() -> FaultyOs:
    return FaultyOs(lambda *_: None)


def no_space(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


# --- checkpoints of a few bytes ---------------------------------------------------------------------------------------


def content(attempt: int, step: int, rank: int) -> bytes:
    return bytes((attempt * 31 + step * 7 + rank + at) % 256 for at in range(4096))


def save(
    root: Path, control: ControlPlane, attempt: Attempt, step: int, *, describe: Callable[[], None] | None = None
) -> SaveReport:
    """A save as a run makes it, of 4 KiB in each rank."""
    stem = f"tp{control.rank:02d}-pp00-dp00"

    def text() -> CommitText:
        if describe is not None:
            describe()
        state = strict_json.dump_json({"global_step": step, "attempt": attempt.attempt})
        return CommitText(state, {"tp": control.world_size}, {"layers": 2}, {"megaresume": "test"})

    return save_checkpoint(
        root,
        control=control,
        step=step,
        attempt=attempt,
        shard_name=f"{stem}.safetensors",
        entries=[Entry("model/w", "U8", (4096,), memoryview(content(attempt.attempt, step, control.rank)))],
        identity=ShardIdentity(attempt.root_id, attempt.attempt, step, stem),
        index={"format": 1},
        describe=text,
    )


def claim(root: Path, resumed_from: tuple[int, int] | None = None, **more: Any) -> Attempt:
    return claim_attempt(root, start_step=resumed_from[1] if resumed_from else 0, resumed_from=resumed_from, **more)


def save_alone(root: Path, attempt: Attempt, *steps: int) -> None:
    for step in steps:
        save(root, ControlPlane(MemoryStore(), 0, 1), attempt, step)


def assert_whole(candidate: Candidate, *, world_size: int = 1) -> None:
    """Every file is there, every byte is what its rank wrote."""
    check_files(candidate)
    assert len(candidate.manifest.files) == world_size
    for rank, name in enumerate(sorted(candidate.manifest.files)):
        path = candidate.path / name
        header = read_header(path, record=candidate.manifest.files[name])
        stem = name.removesuffix(".safetensors")
        check_identity(header, ShardIdentity(candidate.manifest.root_id, candidate.attempt, candidate.step, stem), path)
        got = bytearray(header.tensors["model/w"].end)
        stream_tensors(path, header, {"model/w": Target(memoryview(got))})
        assert bytes(got) == content(candidate.attempt, candidate.step, rank)


def leftovers(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith((".staging-", ".trash-"))]
