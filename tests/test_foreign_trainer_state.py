"""trainer_state.json of other shapes: what is taken, what is derived and said, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megaresume.errors import ConfigurationError, TrainerStateError
from megaresume.state.foreign_trainer_state import ForeignTrainerState, read_any_trainer_state
from megaresume.state.trainer_state import TrainerState, dumps, loads

TWINKLE = {
    "checkpoint_version": 1,
    "cur_step": 120,
    "consumed_train_samples": 960,
    "gradient_accumulation_steps": 4,
}
# As transformers writes it, with NaN as Python's json writes it.
HUGGING_FACE = """{
  "best_global_step": 200, "best_metric": NaN, "best_model_checkpoint": "out/checkpoint-200", "epoch": 1.9940,
  "eval_steps": 500, "global_step": 250, "is_hyper_param_search": false, "is_local_process_zero": true,
  "is_world_process_zero": true,
  "log_history": [{"epoch": 0.5, "loss": NaN, "step": 60}, {"epoch": 1.0, "loss": 2.5, "step": 125}],
  "logging_steps": 10, "max_steps": 375, "num_input_tokens_seen": 0, "num_train_epochs": 3, "save_steps": 50,
  "stateful_callbacks": {}, "total_flos": 5.7372149e+17, "train_batch_size": 8, "trial_name": null, "trial_params": null
}"""


def put(root: Path, content: Any, directory: str = "step-00001200") -> Path:
    path = root / directory / "trainer_state.json"
    path.parent.mkdir()
    data = content if isinstance(content, bytes) else content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def read(root: Path, content: Any, directory: str = "step-00001200", **known: int) -> ForeignTrainerState:
    return read_any_trainer_state(put(root, content, directory), **known)


def test_our_own_shape_is_read_strictly_and_without_notes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = TrainerState(global_step=3, consumed_train_samples=24)
    assert read(tmp_path, dumps(state)) == ForeignTrainerState(state, "megaresume", ())
    assert caplog.records == []
    with pytest.raises(TrainerStateError, match="global_step: is missing"):
        read(tmp_path, {"schema_version": 1, "consumed_train_samples": 24}, directory="other")


@pytest.mark.parametrize("directory", ["iter_0000120", "checkpoint-120"])
def test_twinkles_shape(directory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path, TWINKLE, directory, samples_per_epoch=400)
    assert found.shape == "Twinkle"
    assert (found.state.global_step, found.state.consumed_train_samples, found.state.epoch) == (30, 960, 2)
    assert found.state.gradient_accumulation_steps == 4
    assert found.notes == (
        "global_step 30 = 120 forward-backward calls / 4 accumulated",
        "epoch 2 = 960 consumed samples / 400 per epoch",
    )
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(note in line for note in (*found.notes, directory, "Twinkle"))
    assert loads(dumps(found.state), source="again") == found.state


def test_twinkles_unfinished_step_is_said(tmp_path: Path) -> None:
    found = read(tmp_path, {**TWINKLE, "cur_step": 122, "later": [1]})
    assert found.state.global_step == 30
    assert found.state.extra == {"twinkle": {"later": [1]}}
    assert "2 calls of an unfinished step are not counted" in found.notes
    assert "epoch is not known: neither it nor the size of the dataset was given" in found.notes


def test_twinkles_zero_of_consumed_samples_is_not_believed(tmp_path: Path) -> None:
    silent = {**TWINKLE, "consumed_train_samples": 0}
    with pytest.raises(TrainerStateError, match=r"consumed_train_samples: cannot be told .*global_batch_size="):
        read(tmp_path, silent, "a")
    found = read(tmp_path, silent, "b", global_batch_size=32)
    assert (found.state.consumed_train_samples, found.state.global_batch_size) == (960, 32)
    assert any("960 = 30 steps x 32 samples" in note for note in found.notes)
    assert read(tmp_path, {**silent, "cur_step": 0}, "c").state.consumed_train_samples == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_version": 2}, "checkpoint_version: expected version 1, .*, found 2"),
        ({"cur_step": "120"}, 'cur_step: expected a whole number of at least 0, found "120"'),
        ({"cur_step": True}, "cur_step: expected a whole number"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected a whole number of at least 1"),
        ({"consumed_train_samples": -1}, "consumed_train_samples: expected a whole number"),
    ],
)
def test_s03_twinkles_shape_is_checked_by_its_own_field_names(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainerStateError, match=rf"trainer_state\.json: {message}"):
        read(tmp_path, {**TWINKLE, **change})


@pytest.mark.parametrize("name", [name for name in TWINKLE if name != "cur_step"])
def test_s03_twinkles_missing_fields_are_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(TrainerStateError, match=rf"trainer_state\.json: {name}: is missing"):
        read(tmp_path, {key: value for key, value in TWINKLE.items() if key != name})


def test_s02_hugging_faces_shape_with_bare_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path, HUGGING_FACE, "checkpoint-250", global_batch_size=32)
    state = found.state
    assert found.shape == "Hugging Face"
    assert (state.global_step, state.consumed_train_samples, state.epoch) == (250, 8000, 1)
    assert (state.flops, state.tokens, state.finished) == (5.7372149e17, None, False)
    assert state.best_metric != state.best_metric
    assert state.extra["hugging_face"]["best_model_checkpoint"] == "out/checkpoint-200"
    assert state.micro_batch_size is None, "train_batch_size is per process, not per micro-batch"
    assert "log_history" not in state.extra["hugging_face"]
    assert found.notes == (
        "consumed_train_samples 8000 = 250 steps x 32 samples (Hugging Face's file has none)",
        "epoch 1 = 1.994 rounded down",
        "finished false: step 250 of 375",
        "log_history (2 entries) is left behind",
    )
    assert len(caplog.records) == 2
    assert b"NaN" not in dumps(state)


def test_hugging_faces_position_is_refused_where_it_cannot_be_told(tmp_path: Path) -> None:
    with pytest.raises(TrainerStateError, match=r"cannot be told \(Hugging Face's file has none\)"):
        read(tmp_path, HUGGING_FACE)


def test_a_finished_hugging_face_run_is_finished(tmp_path: Path) -> None:
    end = {"global_step": 375, "max_steps": 375, "epoch": None, "log_history": [], "num_input_tokens_seen": 9}
    state = read(tmp_path, end, global_batch_size=2, samples_per_epoch=250).state
    assert (state.finished, state.epoch, state.tokens, state.flops) == (True, 3, 9, None)
    assert not read(tmp_path, {**end, "max_steps": -0}, "b", global_batch_size=2).state.finished


@pytest.mark.parametrize(
    "change",
    [{"epoch": "1"}, {"epoch": -1.0}, {"total_flos": "x"}, {"num_input_tokens_seen": 1.5}, {"best_metric": "x"}],
    ids=str,
)
def test_s03_hugging_faces_wrong_types_are_named(change: dict[str, Any], tmp_path: Path) -> None:
    (name,) = change
    with pytest.raises(TrainerStateError, match=rf"trainer_state\.json: {name}: expected"):
        read(tmp_path, {**json.loads(HUGGING_FACE), "epoch": 1.0, "best_metric": None, **change}, global_batch_size=1)


@pytest.mark.parametrize(
    ("directory", "step"),
    [
        ("step-00001200", 1200),
        ("checkpoint-500", 500),
        ("iter_0000100", 100),
        ("epoch_1_step_40", 40),
        ("run-step7", 7),
        ("step-123456789012", 123456789012),
    ],
)
def test_a_missing_step_is_taken_from_the_directory(directory: str, step: int, tmp_path: Path) -> None:
    found = read(tmp_path, {"consumed_train_samples": 64}, directory)
    assert (found.state.global_step, found.state.consumed_train_samples) == (step, 64)
    assert f"global_step {step} is from the directory's name '{directory}'" in found.notes


@pytest.mark.parametrize("directory", ["latest", "epoch_3", "step-", "step-1200.a0003", "misstep1", "step-\u0661"])
def test_a_missing_step_is_never_guessed(directory: str, tmp_path: Path) -> None:
    with pytest.raises(TrainerStateError, match="global_step: is missing, and the directory's name"):
        read(tmp_path, {"consumed_train_samples": 64}, directory)


def test_an_older_state_of_few_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = {"consumed_train_samples": 1000, "dataset_size": 400, "global_batch_size": 10, "finished": True}
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path, older, "step-00000100")
    assert (found.shape, found.state.global_step, found.state.epoch) == ("an older one", 100, 2)
    assert (found.state.global_batch_size, found.state.finished) == (10, True)
    assert found.state.unknown == {"dataset_size": 400}
    assert "epoch 2 = 1000 consumed samples / 400 per epoch" in found.notes
    absent = next(note for note in found.notes if note.startswith("not recorded"))
    assert "consumed_valid_samples" in absent and "scheduler" in absent and "finished" not in absent
    assert len(caplog.records) == 1


def test_an_epochs_end_belongs_to_the_next_epoch(tmp_path: Path) -> None:
    state = {"global_step": 6, "consumed_train_samples": 48}
    assert read(tmp_path, state, "a", samples_per_epoch=48).state.epoch == 1
    assert read(tmp_path, state, "b", samples_per_epoch=49).state.epoch == 0
    assert read(tmp_path, {**state, "epoch": 5}, "c", samples_per_epoch=48).state.epoch == 5


def test_an_older_states_consumed_samples_come_from_its_batch_size(tmp_path: Path) -> None:
    older = {"global_step": 10, "global_batch_size": 8}
    assert read(tmp_path, older, "a").state.consumed_train_samples == 80
    with pytest.raises(TrainerStateError, match="global_batch_size: expected 16, the size that was given, found 8"):
        read(tmp_path, older, "b", global_batch_size=16)
    with pytest.raises(TrainerStateError, match="consumed_train_samples: cannot be told"):
        read(tmp_path, {"global_step": 10}, "c")


@pytest.mark.parametrize("value", ["10", 10.0, True, -1, None])
@pytest.mark.parametrize("name", ["global_step", "consumed_train_samples"])
def test_s03_an_older_states_wrong_types_are_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainerStateError, match=f"{name}: expected a whole number of at least 0"):
        read(tmp_path, {"global_step": 10, "consumed_train_samples": 80, name: value}, samples_per_epoch=8)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"name": "web"}', '{"cur_step":'])
def test_s03_what_has_no_known_shape_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(TrainerStateError, match=r"trainer_state\.json: "):
        read(tmp_path, content)


def test_sizes_below_one_are_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="samples_per_epoch must be at least 1, found 0"):
        read(tmp_path, TWINKLE, samples_per_epoch=0)
