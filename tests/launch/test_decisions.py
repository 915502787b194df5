"""What the launcher decides, as pure functions over facts: one more try or not, requeue or not, stop now or not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megaresume import errors
from megaresume.errors import ConfigurationError
from megaresume.job import read_job
from megaresume.launch.command import build_command, build_environment, check_command, torchrun_position
from megaresume.launch.guard import Limits, pause_before_next, reason_to_give_up
from megaresume.launch.records import Commit, End, Launch, PastTry, Try, open_launch, past_tries
from megaresume.launch.requeue import Decision, Facts, decide
from megaresume.launch.slurm import JobState, Step, read_step
from megaresume.outcome import (
    CRASHED,
    DAMAGED,
    EXIT_CODES,
    FINISHED,
    REFUSED,
    STOPPED,
    outcome_of,
    read_status,
    write_status,
)
from megaresume.walltime import Pace, Walltime, find_job_end, lead_time, parse_end, save_seconds, worth_saving

# --- one more try? ----------------------------------------------------------------------------------------------------


def past(*tries: tuple[Commit | None, str | None]) -> list[PastTry]:
    """Tries of one job, by the newest commit when they began and how they ended (None: without a word)."""
    return [
        PastTry("4711.0", record(number, commit), None if outcome is None else End(outcome, f"reason {number}", 0.0))
        for number, (commit, outcome) in enumerate(tries, start=1)
    ]


def record(number: int, commit: Commit | None = None) -> Try:
    return Try(number, "4711", float(number), commit, "10.0.0.1", 29500, 2, "host", number - 1)


A, B = (1, 100), (2, 200)


@pytest.mark.parametrize(
    ("tries", "commit", "gives_up"),
    [
        ([], None, False),
        ([(None, CRASHED)] * 2, None, False),
        ([(None, CRASHED)] * 3, None, True),
        ([(None, None)] * 3, None, True),  # each took its host along
        ([(None, CRASHED)] * 3, A, False),  # the last of them has committed
        ([(None, CRASHED), (A, CRASHED), (A, CRASHED)], A, False),
        ([(None, CRASHED), (A, CRASHED), (A, None), (A, CRASHED)], A, True),
        ([(A, CRASHED), (A, CRASHED), (A, STOPPED), (A, STOPPED)], A, False),  # a stop uses up nothing
        ([(A, CRASHED), (A, STOPPED), (A, CRASHED), (A, STOPPED), (A, CRASHED)], A, True),  # nor does it wipe the slate
        ([(A, STOPPED)] * 50, A, False),
    ],
)
def test_a_crash_loop_is_one_without_progress(
    tries: list[tuple[Commit | None, str | None]], commit: Commit | None, gives_up: bool
) -> None:
    reason = reason_to_give_up(past(*tries), commit, Limits(crashes=3))
    assert (reason is not None) == gives_up
    if reason is not None:
        assert reason.startswith("crash loop: 3 tries in a row")


def test_the_hard_cap_counts_crashes_that_made_progress_too() -> None:
    tries = past(*(((1, step), CRASHED) for step in range(20)), ((1, 20), STOPPED))
    assert reason_to_give_up(tries, (1, 21), Limits(crashes_in_all=21)) is None
    reason = reason_to_give_up(tries, (1, 21), Limits(crashes_in_all=20))
    assert reason is not None and reason.startswith("20 tries of this job have crashed") and "reason 20" in reason


def test_each_crash_without_progress_waits_longer() -> None:
    pauses = [pause_before_next(past(*[(A, CRASHED)] * count), A) for count in range(1, 9)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert pause_before_next(past(*[(A, CRASHED)] * 5), B) == 1


# --- requeue? ---------------------------------------------------------------------------------------------------------


def facts(
    outcome: str | None = STOPPED, *, tries: int = 1, state: str = "RUNNING", restarts: int = 2, mine: int = 2
) -> Facts:
    end = None if outcome is None else End(outcome, "the words", 0.0)
    return Facts(end, tries, JobState(state, restarts), restarts=mine, limit=3)


@pytest.mark.parametrize(
    ("given", "requeue", "why"),
    [
        (facts(), True, "saved and stopped: the words"),
        (facts(None), True, "without a word"),
        (facts(None, tries=0), False, "no try was begun"),  # it would be requeued for ever
        (facts(FINISHED), False, "finished"),
        (facts(REFUSED), False, "refused: the words"),
        (facts(DAMAGED), False, "damaged: the words"),
        (facts(CRASHED), False, "crashed: the words"),
        (facts(state="COMPLETING"), False, "COMPLETING: cancelled"),
        (facts(state="CANCELLED"), False, "CANCELLED: cancelled"),
        (facts(state="TIMEOUT"), False, "out of time"),
        (facts(state="PENDING", restarts=3), False, "and start 3 has begun"),  # queued again already
        (facts(restarts=3), False, "this is start 2 of the job, and start 3"),  # an orphan of the start before
        (facts(restarts=3, mine=3), False, "which is the limit"),
    ],
)
def test_a_job_is_requeued_only_when_right_and_the_reason_is_said(given: Facts, requeue: bool, why: str) -> None:
    decision = decide(given)
    assert decision == Decision(requeue, decision.why)
    assert why in decision.why


# --- stop now? --------------------------------------------------------------------------------------------------------


def test_the_run_stops_in_time_by_what_it_has_learnt() -> None:
    pace = Pace()
    assert pace.longest_save is None
    for at in (0.0, 100.0, 102.0, 105.0):  # the first step compiles for 100 s
        pace.step_ended(at)
    assert pace.longest_step == 3.0
    pace.saved(20.0)
    pace.pause()
    pace.step_ended(200.0)  # the save before it is no part of the step
    assert pace.longest_step == 3.0
    lead = lead_time(longest_step=3.0, longest_save=20.0)
    assert lead == 2 * 3 + 1.5 * 20 + 15 + 5
    assert Walltime(None, pace).near() is None
    assert Walltime(time.time() + lead + 5, pace).near() is None
    reason = Walltime(time.time() + lead - 1, pace).near()
    assert reason is not None and "the job ends in 55 s: 56 s are needed (step 3.0 s, save 20.0 s)" in reason


def test_a_save_is_not_begun_that_cannot_be_finished_where_a_recent_one_is_there() -> None:
    assert not worth_saving(seconds_left=10.0, longest_save=20.0, recent=True)
    assert worth_saving(seconds_left=10.0, longest_save=20.0, recent=False)  # nothing to lose
    assert worth_saving(seconds_left=30.0, longest_save=20.0, recent=True)
    assert worth_saving(seconds_left=None, longest_save=20.0, recent=True)
    assert worth_saving(seconds_left=10.0, longest_save=None, recent=True)


def test_the_jobs_end_is_found_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\ntest "$*" = "-h -j 7_3 -o %e" && echo 2030-01-02T03:04:05\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    job = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert find_job_end(5.0, {**job, "SLURM_JOB_END_TIME": "1893456000"}) == 1893456000.0
    assert find_job_end(5.0, job) == 1893553445.0
    assert find_job_end(5.0, {"SLURM_JOB_ID": "9"}) == 5.0  # squeue fails for this one
    assert find_job_end(5.0, {}) == 5.0
    assert find_job_end(None, {}) is None


@pytest.mark.parametrize(
    "text", ["", "N/A", "Unknown", "NONE", "2030-01-02", "2030-01-02T03:04:05\n2030-01-02T03:04:05", "INVALID"]
)
def test_what_squeue_cannot_say_is_no_end(text: str) -> None:
    assert parse_end(text) is None


def test_how_long_saves_take_is_learnt_from_earlier_starts() -> None:
    events = [{"event": "save", "seconds": float(n)} for n in range(9)] + [
        {"event": "save"},
        {"event": "resume", "seconds": 99},
    ]
    assert save_seconds(events) == [4.0, 5.0, 6.0, 7.0, 8.0]


# --- outcomes ---------------------------------------------------------------------------------------------------------


def test_exit_codes_are_distinct() -> None:
    assert EXIT_CODES == {FINISHED: 0, STOPPED: 75, CRASHED: 70, REFUSED: 78, DAMAGED: 65}


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (errors.TopologyMismatchError(""), REFUSED),
        (errors.DataMismatchError(""), REFUSED),
        (errors.StateMismatchError(""), REFUSED),
        (errors.ConfigurationError(""), REFUSED),
        (errors.UnsupportedError(""), REFUSED),
        (errors.SupersededError(""), REFUSED),
        (errors.CheckpointNotFoundError(""), REFUSED),
        (errors.PoisonedError(""), DAMAGED),
        (errors.CheckpointDamagedError(""), DAMAGED),
        (errors.SaveError(""), CRASHED),
        (errors.ReplayDivergedError(""), CRASHED),
        (errors.MegaresumeError("rank 3 did not answer"), CRASHED),
        (RuntimeError(""), CRASHED),
        (KeyboardInterrupt(), CRASHED),
    ],
)
def test_a_refusal_is_told_from_a_crash(error: BaseException, word: str) -> None:
    assert outcome_of(error) == word


def test_nothing_readable_where_something_was_committed_is_damage() -> None:
    assert outcome_of(errors.CheckpointNotFoundError(""), had_committed=True) == DAMAGED
    assert outcome_of(errors.TopologyMismatchError(""), had_committed=True) == REFUSED


def test_the_first_failure_is_the_cause_and_a_good_end_wins(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_status(path) is None
    write_status(path, CRASHED, "rank 3: out of memory", step=7, rank=3)
    write_status(path, CRASHED, "rank 0: connection reset", step=7, rank=0)
    status = read_status(path)
    assert status is not None and (status.reason, status.rank, status.step) == ("rank 3: out of memory", 3, 7)
    write_status(path, FINISHED, "", step=9)
    status = read_status(path)
    assert status is not None and status.outcome == FINISHED
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"outcome": "fine", "reason": "", "rank": 0, "time": 0}', '{"outcome": "finished"}']
)
def test_a_status_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path / "status.json") is None


# --- records ----------------------------------------------------------------------------------------------------------


def test_records_come_back_and_hostile_ones_are_left_out(tmp_path: Path) -> None:
    for run_id, started in (("7.1", 20.0), ("7.0", 10.0)):
        launch = open_launch(tmp_path, run_id)
        launch.directory.mkdir(parents=True)
        launch.write_try(Try(1, "7", started, (1, 5), "a", 1, 2, "h", 0))
    launch.write_try_end(1, End(STOPPED, "why", 30.0))
    (launch.directory / "try-0002.json").write_text("{")
    (launch.directory / "try-0003.json").write_text('{"number": "x"}')
    (launch.directory / "notes.txt").write_text("mine")
    (tmp_path / "launches" / ".hidden").mkdir()
    found = past_tries(tmp_path)
    assert [(each.run_id, each.record.commit, each.end) for each in found] == [
        ("7.0", (1, 5), End(STOPPED, "why", 30.0)),
        ("7.1", (1, 5), None),
    ]


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "-x", "a b", "x" * 101, "a\n"])
def test_a_run_id_is_a_plain_name(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(ConfigurationError, match="--run-id"):
        open_launch(tmp_path, run_id)


# --- the command ------------------------------------------------------------------------------------------------------


def test_torchrun_is_told_where_to_meet_and_the_rest_is_left_alone() -> None:
    command = ["apptainer", "exec", "x.sif", "/opt/bin/torchrun", "--nproc-per-node", "8", "train.py", "--nnodes", "3"]
    check_command(command, 2)
    built = build_command(command, record(3), run_id="4711.0", node_rank=1)
    assert built == [
        *command[:4],
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=10.0.0.1",
        "--master-port=29500",
        "--rdzv-id=4711.0.3",
        *command[4:],
    ]
    assert torchrun_position(["python", "-m", "torch.distributed.run", "x.py"]) == 3
    assert torchrun_position(["python", "torchrun_me.py"]) is None


@pytest.mark.parametrize(
    "option", ["--nnodes=2", "--standalone", "--rdzv-id=3", "--rdzv_endpoint", "--master_addr", "--node_rank=1"]
)
def test_the_rendezvous_is_the_supervisors(option: str) -> None:
    with pytest.raises(ConfigurationError, match="after torchrun: leave it out"):
        check_command(["torchrun", option, "train.py"], 1)


def test_only_torchrun_can_be_run_on_several_nodes() -> None:
    check_command(["python", "train.py"], 1)
    for command in (["python", "train.py"], []):
        with pytest.raises(ConfigurationError, match="expected a torchrun command"):
            check_command(command, 2)


def test_ranks_find_all_they_need_in_the_environment(tmp_path: Path) -> None:
    given = build_environment(
        {"HOME": "/me"}, Launch(tmp_path, "9.1"), record(2), stop_file=Path("/tmp/s"), heartbeat_file=Path("/tmp/h")
    )
    assert given["HOME"] == "/me"
    job = read_job({**given, "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"})
    assert (job.job_id, job.restart_count) == ("9", 2)
    assert not job.requeued, "an earlier try of this job is on record here, so this is the right root"
    assert read_job(given).job_id == "9.1"


def test_the_place_in_a_slurm_step() -> None:
    assert read_step({"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "3"}) == Step(4, 3, in_slurm=True)
    assert read_step({"SLURM_NNODES": "4", "SLURM_NODEID": "0"}) == Step()  # a batch script, without srun
