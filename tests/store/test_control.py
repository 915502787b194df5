"""The control plane: what fails on one rank fails on all with the same words, and nothing waits for ever."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from megaresume.errors import CheckpointDamagedError, MegaresumeError, SaveError, TopologyMismatchError
from megaresume.store import control as control_module
from megaresume.store.control import ControlPlane
from megaresume.store.rendezvous import open_control_plane
from tests.store.worlds import MemoryStore, run_ranks


def test_gather_gives_values_in_order_of_rank_on_rank_0_only() -> None:
    assert run_ranks(4, lambda control: control.gather("value", {"rank": control.rank})) == [
        [{"rank": rank} for rank in range(4)],
        None,
        None,
        None,
    ]


def test_announce_gives_rank_0s_value_on_all() -> None:
    assert (
        run_ranks(3, lambda control: control.announce("choice", f"naïve-模型 {control.rank}")) == ["naïve-模型 0"] * 3
    )


def test_decide_runs_on_rank_0_only_and_tells_its_result_or_its_error() -> None:
    ran: list[int] = []

    def act(control: ControlPlane) -> Any:
        def choose() -> int:
            ran.append(control.rank)
            return 7

        return control.decide("choose", choose)

    assert run_ranks(3, act) == [7, 7, 7]
    assert ran == [0]

    def refuse() -> None:
        raise TopologyMismatchError("tp: 2 in the checkpoint, 4 here")

    outcomes = run_ranks(3, lambda control: control.decide("choose", refuse))
    assert {(type(one), str(one)) for one in outcomes} == {
        (TopologyMismatchError, "choose: tp: 2 in the checkpoint, 4 here")
    }


def test_j10_one_ranks_error_is_the_same_named_error_on_all_ranks_at_once() -> None:
    def act(control: ControlPlane) -> None:
        def read() -> None:
            if control.rank == 3:
                raise CheckpointDamagedError("/ckpt/step-00000100/tp03-pp00-dp00.safetensors: the file is missing.")

        control.together("read step 100", read)

    started = time.monotonic()
    outcomes = run_ranks(4, act)
    assert time.monotonic() - started < 5
    expected = (
        "read step 100: rank 3 (tp03-pp00-dp00): /ckpt/step-00000100/tp03-pp00-dp00.safetensors: the file is missing."
    )
    assert [(type(one), str(one)) for one in outcomes] == [(CheckpointDamagedError, expected)] * 4


def test_several_ranks_errors_are_listed_and_equal_ones_are_told_once() -> None:
    def act(control: ControlPlane) -> None:
        def read() -> None:
            if control.rank == 1:
                raise SaveError("no space")
            if control.rank >= 2:
                raise CheckpointDamagedError("same words")

        control.together("read", read)

    outcomes = run_ranks(4, act)
    assert {(type(one), str(one)) for one in outcomes} == {
        (
            SaveError,
            "read: rank 1 (tp01-pp00-dp00): no space\nranks 2 (tp02-pp00-dp00), 3 (tp03-pp00-dp00): same words",
        )
    }


def test_many_different_messages_are_cut_short() -> None:
    def act(control: ControlPlane) -> None:
        def read() -> None:
            raise CheckpointDamagedError(f"words of {control.rank}")

        control.together("read", read)

    texts = {str(one) for one in run_ranks(12, act)}
    assert len(texts) == 1
    assert len(texts.pop().splitlines()) == control_module.MAX_NAMED + 1


def test_other_errors_are_told_by_name_and_keep_their_traceback_where_they_happened() -> None:
    def act(control: ControlPlane) -> None:
        def read() -> None:
            if control.rank == 1:
                raise OSError(errno.EIO, "Input/output error", "/x")

        control.together("read", read)

    outcomes = run_ranks(2, act)
    assert [type(one) for one in outcomes] == [MegaresumeError] * 2
    assert "OSError: [Errno 5] Input/output error: '/x'" in str(outcomes[0])
    assert isinstance(outcomes[1].__cause__, OSError)


def test_an_interrupted_rank_tells_the_others_before_it_goes() -> None:
    def act(control: ControlPlane) -> None:
        def read() -> None:
            if control.rank == 1:
                raise KeyboardInterrupt

        control.together("read", read)

    outcomes = run_ranks(2, act)
    assert isinstance(outcomes[0], MegaresumeError) and "KeyboardInterrupt" in str(outcomes[0])
    assert isinstance(outcomes[1], KeyboardInterrupt)


def test_a_result_that_is_no_json_is_that_ranks_failure_and_not_a_hang() -> None:
    outcomes = run_ranks(2, lambda control: control.together("count", lambda: float("nan") if control.rank else 1))
    assert [type(one) for one in outcomes] == [MegaresumeError] * 2
    assert "rank 1" in str(outcomes[0])


def test_undo_runs_on_rank_0_before_anyone_hears_of_the_failure_and_its_own_failure_is_told() -> None:
    undone = threading.Event()

    def act(control: ControlPlane) -> bool:
        def undo() -> None:
            time.sleep(0.2)
            undone.set()
            raise OSError(errno.EIO, "stuck")

        def fail() -> None:
            raise SaveError("full")

        try:
            control.together("save", fail, undo=undo)
        except SaveError as error:
            assert "Cleaning up failed too: OSError: [Errno 5] stuck" in str(error)
            return undone.is_set()
        return False

    assert run_ranks(3, act) == [True, True, True]


def test_j09_a_stalled_rank_is_named_after_the_limit_on_all_ranks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "LOG_EVERY_S", 0.1)

    def act(control: ControlPlane) -> None:
        control.together("read step 100 of /ckpt", lambda: time.sleep(1.5) if control.rank == 1 else None)

    started = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="megaresume"):
        outcomes = run_ranks(3, act, timeout_s=0.5)
    assert time.monotonic() - started < 5
    assert (
        len({(type(one), str(one)) for one in outcomes}) == 1
    )  # the late rank gets the same verdict when it comes back
    assert "no answer from rank 1 (tp01-pp00-dp00) within 0.5 s" in str(outcomes[0])
    waiting = [
        record.getMessage() for record in caplog.records if "waiting for rank 1 (tp01-pp00-dp00)" in record.getMessage()
    ]
    assert len(waiting) >= 3


def test_a_rank_0_that_comes_too_late_finds_the_others_answers_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "LOG_EVERY_S", 0.1)

    def act(control: ControlPlane) -> None:
        control.together("save", lambda: time.sleep(1.2) if control.rank == 0 else None)

    outcomes = run_ranks(2, act, timeout_s=0.2)
    assert all(isinstance(one, MegaresumeError) for one in outcomes), outcomes
    assert "rank 0" in str(outcomes[1])
    assert "gave up waiting for rank 0" in str(outcomes[0])


def test_operations_go_on_after_a_failure_and_after_a_late_rank() -> None:
    def act(control: ControlPlane) -> Any:
        with pytest.raises(MegaresumeError):
            control.together("first", lambda: time.sleep(0.8) if control.rank == 1 else None)
        control.timeout_s = 20
        return control.gather("second", control.rank)

    assert run_ranks(2, act, timeout_s=0.3) == [[0, 1], None]


def test_keys_are_deleted_once_read() -> None:
    store = MemoryStore()

    def act(control: ControlPlane) -> None:
        for number in range(50):
            control.together("step", lambda: None)
            control.announce("tell", number)
            control.decide("decide", lambda number=number: number)

    run_ranks(3, act, store=store)
    kept = [key for key in store.values if not key.startswith("label/")]
    assert len(kept) <= 4, kept  # what the last operations announced


def test_ranks_out_of_step_are_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "LOG_EVERY_S", 0.1)

    def act(control: ControlPlane) -> None:
        control.together("save" if control.rank == 0 else "resume", lambda: None)

    outcomes = run_ranks(2, act, timeout_s=5)
    assert {str(one) for one in outcomes} == {"save: rank 1 (tp01-pp00-dp00): out of step: it is at 'resume'"}

    outcomes = run_ranks(
        2, lambda control: control.announce("tell") if control.rank else control.gather("ask", 1), timeout_s=0.2
    )
    assert all(isinstance(one, MegaresumeError) for one in outcomes)


def test_closing_waits_on_rank_0_for_the_slowest_rank_and_never_raises() -> None:
    left: list[int] = []

    def act(control: ControlPlane) -> None:
        time.sleep(0.3 if control.rank == 1 else 0)
        left.append(control.rank)
        control.close()
        left.append(control.rank)

    assert run_ranks(2, act) == [None, None]
    assert left.index(1) < len(left) - left[::-1].index(0) - 1
    assert run_ranks(2, lambda control: control.close() if control.rank == 0 else None, timeout_s=0.2) == [None, None]


def test_without_a_process_group_it_is_a_world_of_one() -> None:
    control = open_control_plane(timeout_s=5, label="tp00-pp00-dp00")
    assert (control.rank, control.world_size) == (0, 1)
    assert control.together("alone", lambda: 5) == [5]
    with pytest.raises(SaveError, match=r"^alone: full$"):
        control.together("alone", _raise_full)


def _raise_full() -> None:
    raise SaveError("full")


def test_importing_it_does_not_import_torch() -> None:
    modules = "megaresume.store.commit, megaresume.store.rootcheck, megaresume.store.retention"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_torchs_tcp_store_with_one_client_each() -> None:
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    stores = [server] + [
        dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        for _ in range(3)
    ]

    def act(control: ControlPlane) -> Any:
        control.together("say", lambda: "naïve")
        with pytest.raises(SaveError, match=r"rank 2 \(tp02-pp00-dp00\): full"):
            control.together("fail", lambda: _raise_full() if control.rank == 2 else None)
        control.together("go on", lambda: None)
        return control.announce("tell", control.rank)

    assert run_ranks(4, act, stores=stores) == [0, 0, 0, 0]
    assert server.num_keys() <= 4 + 4


def test_a_rank_0_that_is_gone_is_noticed_at_once() -> None:
    import torch.distributed as dist

    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = servers[0].port
    clients = [
        dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
        for _ in range(2)
    ]
    controls = [ControlPlane(client, rank, 3, timeout_s=20) for rank, client in enumerate(clients, start=1)]
    started = time.monotonic()
    threading.Timer(0.3, servers.clear).start()  # the store ends with the process of rank 0
    for control in controls:  # rank 1 looks, rank 2 waits in the store
        with pytest.raises(MegaresumeError, match=r"save: the control plane, which rank 0 hosts, cannot be reached"):
            control.together("save", lambda: None)
    assert time.monotonic() - started < 5


def _open_and_use(label: str) -> Any:
    control = open_control_plane(timeout_s=30, label=label)
    outcome = control.together("say", lambda: label)
    told = control.announce("tell", control.rank)
    control.close()
    return control.rank, control.world_size, outcome, told


def test_opened_over_a_process_group_without_pickle(ranks: Any) -> None:
    answers = ranks.run(_open_and_use, "some-label", world_size=2)
    assert answers == [(0, 2, ["some-label"] * 2, 0), (1, 2, None, 0)]
