"""What a person asks for with `resume_from`, and what they are told: requests, foreign entries, and the report."""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaresume import errors as named
from megaresume import resume_from_checkpoint
from megaresume.errors import CheckpointNotFoundError, ConfigurationError, MegaresumeError
from megaresume.job import read_job
from megaresume.resume_request import choose, parse_request
from megaresume.store import layout
from tests.harness import (
    Outcome,
    assert_continues,
    differences,
    digest,
    go_on,
    open_manager,
    run,
    start,
    train_steps,
    tree,
)
from tests.ranks import Ranks
from tests.refusals import (
    CONFIG,
    SECOND,
    STEPS,
    Refusal,
    Waiting,
    assert_refused,
    refused,
    whole_run,
)
from tests.small_models import SmallModel
from tests.store.worlds import claim, save_alone


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    return whole_run(ranks, tmp_path_factory.mktemp("whole") / "root")


def test_u05_the_table_of_resume_from(tmp_path: Path) -> None:
    table: list[tuple[Any, tuple[str, Any]]] = [
        (None, ("auto", None)),
        ("auto", ("auto", None)),
        ("latest", ("latest", None)),
        ("last_healthy", ("last_healthy", None)),
        (0, ("step", 0)),
        (1200, ("step", 1200)),
        ("1200", ("step", 1200)),
        ("00001200", ("step", 1200)),
        (str(tmp_path), ("directory", tmp_path)),
        (tmp_path, ("directory", tmp_path)),
        ("runs/latest", ("directory", Path("runs/latest"))),
        (Path("latest"), ("directory", Path("latest"))),
        (Path("1200"), ("directory", Path("1200"))),
    ]
    for value, expected in table:
        request = parse_request(value)
        assert (request.kind, request.directory if request.kind == "directory" else request.step) == expected
    refused_values = (True, False, "true", "True", "False", "none", "None", "null", "", "yes", "off", -1, 1.0, [], b"4")
    for value in (*refused_values, "s3://bucket/step-1", "file:///x", Path("hf://org/run")):
        with pytest.raises(ConfigurationError) as caught:
            parse_request(value)
        assert "resume_from" in str(caught.value)


def ask_amiss(config: SmallModel, root: Path) -> dict[str, Refusal]:
    loop = start(config)
    said = Waiting()
    logger = logging.getLogger("megaresume")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    empty = root.parent / "empty"
    asked = {
        "step": (root, 5),
        "directory": (empty, root / "step-0000006"),
        "empty directory": (empty, root.parent / "nothing here"),
        "a file": (empty, root / layout.STEP_LOG),
        "a root": (empty, root),
        "latest of nothing": (empty, "latest"),
        "unpublished": (root, root / layout.staging_directory(8, 1)),
    }
    outcomes = {name: refused(loop, where, {"resume_from": what}, {}) for name, (where, what) in asked.items()}
    outcomes["auto"] = refused(loop, root.parent / "new", {}, {})
    logger.removeHandler(said)
    logger.setLevel(logging.NOTSET)
    outcomes["auto"] = replace(outcomes["auto"], text="\n".join(said.lines))
    return outcomes


def test_u01_a05_nothing_is_taken_for_a_fresh_start(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    shutil.copytree(root / "step-00000006", root / layout.staging_directory(8, 1))
    (tmp_path / "nothing here").mkdir()
    per_rank = ranks.run(ask_amiss, CONFIG, root, world_size=2)
    for name, needles in {
        "step": ("no checkpoint of step 5", "6, 4, 2"),
        "directory": ("step-0000006: expected a checkpoint directory, found nothing", "step-00000006"),
        "empty directory": ("nothing here: not a checkpoint", "found nothing"),
        "a file": ("found a file",),
        "a root": ("a root of checkpoints, not a checkpoint", "step-00000006"),
        "latest of nothing": ("no checkpoint can be resumed from, though one was asked for",),
        "unpublished": ("not published", "committed checkpoint"),
    }.items():
        assert_refused([each[name] for each in per_rank], named.CheckpointNotFoundError, *needles)
    assert per_rank[0]["auto"].error == ""
    assert "fresh start" in per_rank[0]["auto"].text


FOREIGN = (
    "step_10-hf",
    "checkpoint-final",
    "latest",
    "lost+found",
    "step-9",
    ".nfs01",
    "step-00000099.bak",
    "notes.txt",
)


def test_u02_foreign_entries_are_ignored_and_kept(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    shutil.rmtree(root / "step-00000006")
    for name in FOREIGN:
        if "." in name:
            (root / name).write_text("somebody's")
        else:
            shutil.copytree(root / "step-00000004", root / name)
    before = {name: text for name, text in tree(root).items() if name.startswith(FOREIGN)}
    resumed = run(ranks, CONFIG, root, STEPS, save_every=2, keep_last=1)
    assert resumed[0].report.step == 4
    assert_continues(resumed, whole[1])
    assert {name: text for name, text in tree(root).items() if name.startswith(FOREIGN)} == before
    assert sorted(path.name for path in root.glob("step-????????")) == ["step-00000006"]


def test_u08_the_report_is_what_trainer_state_says(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    (root / "step-00000006" / SECOND).unlink()
    for outcome in run(ranks, CONFIG, root, 0):
        report = outcome.report
        state = json.loads((root / "step-00000004" / layout.TRAINER_STATE).read_text("utf-8"))
        assert report.path == root / "step-00000004"
        assert report.step == state["global_step"] == 4
        assert report.consumed_train_samples == state["consumed_train_samples"] == 4 * CONFIG.global_batch_size
        assert report.epoch == state["epoch"]
        assert report.learning_rate == whole_lr(whole[0], 4)
        assert (report.attempt, report.changes, report.left_out) == (2, (), ())
        ((name, reason),) = report.passed
        assert name == "step-00000006" and SECOND in reason
        assert report.seconds > 0
    events = [json.loads(line) for line in (root / layout.EVENTS).read_text().splitlines()]
    event = [each for each in events if each["event"] == "resume"][-1]
    assert (event["step"], event["path"], event["attempt"]) == (4, "step-00000004", 2)
    assert event["passed"] == [[name, reason]]


def whole_lr(root: Path, step: int) -> float:
    """The learning rate that the scheduler set after `step`, as the step log has it."""
    lines = [json.loads(line) for line in (root / layout.STEP_LOG).read_text().splitlines()]
    return float.fromhex(next(line["lr_hex"] for line in lines if line["step"] == step))


def call_once(config: SmallModel, path: Path) -> tuple[Refusal, int]:
    """`resume_from_checkpoint` on a damaged checkpoint, then on a whole one."""
    loop = start(config)
    objects = {
        "model": loop.run.chunks,
        "optimizer": loop.run.optimizer,
        "scheduler": loop.run.scheduler,
        "data": {"train": loop.sampler},
    }
    before, started = digest(loop), time.monotonic()
    try:
        resume_from_checkpoint(path / "step-00000006", **objects)
        refusal = Refusal("", "", [], 0.0)
    except MegaresumeError as error:
        changed = differences(before, digest(loop))
        refusal = Refusal(type(error).__name__, str(error), changed, time.monotonic() - started)
    return refusal, resume_from_checkpoint(path / "step-00000004", **objects).global_step


def test_the_one_call_refuses_alike(ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    (root / "step-00000006" / SECOND).unlink()
    before = tree(root)
    per_rank = ranks.run(call_once, CONFIG, root, world_size=2)
    assert_refused([each[0] for each in per_rank], named.CheckpointDamagedError, SECOND, "missing")
    assert [each[1] for each in per_rank] == [4, 4]
    assert tree(root) == before


def go_astray(config: SmallModel, root: Path) -> dict[str, Any]:
    """Train to step 2, then three steps whose loss is not finite, and resume in both ways; each step is saved."""
    loop = start(config)
    with open_manager(loop, root, save_every=1, keep_last=2) as manager:
        manager.resume()
        for _ in train_steps(loop, manager, 2):
            pass
        for _ in range(3):
            next(iter(loop.sampler))
            loop.run.scheduler.step(config.global_batch_size)
            manager.end_step(loss=float("nan"), grad_norm=1.0)
    there = sorted(path.name for path in root.glob("step-*"))
    said = Waiting()
    logging.getLogger("megaresume").addHandler(said)
    newest = go_on(start(config), root, 0).report
    logging.getLogger("megaresume").removeHandler(said)
    healthy = go_on(start(config), root, 0, resume_from="last_healthy").report
    return {"there": there, "newest": newest, "healthy": healthy, "said": said.lines}


def test_a18_a_run_gone_astray_goes_back_to_where_its_loss_was_finite(ranks: Ranks, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for told in ranks.run(go_astray, SmallModel(), root, world_size=1):
        assert told["there"] == ["step-00000002", "step-00000004", "step-00000005"]
        assert told["newest"].step == 5, "the run as it was, where nothing else is asked for"
        assert any("not finite at step 5" in line and "last_healthy" in line for line in told["said"])
        assert told["healthy"].step == 2
        assert [name for name, reason in told["healthy"].passed if "not finite" in reason] == [
            "step-00000005",
            "step-00000004",
        ]


def test_a18_where_none_is_healthy_each_says_why_and_the_way_out_is_named(tmp_path: Path) -> None:
    attempt = claim(tmp_path)
    save_alone(tmp_path, attempt, 10, 20)
    with pytest.raises(CheckpointNotFoundError) as caught:
        choose(tmp_path, parse_request("last_healthy"), job=read_job(), start_fresh=False)
    text = str(caught.value)
    assert text.count("trainer_state.json: ") == 2 and "not finite" not in text, "its own reason, not that of others"
    assert "name its step" in text
