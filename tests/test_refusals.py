"""What a checkpoint gets that is damaged, of another model or of another topology, and is asked for by name: a refusal.

One error on all ranks that names file, expected, found and the way out, and nothing changed. Real megatron-core ranks
through ResumeManager: live objects are compared by the harness's digest of all state, roots file by file. How single
files are read is tested in `tests/store`; here it is what a run makes of them that counts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaresume import errors as named
from megaresume.store import layout
from tests import small_models
from tests.harness import (
    Outcome,
    differences,
    run,
    start,
    tree,
)
from tests.ranks import Ranks
from tests.refusals import (
    CONFIG,
    FIRST,
    FIRST_READ,
    SECOND,
    STEPS,
    Refusal,
    all_refused,
    assert_refused,
    change_state,
    commit_state,
    flip,
    forget_stream,
    refused,
    resume_and_train,
    save_at_zero,
    swap,
    whole_run,
    write_json,
    zero_4_kib,
)
from tests.small_models import SmallModel


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    return whole_run(ranks, tmp_path_factory.mktemp("whole") / "root")


# --- a damaged checkpoint ---------------------------------------------------------------------------------------------

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
    assert "another run or model" not in text, "the model is the same, however it is split"
    assert tree(root) == before
