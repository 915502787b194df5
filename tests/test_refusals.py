"""What bad input gets: one error on all ranks that names file, expected, found and the way out, and nothing changed.

Real megatron-core ranks through ResumeManager. Live objects are compared by the harness's digest of all state, roots
file by file. How single files are read is tested in `tests/store`; here it is what a run makes of them that counts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import xxhash

from megaresume import errors as named
from megaresume import read_progress, restoring, resume_from_checkpoint
from megaresume.errors import ConfigurationError, MegaresumeError, PoisonedError, SaveError
from megaresume.resume_request import parse_request
from megaresume.store import control, fs, layout
from megaresume.store.manifest import FileRecord, parse_manifest, to_json
from megaresume.store.shard import CHUNK_BYTES, Entry, read_header, write_shard
from tests import small_models
from tests.harness import (
    Loop,
    Outcome,
    assert_continues,
    differences,
    digest,
    open_manager,
    run,
    start,
    train_steps,
    tree,
)
from tests.ranks import Ranks
from tests.small_models import SmallModel

CONFIG = SmallModel(tp=2, num_layers=2, global_batch_size=2)
STEPS = 6
FIRST, SECOND = "tp00-pp00-dp00.safetensors", "tp01-pp00-dp00.safetensors"
# Long for a rank that has nothing to wait for, short against the minutes that a hang takes to be noticed.
SOON_S = 30.0


@dataclass(frozen=True)
class Refusal:
    """What a rank got instead of a resume: the error's name ("" where there was none), its text, and what it cost."""

    error: str
    text: str
    changed: list[str]
    """The names under which the live state's digest differs from before."""
    seconds: float


def refused(loop: Loop, root: Path, manager_args: dict[str, Any], resume_args: dict[str, Any]) -> Refusal:
    """Try to resume on this rank."""
    before, started = digest(loop), time.monotonic()
    error, text = "", ""
    try:
        with open_manager(loop, root, **manager_args) as manager:
            manager.resume(**resume_args)
    except MegaresumeError as caught:
        error, text = type(caught).__name__, str(caught)
    return Refusal(error, text, differences(before, digest(loop)), time.monotonic() - started)


def all_refused(config: SmallModel, tries: Sequence[tuple[Path, dict[str, Any], dict[str, Any]]]) -> list[Refusal]:
    """Every try on the same live objects, which a refusal leaves as they were: many cases in one start of the ranks."""
    loop = start(config)
    return [refused(loop, root, manager_args, resume_args) for root, manager_args, resume_args in tries]


def assert_refused(refusals: Sequence[Refusal], error: type[Exception], *needles: str) -> str:
    """All ranks got the same words of the same error, soon, with nothing changed; returns the words."""
    assert [each.error for each in refusals] == [error.__name__] * len(refusals), refusals[0].text
    text = refusals[0].text
    assert [each.text for each in refusals] == [text] * len(refusals)
    for each in refusals:
        assert each.changed == [], f"a refusal changed live state: {text}"
        assert each.seconds < SOON_S
    for needle in needles:
        assert re.search(needle, text), f"{needle!r} is not in: {text}"
    assert "{" not in re.sub(r"\{'.*?'\}", "", text), f"an unformatted placeholder is in: {text}"
    return text


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """The uninterrupted run of six steps with checkpoints 2, 4 and 6; nobody writes there."""
    root = tmp_path_factory.mktemp("whole") / "root"
    return root, run(ranks, CONFIG, root, STEPS, save_every=2)


# --- doing harm -------------------------------------------------------------------------------------------------------


def flip(path: Path, position: int) -> None:
    """One bit of the byte at `position`, from the end where it is negative."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def zero_4_kib(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-8192:-4096] = bytes(4096)
    path.write_bytes(data)


def swap(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def reseal(checkpoint: Path, **changes: Any) -> None:
    """Give the manifest what is in the directory now, as if it had been committed so."""
    manifest = replace(parse_manifest(checkpoint / layout.MANIFEST), **changes)
    data = (checkpoint / layout.TRAINER_STATE).read_bytes()
    state = FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))
    total = state.size + sum(record.size for record in manifest.files.values())
    value = to_json(replace(manifest, trainer_state=state, total_bytes=total))
    (checkpoint / layout.MANIFEST).write_bytes(fs.dump_json(value))


def forget_stream(checkpoint: Path, stream: str) -> None:
    """The second rank's shard as a writer would have left it that lost one random stream."""
    path = checkpoint / SECOND
    header, data = read_header(path), path.read_bytes()
    index = dict(header.index)
    index["rng"] = [name for name in index["rng"] if name != stream]
    index["tensors"] = {name: entry for name, entry in index["tensors"].items() if name != f"rng/{stream}"}
    payload = memoryview(data)[header.data_start :]
    entries = [
        Entry(name, span.dtype, span.shape, payload[span.begin : span.end])
        for name, span in header.tensors.items()
        if name in index["tensors"]
    ]
    record = write_shard(path, entries, identity=header.identity, index=index)
    reseal(checkpoint, files={**parse_manifest(checkpoint / layout.MANIFEST).files, SECOND: record})


def commit_state(checkpoint: Path, text: str) -> None:
    """Another `trainer_state.json`, under a manifest that vouches for it."""
    (checkpoint / layout.TRAINER_STATE).write_text(text, encoding="utf-8")
    reseal(checkpoint)


def change_state(checkpoint: Path, **fields: Any) -> None:
    state = json.loads((checkpoint / layout.TRAINER_STATE).read_text("utf-8"))
    state.update(fields)
    commit_state(checkpoint, json.dumps({name: value for name, value in state.items() if value != "left out"}))


# --- a damaged checkpoint ---------------------------------------------------------------------------------------------

FIRST_READ = {"verify": "first"}
# name: (harm done to step 6's directory, arguments of the manager, the error, what its text holds)
DAMAGE: dict[str, tuple[Callable[[Path], Any], dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "missing file": (
        lambda path: (path / SECOND).unlink(),
        {},
        named.CheckpointDamagedError,
        (SECOND, "missing", r"rank 1 \(tp01-pp00-dp00\)"),
    ),
    "truncated": (
        lambda path: os.truncate(path / SECOND, (path / SECOND).stat().st_size - 1),
        {},
        named.CheckpointDamagedError,
        (SECOND, r"truncated: expected \d+ bytes .*found \d+"),
    ),
    "empty": (
        lambda path: os.truncate(path / FIRST, 0),
        {},
        named.CheckpointDamagedError,
        (FIRST, r"truncated: expected \d+ bytes .*found 0"),
    ),
    "flip in header": (
        lambda path: flip(path / SECOND, 200),
        {},
        named.CheckpointDamagedError,
        (SECOND, "expected header digest [0-9a-f]{32}", "found [0-9a-f]{32}", "Resume from another"),
    ),
    "flip in data": (
        lambda path: flip(path / SECOND, -5000),
        FIRST_READ,
        named.CheckpointDamagedError,
        (SECOND, r"damaged between bytes \d+ and \d+: expected digest .* found", "Resume from another"),
    ),
    "zeroed block": (
        lambda path: zero_4_kib(path / FIRST),
        FIRST_READ,
        named.CheckpointDamagedError,
        (FIRST, r"damaged between bytes"),
    ),
    "two files swapped": (
        lambda path: swap(path / FIRST, path / SECOND),
        {},
        named.CheckpointDamagedError,
        (FIRST, SECOND, "another rank's file|not this checkpoint's|expected .* bytes"),
    ),
    "file of another step": (
        lambda path: shutil.copy(path.parent / "step-00000004" / SECOND, path / SECOND),
        {},
        named.CheckpointDamagedError,
        (SECOND, "not this checkpoint's|expected .* bytes"),
    ),
    "newer format": (
        lambda path: write_json(
            path / layout.MANIFEST, {**json.loads((path / layout.MANIFEST).read_text()), "format_version": 99}
        ),
        {},
        named.FormatError,
        (layout.MANIFEST, "format version 99", "reads up to 1", "Upgrade megaresume"),
    ),
    "manifest altered": (
        lambda path: (path / layout.MANIFEST).write_text(
            (path / layout.MANIFEST).read_text().replace('"step": 6', '"step": 5')
        ),
        {},
        named.CheckpointDamagedError,
        (layout.MANIFEST, "expected", "found"),
    ),
    "manifest cut": (
        lambda path: os.truncate(path / layout.MANIFEST, 100),
        {},
        named.CheckpointDamagedError,
        (layout.MANIFEST, "expected strict JSON"),
    ),
    "s01 no manifest": (
        lambda path: ((path / layout.MANIFEST).unlink(), (path / layout.TRAINER_STATE).unlink()),
        {},
        named.CheckpointNotFoundError,
        ("step-00000006", "not a resumable checkpoint: 2 .safetensors files and no manifest.json"),
    ),
    "s01 no trainer state": (
        lambda path: (path / layout.TRAINER_STATE).unlink(),
        {},
        named.CheckpointDamagedError,
        (layout.TRAINER_STATE, "missing", "weights_only=True"),
    ),
    "s03 empty": (
        lambda path: os.truncate(path / layout.TRAINER_STATE, 0),
        {},
        named.CheckpointDamagedError,
        (layout.TRAINER_STATE, r"expected \d+ bytes .*found 0 bytes"),
    ),
    "s03 cut": (
        lambda path: os.truncate(path / layout.TRAINER_STATE, 300),
        {},
        named.CheckpointDamagedError,
        (layout.TRAINER_STATE, r"expected \d+ bytes .*found 300 bytes"),
    ),
    "s03 altered": (
        lambda path: (path / layout.TRAINER_STATE).write_text(
            (path / layout.TRAINER_STATE).read_text().replace('"global_step": 6', '"global_step": 7')
        ),
        {},
        named.CheckpointDamagedError,
        (layout.TRAINER_STATE, "with digest"),
    ),
    "s03 object without fields": (
        lambda path: commit_state(path, "{}"),
        {},
        named.TrainerStateError,
        (layout.TRAINER_STATE, "global_step|schema_version"),
    ),
    "s03 list": (lambda path: commit_state(path, "[]"), {}, named.TrainerStateError, (layout.TRAINER_STATE, "list")),
    "s03 another program's": (
        lambda path: commit_state(path, '{"name": "left-pad", "version": "1.3.0"}'),
        {},
        named.TrainerStateError,
        (layout.TRAINER_STATE,),
    ),
    "s03 missing field": (
        lambda path: change_state(path, consumed_train_samples="left out"),
        {},
        named.TrainerStateError,
        (layout.TRAINER_STATE, "consumed_train_samples"),
    ),
    **{
        f"s03 global_step {value!r}": (
            lambda path, value=value: change_state(path, global_step=value),
            {},
            named.TrainerStateError,
            (layout.TRAINER_STATE, "global_step"),
        )
        for value in ("6", 6.5, True, -1)
    },
    "trainer state of another step": (
        lambda path: change_state(path, global_step=4),
        {},
        named.CheckpointDamagedError,
        (layout.TRAINER_STATE, "of step 4", "of step 6"),
    ),
    "r07 a stream is missing": (
        lambda path: forget_stream(path, "numpy"),
        {},
        named.StateMismatchError,
        ("rank 1", "random stream numpy is in this run, not in the checkpoint", "load_rng=False"),
    ),
}


@pytest.fixture(scope="module")
def refusals(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[Refusal], list[str]]]:
    """For every kind of damage: what each rank got when it asked for step 6, and what changed on disk."""
    directory = tmp_path_factory.mktemp("damaged")
    tries, before = [], []
    for number, (harm, manager_args, _, _) in enumerate(DAMAGE.values()):
        root = directory / str(number)
        shutil.copytree(whole[0], root)
        harm(root / "step-00000006")
        tries.append((root, {"resume_from": 6, **manager_args}, {}))
        before.append(tree(root))
    per_rank = ranks.run(all_refused, CONFIG, tries, world_size=2)
    changed = [differences(old, tree(root)) for old, (root, _, _) in zip(before, tries, strict=True)]
    return {name: ([each[i] for each in per_rank], changed[i]) for i, name in enumerate(DAMAGE)}


@pytest.mark.parametrize("name", DAMAGE)
def test_a20_s01_s03_r07_damage_is_refused(refusals: dict[str, tuple[list[Refusal], list[str]]], name: str) -> None:
    _, _, error, needles = DAMAGE[name]
    refusal, changed_files = refusals[name]
    assert_refused(refusal, error, *needles)
    assert changed_files == []


def resume_and_train(
    config: SmallModel, root: Path, steps: int, manager_args: dict[str, Any], resume_args: dict[str, Any]
) -> Outcome:
    """As `harness.train`, with arguments of `resume()` too."""
    loop = start(config)
    results = {}
    with open_manager(loop, root, **manager_args) as manager:
        report = manager.resume(**resume_args)
        results.update(train_steps(loop, manager, steps))
    return Outcome(report, results, digest(loop), manager.step, manager.should_stop)


def test_s01_weights_alone_need_no_trainer_state(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    (root / "step-00000006" / layout.TRAINER_STATE).unlink()
    args = (CONFIG, root, 0, {"resume_from": 6}, {"weights_only": True})
    for mine, reference in zip(ranks.run(resume_and_train, *args, world_size=2), whole[1], strict=True):
        assert (mine.report.step, mine.step, mine.report.path) == (0, 0, root / "step-00000006")
        assert "optimizer" in mine.report.left_out
        weights = {name: text for name, text in reference.state.items() if name.startswith("parameter/")}
        assert weights.items() <= mine.state.items()


def test_r07_without_random_numbers_on_request(ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    forget_stream(root / "step-00000006", "numpy")
    for outcome in run(ranks, CONFIG, root, STEPS, load_rng=False):
        assert outcome.report.step == STEPS
        assert outcome.report.changes == ("rng",)
        assert any("random numbers" in part for part in outcome.report.left_out)


# --- automatic resume: the next older one -----------------------------------------------------------------------------


def harm_two(root: Path) -> None:
    """A14: the newest is damaged for one rank, the next for the other: the newest that is whole for both is step 2."""
    flip(root / "step-00000006" / FIRST, 200)
    (root / "step-00000004" / SECOND).unlink()


FALL_BACKS: dict[str, tuple[Callable[[Path], Any], int, dict[str, Any]]] = {
    "a20 header, phase 1": (lambda root: flip(root / "step-00000006" / SECOND, 200), 4, {}),
    "a20 data, phase 2": (lambda root: flip(root / "step-00000006" / SECOND, -5000), 4, {}),
    "a20 data, read first": (lambda root: flip(root / "step-00000006" / SECOND, -5000), 4, FIRST_READ),
    "a14": (harm_two, 2, {}),
    "s01 no manifest": (lambda root: (root / "step-00000006" / layout.MANIFEST).unlink(), 4, {}),
    "s03": (lambda root: commit_state(root / "step-00000006", "[]"), 4, {}),
    "a05 not published": (
        lambda root: (root / "step-00000006").rename(root / layout.staging_directory(6, 1)),
        4,
        {},
    ),
}


@pytest.mark.parametrize("harm, resumed_at, manager_args", FALL_BACKS.values(), ids=FALL_BACKS)
def test_damage_falls_back_to_the_next_older_and_is_exact(
    ranks: Ranks,
    whole: tuple[Path, list[Outcome]],
    tmp_path: Path,
    harm: Callable[[Path], Any],
    resumed_at: int,
    manager_args: dict[str, Any],
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    harm(root)
    resumed = run(ranks, CONFIG, root, STEPS, save_every=2, **manager_args)
    for outcome in resumed:
        assert outcome.report.step == resumed_at
        passed = dict(outcome.report.passed)
        assert any("step-00000006" in name for name in passed)
        assert all(passed.values()), "a checkpoint was passed over without a reason"
    assert_continues(resumed, whole[1])
    # What could not be read is still there, aside, for whoever wants to look at it.
    if not any(name.startswith(".staging") for name in passed):
        assert (root / "step-00000006.a0002").is_dir()
    assert read_progress(root).global_step == STEPS


def test_a_rank_half_overwritten_is_exact_after_the_fall_back(ranks: Ranks, tmp_path: Path) -> None:
    """A shard of two chunks with the damage in the second: the first one's tensors are in place when it is found."""
    config = replace(CONFIG, tp=1, hidden_size=64)
    whole = run(ranks, config, tmp_path, STEPS, save_every=2)
    shard = tmp_path / "step-00000006" / FIRST
    assert shard.stat().st_size > CHUNK_BYTES + 5000
    flip(shard, -5000)
    ((explicit,),) = ranks.run(all_refused, config, [(tmp_path, {"resume_from": 6}, {})], world_size=1)
    assert explicit.error == "PoisonedError"
    overwritten = [name for name in explicit.changed if name.startswith(("parameter/", "optim/"))]
    assert overwritten, "nothing was overwritten: this does not show what it is for"
    resumed = run(ranks, config, tmp_path, STEPS)
    assert resumed[0].report.step == 4
    assert_continues(resumed, whole)


def use_in_spite_of_poison(config: SmallModel, root: Path) -> list[str]:
    """Damage that only phase 2 sees, and no older checkpoint: every way on is closed."""
    loop = start(config)
    said = []
    manager = open_manager(loop, root)
    for action in (manager.resume, manager.end_step, manager.save, manager.poll, manager.resume):
        try:
            action()
            said.append("")
        except PoisonedError as error:
            said.append(str(error))
    manager.close()
    return said


def test_damage_in_phase_2_with_nothing_older_poisons(
    ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    for step in (2, 4, 6):
        flip(root / layout.step_directory(step) / SECOND, -5000)
    before = tree(root)
    first, second = ranks.run(use_in_spite_of_poison, CONFIG, root, world_size=2)
    assert first == second
    assert all(first), "a poisoned manager let something pass"
    for step in (2, 4, 6):
        assert f"step-0000000{step}" in first[0]
    assert SECOND in first[0] and "Start the process again" in first[0]
    assert differences(before, tree(root)) == []


def test_an_explicit_request_never_falls_back(ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    flip(root / "step-00000006" / SECOND, -5000)
    for each in ranks.run(all_refused, CONFIG, [(root, {"resume_from": 6}, {})], world_size=2):
        assert each[0].error == "PoisonedError"
        assert SECOND in each[0].text


def test_a16_all_unreadable_is_no_fresh_start(ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    shutil.copytree(whole[0], root)
    os.truncate(root / "step-00000002" / FIRST, 100)
    flip(root / "step-00000004" / SECOND, 200)
    (root / "step-00000006" / layout.TRAINER_STATE).unlink()
    shutil.copytree(root, other)
    for step in (2, 4, 6):
        (other / layout.step_directory(step) / layout.MANIFEST).write_text("{}")
    gone = tmp_path / "gone"
    shutil.copytree(whole[0], gone, ignore=shutil.ignore_patterns("step-0*"))
    before = [tree(each) for each in (root, other, gone)]
    tries = [(root, {}, {}), (other, {}, {}), (gone, {}, {}), (other, {"resume_from": whole[0] / "step-00000002"}, {})]
    per_rank = ranks.run(all_refused, CONFIG, tries, world_size=2)
    for i, needles in enumerate(
        [
            ("step-00000002: .*truncated", "step-00000004: .*altered", "step-00000006: .*missing"),
            ("step-00000002: ", "step-00000004: ", "step-00000006: ", "would bury them", "start_fresh=True"),
            ("no step directory is there", "start_fresh=True"),
            # J14's other half: the base that a run began with does not stand in for what it has lost since.
            ("Starting again from .* would bury them", "step-00000006: "),
        ]
    ):
        assert_refused([each[i] for each in per_rank], named.CheckpointNotFoundError, *needles)
    assert [tree(each) for each in (root, other, gone)] == before
    for each, kept in ((root, 3), (other, 3), (gone, 0)):
        for outcome in run(ranks, CONFIG, each, 1, start_fresh=True):
            assert (outcome.report.path, outcome.report.step, outcome.step) == (None, 0, 1)
        assert len(list(each.glob("step-*"))) == kept + 1, "a fresh start on purpose removed what was there"


# --- another model, another topology ----------------------------------------------------------------------------------


def refused_by_other_models(config: SmallModel, root: Path) -> dict[str, Refusal]:
    """This rank's refusal for each model that is not the checkpoint's."""
    outcomes = {}
    others = {
        "hidden_size": replace(config, hidden_size=64),
        "num_layers": replace(config, num_layers=4),
        "params_dtype": replace(config, precision="fp32"),
        "padded_vocab_size": config,
        "trainable": config,
    }
    for name, other in others.items():
        with vocabulary_of(256 if name == "padded_vocab_size" else small_models.VOCAB_SIZE):
            loop = start(other)
        if name == "trainable":
            next(loop.run.chunks[0].parameters()).requires_grad = False
        outcomes[name] = refused(loop, root, {}, {})
    return outcomes


@contextmanager
def vocabulary_of(size: int) -> Iterator[None]:
    usual, small_models.VOCAB_SIZE = small_models.VOCAB_SIZE, size
    try:
        yield
    finally:
        small_models.VOCAB_SIZE = usual


def test_a_checkpoint_of_another_model(ranks: Ranks, whole: tuple[Path, list[Outcome]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(whole[0], root)
    before = tree(root)
    per_rank = ranks.run(refused_by_other_models, CONFIG, root, world_size=2)
    for field, values in {
        "hidden_size": ("32", "64"),
        "num_layers": ("2", "4"),
        "params_dtype": ("bfloat16", "float32"),
        "padded_vocab_size": ("128", "256"),
        "trainable": ("[0-9a-f]{16}", "[0-9a-f]{16}"),
    }.items():
        row = rf"{field}\W+{values[0]}\W+{values[1]}"
        assert_refused([each[field] for each in per_rank], named.TopologyMismatchError, row)
    assert tree(root) == before


def save_at_zero(config: SmallModel, root: Path) -> None:
    loop = start(config)
    with open_manager(loop, root) as manager:
        manager.resume()
        manager.save()


TENSOR_AND_DATA = SmallModel(tp=2, dp=2, num_layers=2, global_batch_size=4)
PIPELINE_AND_DATA = SmallModel(pp=2, dp=2, num_layers=2, global_batch_size=4)


@pytest.fixture(scope="module")
def four_ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[SmallModel, Path]:
    """A root with a checkpoint of step 0 for each of two layouts of four ranks."""
    roots = {config: tmp_path_factory.mktemp("four") / "root" for config in (TENSOR_AND_DATA, PIPELINE_AND_DATA)}
    for config, root in roots.items():
        ranks.run(save_at_zero, config, root, world_size=4)
    return roots


OTHER_LAYOUTS: dict[str, tuple[SmallModel, SmallModel, tuple[str, ...]]] = {
    "t01 tp 1, dp 4": (TENSOR_AND_DATA, replace(TENSOR_AND_DATA, tp=1, dp=4), (r"tp\W+2\W+1", r"dp\W+2\W+4")),
    "t01 pp 2, dp 1": (TENSOR_AND_DATA, replace(TENSOR_AND_DATA, pp=2, dp=1), (r"pp\W+1\W+2", r"dp\W+2\W+1")),
    "t02 dp 1, two ranks": (TENSOR_AND_DATA, replace(TENSOR_AND_DATA, dp=1), (r"dp\W+2\W+1",)),
    "t02 dp 4, eight ranks": (TENSOR_AND_DATA, replace(TENSOR_AND_DATA, dp=4, global_batch_size=4), (r"dp\W+2\W+4",)),
    "t01 rank order": (
        PIPELINE_AND_DATA,
        replace(PIPELINE_AND_DATA, order="tp-cp-ep-pp-dp"),
        ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
    ),
}


@pytest.mark.parametrize("saved, current, needles", OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_t01_t02_another_topology(
    ranks: Ranks,
    four_ranks: dict[SmallModel, Path],
    saved: SmallModel,
    current: SmallModel,
    needles: tuple[str, ...],
) -> None:
    root = four_ranks[saved]
    before = tree(root)
    per_rank = ranks.run(all_refused, current, [(root, {}, {})], world_size=current.world_size)
    text = assert_refused([each[0] for each in per_rank], named.TopologyMismatchError, "step-00000000", *needles)
    assert "what to do" in text.lower(), "the table does not say the way out"
    assert tree(root) == before


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


def test_j10_one_ranks_reason_is_everyones(ranks: Ranks, four_ranks: dict[SmallModel, Path], tmp_path: Path) -> None:
    file = "tp01-pp00-dp01.safetensors"
    roots = [tmp_path / name for name in ("missing", "pipe", "directory", "altered")]
    for root in roots:
        shutil.copytree(four_ranks[TENSOR_AND_DATA], root)
    (roots[0] / "step-00000000" / file).unlink()
    (roots[1] / "step-00000000" / file).unlink()
    os.mkfifo(roots[1] / "step-00000000" / file)
    (roots[2] / "step-00000000" / file).unlink()
    (roots[2] / "step-00000000" / file).mkdir()
    flip(roots[3] / "step-00000000" / file, 200)
    tries = [(root, {"resume_from": "0"}, {}) for root in roots]
    per_rank = ranks.run(all_refused, TENSOR_AND_DATA, tries, world_size=4)
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


class Waiting(logging.Handler):
    """Keeps what the control plane says of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


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


# --- what a person asks for, and is told ------------------------------------------------------------------------------


def test_u05_the_table_of_resume_from(tmp_path: Path) -> None:
    table: list[tuple[Any, tuple[str, Any]]] = [
        (None, ("auto", None)),
        ("auto", ("auto", None)),
        ("latest", ("latest", None)),
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
