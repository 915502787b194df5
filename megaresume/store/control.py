"""The control plane: small JSON messages between the ranks of one run, through a key-value store of its own.

Carries errors, commit records and decisions; never tensors, never pickles, never a collective of the training's own
groups. What one rank cannot do fails on every rank, with that rank's words; a rank that does not answer is named when
the deadline passes, and nothing waits for ever. Knows no files.

Every operation is collective: all ranks call the same operations in the same order. Keys are a running number, so
that callers need not invent unique names, and are deleted once read. Rank 0 does O(world) work, every other rank O(1).
One `ControlPlane` serves one thread: a client that waits blocks every other thread that uses it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from megaresume import errors
from megaresume.errors import MegaresumeError

logger = logging.getLogger("megaresume.store.control")

DEFAULT_TIMEOUT_S = 600.0
LOG_EVERY_S = 5.0
MAX_NAMED = 8  # ranks, and different messages, that one error spells out
_HEARING_S = 10.0  # for ranks that live: those that are stalled or dead are not waited for again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_STRIDE = 64  # ranks asked after at once

JSON = Any


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used. `wait` raises, whatever the class, when its time is over."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> Any: ...
    def delete_key(self, key: str, /) -> Any: ...


class ControlPlane:
    """Messages among `world_size` ranks over `store`; `label` (a rank's coordinate) stands beside its number in errors.

    `timeout_s` is how long rank 0 waits for the slowest rank, in seconds, counted from its own arrival.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        label: str = "",
        connect: Callable[[str], Store] | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store = store
        self._label = label
        self._connect = connect
        self._others = 0
        self._operation = 0
        self._stale: list[str] = []  # keys that nobody needs any more once every rank has sent something later
        if label:
            with self._reaching_store("open the control plane"):
                store.set(_label_key(rank), label)

    def another(self) -> ControlPlane:
        """A plane of the same ranks over a connection of its own, for another thread. All ranks make as many, in the
        same order; nobody waits for anybody."""
        if self._connect is None:
            raise ValueError("this control plane was made without `connect`, so it knows no way to its store")
        self._others += 1
        with self._reaching_store("open another control plane"):
            store = self._connect(f"plane{self._others}")
        return ControlPlane(store, self.rank, self.world_size, timeout_s=self.timeout_s, label=self._label)

    def until_heard(self, what: str) -> None:
        """Let rank 0, whose process holds the store, wait a little until all ranks have come so far. Never raises."""
        self._operation += 1
        self._let_all_hear(what)

    def gather(self, key: str, value: JSON) -> list[JSON] | None:
        """All ranks' values in order of rank on rank 0; None on the others, which do not wait.

        Raises `MegaresumeError`, on rank 0 only, where a rank does not answer in time; `together` tells the others too.
        """
        self._operation += 1
        return self._gather(key, value)

    def announce(self, key: str, value: JSON = None) -> JSON:
        """Rank 0's `value`, on every rank; the others' argument is ignored."""
        self._operation += 1
        return self._announce(key, value)

    def decide(self, what: str, function: Callable[[], JSON]) -> JSON:
        """Run `function` on rank 0 only; return its JSON result, or raise its error, on every rank."""
        self._operation += 1
        message, raised = _outcome(function) if self.rank == 0 else ({}, None)
        if "error" in message:
            message["text"] = f"{what}: {message['text']}"
        verdict = self._announce(what, message)
        if raised is not None or "error" in verdict:
            self._let_all_hear(what)
            _raise_verdict(verdict, raised)
        return verdict["value"]

    def together(
        self, what: str, function: Callable[[], JSON], *, undo: Callable[[], None] | None = None
    ) -> list[JSON] | None:
        """Run `function` on every rank; return all JSON results on rank 0, None elsewhere, or raise one error on all.

        The error has the class of the lowest failing rank's (one of `megaresume.errors`; any other class is told as
        `MegaresumeError`) and the messages of all. A rank that does not answer within `timeout_s` is a failure too.
        `undo` runs on rank 0 after a failure and before anyone hears of it, so that no rank goes on over what is being
        undone.
        """
        self._operation += 1
        message, raised = _outcome(function)
        results: list[JSON] | None = None
        verdict: JSON = None
        try:
            messages = self._gather(what, {**message, "what": what})
            if messages is not None:
                results = [answer.get("value") for answer in messages]
                verdict = self._joined_error(what, messages)
        except MegaresumeError as error:
            if self.rank != 0:
                raise
            verdict = _error_message(error, str(error))
        if verdict and undo is not None:
            verdict["text"] += _undone(undo)
        try:
            verdict = self._announce(what, verdict)
        except MegaresumeError:
            self._withdraw(what)
            raise
        if raised is not None or verdict is not None:
            self._let_all_hear(what)
            _raise_verdict(verdict, raised)
        return results

    def close(self) -> None:
        """Leave. Collective: rank 0, whose process holds the store, waits until all have read what they wait for.

        Never raises: a rank that does not come is said in the log, for nothing can be undone any more.
        """
        self._operation += 1
        try:
            self._gather("close the control plane", None)
        except MegaresumeError as error:
            logger.warning("%s", error)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _gather(self, what: str, value: JSON) -> list[JSON] | None:
        if self.rank != 0:
            with self._reaching_store(what):
                self._store.set(self._answer_key(self.rank), _encode(value))
            return None
        keys = {rank: self._answer_key(rank) for rank in range(1, self.world_size)}
        self._stale += keys.values()
        self._await(keys, what, self.timeout_s)
        with self._reaching_store(what):
            sent = self._store.multi_get(list(keys.values())) if keys else []
            values = [value, *map(json.loads, sent)]
            for key in self._stale:
                self._store.delete_key(key)
        self._stale.clear()
        return values

    def _announce(self, what: str, value: JSON) -> JSON:
        key = f"{self._operation}"
        if self.rank == 0:
            with self._reaching_store(what):
                self._store.set(key, _encode(value))
            self._stale.append(key)
            return value
        # Rank 0 may come late by one timeout and then wait another for the slowest rank; its verdict should still come
        # first.
        self._await({0: key}, what, 2 * self.timeout_s + LOG_EVERY_S)
        with self._reaching_store(what):
            return json.loads(self._store.get(key))

    def _let_all_hear(self, what: str) -> None:
        """Rank 0 may end now, and the store with it: it waits a little until all ranks have read what it said last."""
        try:
            if self.rank != 0:
                with self._reaching_store(what):
                    self._store.set(f"{self._answer_key(self.rank)}/heard", "")
            else:
                keys = {rank: f"{self._answer_key(rank)}/heard" for rank in range(1, self.world_size)}
                self._await(keys, f"{what}: tell all ranks", min(self.timeout_s, _HEARING_S))
                with self._reaching_store(what):
                    for key in keys.values():
                        self._store.delete_key(key)
        except MegaresumeError as error:
            logger.warning("%s", error)

    def _withdraw(self, what: str) -> None:
        """Take back this rank's answer: a rank 0 that was only late must not conclude that all went well."""
        message = _error_message(MegaresumeError(), "gave up waiting for rank 0")
        try:
            self._store.set(self._answer_key(self.rank), _encode({**message, "what": what}))
        except Exception as error:
            logger.info("%s: this rank's answer cannot be withdrawn, for rank 0 is gone: %s", what, error)

    def _answer_key(self, rank: int) -> str:
        return f"{self._operation}/{rank}"  # without `what`: ranks whose words differ must hear of it, not wait in vain

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _await(self, keys: Mapping[int, str], what: str, timeout_s: float) -> None:
        """Return when every rank's key of `keys` is there; raise when `timeout_s` is over."""
        pending = list(keys.items())
        if self.rank <= 1:
            self._watch(pending, what, timeout_s)
            return
        started = time.monotonic()
        try:
            self._store.wait([key for _, key in pending], timedelta(seconds=timeout_s))
        except Exception as error:
            if time.monotonic() - started < 0.99 * timeout_s:
                raise _unreachable(what, error) from error
            raise self._unanswered(pending, what, timeout_s) from error

    def _watch(self, pending: list[tuple[int, str]], what: str, timeout_s: float) -> None:
        """Wait by looking, for the two ranks that log who is waited for: a `wait` that ends early floods stderr."""
        started = time.monotonic()
        next_log, pause = LOG_EVERY_S, _FIRST_PAUSE_S
        while pending:
            if self._are_there(pending[:1], what):
                # In strides where many have come, or the store is asked once for each of thousands of ranks.
                stride = _STRIDE if self._are_there(pending[:_STRIDE], what) else 1
                pending, pause = pending[stride:], _FIRST_PAUSE_S
                continue
            waited = time.monotonic() - started
            if waited >= timeout_s:
                raise self._unanswered(pending, what, timeout_s)
            if waited >= next_log:
                absent = self._names(self._absent(pending, what))
                logger.warning("%s: waiting for %s, %.0f of at most %.0f s so far", what, absent, waited, timeout_s)
                next_log = waited + LOG_EVERY_S
            time.sleep(min(pause, timeout_s - waited))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _absent(self, pending: Sequence[tuple[int, str]], what: str) -> list[int]:
        return [rank for rank, key in pending if not self._are_there([(rank, key)], what)]

    def _are_there(self, pending: Sequence[tuple[int, str]], what: str) -> bool:
        with self._reaching_store(what):
            return bool(self._store.check([key for _, key in pending]))

    @contextmanager
    def _reaching_store(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch.distributed's DistError and what it raises for a store that is gone
            raise _unreachable(what, error) from error

    # --- words -------------------------------------------------------------------------------------------------------

    def _unanswered(self, pending: Sequence[tuple[int, str]], what: str, timeout_s: float) -> MegaresumeError:
        absent = self._absent(pending, what) or [rank for rank, _ in pending]  # one may have come this very moment
        return MegaresumeError(
            f"{what}: no answer from {self._names(absent)} within {timeout_s:g} s. "
            "Stalled or dead: see its log and its host; where it is only slow, give the control plane a longer timeout."
        )

    def _joined_error(self, what: str, messages: Sequence[JSON]) -> JSON:
        """One error out of all ranks', or None where none failed: each text once, with the ranks that sent it."""
        for message in messages:
            if message["what"] != what:
                message.update(_error_message(MegaresumeError(), f"out of step: it is at '{message['what']}'"))
        failed = [rank for rank, message in enumerate(messages) if "error" in message]
        if not failed:
            return None
        ranks_of: dict[str, list[int]] = {}
        for rank in failed:
            ranks_of.setdefault(messages[rank]["text"], []).append(rank)
        lines = [
            f"{self._names(ranks)}: {text}" if self.world_size > 1 else text
            for text, ranks in list(ranks_of.items())[:MAX_NAMED]
        ]
        if len(ranks_of) > MAX_NAMED:
            lines.append(f"... {len(failed)} ranks failed in all, with {len(ranks_of)} different messages")
        return {"error": messages[failed[0]]["error"], "text": f"{what}: " + "\n".join(lines)}

    def _names(self, ranks: Sequence[int]) -> str:
        if len(ranks) == self.world_size > 1:
            return f"all {len(ranks)} ranks"
        shown = ", ".join(self._name(rank) for rank in ranks[:MAX_NAMED])
        more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"

    def _name(self, rank: int) -> str:
        key = _label_key(rank)
        if not self._are_there([(rank, key)], "name a rank"):
            return str(rank)
        return f"{rank} ({self._store.get(key).decode('utf-8')})"


def _outcome(function: Callable[[], JSON]) -> tuple[dict[str, JSON], BaseException | None]:
    """The message that says what `function` came to on this rank, and what it raised."""
    try:
        message = {"value": function()}
        _encode(message)
    except BaseException as error:  # KeyboardInterrupt too: the others must hear of it before this rank goes its way
        if not isinstance(error, MegaresumeError):
            logger.error("%s, told to all ranks", type(error).__name__, exc_info=error)
        return _error_message(error, _words(error)), error
    return message, None


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, MegaresumeError) else f"{type(error).__name__}: {error}"


def _error_message(error: BaseException, text: str) -> dict[str, str]:
    name = type(error).__name__
    return {"error": name if getattr(errors, name, None) is type(error) else MegaresumeError.__name__, "text": text}


def _undone(undo: Callable[[], None]) -> str:
    try:
        undo()
    except Exception as error:
        logger.error("cleaning up after a failure failed too", exc_info=error)
        return f"\nCleaning up failed too: {_words(error)}"
    return ""


def _raise_verdict(verdict: dict[str, str], raised: BaseException | None) -> NoReturn:
    if raised is not None and not isinstance(raised, Exception):
        raise raised
    kind: type[MegaresumeError] = getattr(errors, verdict["error"], MegaresumeError)
    raise kind(verdict["text"]) from raised


def _unreachable(what: str, error: Exception) -> MegaresumeError:
    return MegaresumeError(
        f"{what}: the control plane, which rank 0 hosts, cannot be reached: {first_line(error)}. "
        "Rank 0 has probably ended; its log says why."
    )


def first_line(error: Exception) -> str:
    """What an error of torch says, without the stack that follows it."""
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def _encode(value: JSON) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _label_key(rank: int) -> str:
    return f"label/{rank}"
