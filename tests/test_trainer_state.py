"""trainer_state.json: a strict round trip, what is refused when writing, and what is refused when reading."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.errors import FormatError, TrainerStateError
from megaresume.state import trainer_state
from megaresume.state.document import MAX_BYTES, MAX_DEPTH
from megaresume.state.trainer_state import SCHEMA_VERSION, TrainerState, dumps, loads, read
from megaresume.topology import Topology

FULL = TrainerState(
    global_step=1200,
    consumed_train_samples=76_800,
    consumed_valid_samples=640,
    skipped_train_samples=64,
    epoch=3,
    micro_batch_size=4,
    global_batch_size=64,
    gradient_accumulation_steps=8,
    batch_size_schedule={"start": 16, "increment": 16, "samples": 10_000},
    seed=1234,
    data={"train": {"anchors": [{"consumed": 0, "epoch": 0, "offset": 0}], "seed": 7, "shuffle": True}, "valid": {}},
    topology=Topology(2, 2, 2, vpp=2, extra={"heads": 2}),
    scheduler={"num_steps": 76_800, "max_lr": 3e-4, "lr_decay_style": "cosine"},
    loss_scaler={"scale": 65536.0, "growth_tracker": 17},
    tokens=19_660_800,
    flops=1.25e21,
    best_metric=2.3456789,
    versions={"megaresume": "0.1.0", "torch": "2.13.0+cpu"},
    lineage=({"attempt": 1, "start_step": 0}, {"attempt": 2, "start_step": 1000, "changes": ["lr"]}),
    finished=True,
    healthy=True,
    extra={"run": "naïve-模型", "nested": {"list": [1, 2.5, None, True, "x"]}},
    unknown={"of_a_later_release": [1, {"a": 2}]},
)
SMALL = TrainerState(global_step=0, consumed_train_samples=0)


def document(state: TrainerState = FULL) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(dumps(state))
    return parsed


def load(content: Any) -> TrainerState:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return loads(data, source="root/step-00001200/trainer_state.json")


def strict_parse(data: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(data.decode("utf-8"), parse_constant=refuse)


# ---- round trip


@pytest.mark.parametrize("state", [FULL, SMALL], ids=["full", "small"])
def test_round_trip_keeps_every_field(state: TrainerState) -> None:
    data = dumps(state)
    assert load(data) == state
    assert dumps(load(data)) == data


def test_every_field_is_written_and_checked() -> None:
    names = {each.name for each in dataclasses.fields(TrainerState)} - {"unknown"}
    assert names == trainer_state._CHECKS.keys()
    assert document().keys() == names | FULL.unknown.keys()


def test_unknown_fields_are_kept_and_cannot_hide_known_ones() -> None:
    later = {**document(SMALL), "wall_clock": {"hours": 3.5}}
    assert load(later).unknown == {"wall_clock": {"hours": 3.5}}
    assert document(load(later))["wall_clock"] == {"hours": 3.5}
    with pytest.raises(TrainerStateError, match="global_step: is a field of its own"):
        dumps(dataclasses.replace(SMALL, unknown={"global_step": 5}))


def test_a_newer_schema_is_refused_with_both_versions() -> None:
    newer = {"schema_version": SCHEMA_VERSION + 1, "steps": "shaped otherwise"}
    with pytest.raises(FormatError, match=r"version 2, this release reads up to version 1; read it with the release"):
        load(newer)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"])).filter(lambda k: k != "__float__"), inner
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_of_the_users_comes_back_exactly(value: Any) -> None:
    data = dumps(dataclasses.replace(SMALL, extra={"value": value}))
    strict_parse(data)
    assert repr(load(data).extra["value"]) == repr(value)  # repr tells 1 from 1.0, -0.0 from 0.0, and nan is nan


# ---- S02: floats that JSON has no number for


def test_s02_non_finite_floats_are_strict_json_and_come_back() -> None:
    state = dataclasses.replace(
        FULL, best_metric=math.nan, extra={"history": [1.0, math.inf, {"worst": -math.inf}, [math.nan]]}
    )
    data = dumps(state)
    assert strict_parse(data)["best_metric"] == {"__float__": "nan"}
    assert strict_parse(data)["extra"]["history"][1:3] == [{"__float__": "inf"}, {"worst": {"__float__": "-inf"}}]
    back = load(data)
    assert back.best_metric is not None and math.isnan(back.best_metric)
    assert back.extra["history"][:3] == state.extra["history"][:3]
    assert math.isnan(back.extra["history"][3][0])


def test_s02_a_file_with_bare_nan_is_read_and_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    text = json.dumps({**document(SMALL), "best_metric": math.nan, "extra": {"worst": [-math.inf]}})
    assert "NaN" in text and "-Infinity" in text
    with caplog.at_level(logging.WARNING):
        state = load(text.encode())
    assert state.best_metric is not None and math.isnan(state.best_metric)
    assert state.extra == {"worst": [-math.inf]}
    assert [record.getMessage() for record in caplog.records] == [
        "root/step-00001200/trainer_state.json holds bare -Infinity, NaN, which is not JSON; read all the same"
    ]


@pytest.mark.parametrize("mark", [{"__float__": "pi"}, {"__float__": 1}, {"__float__": "nan", "b": 1}])
def test_s02_an_unknown_float_mark_is_refused_and_users_cannot_write_one(mark: Any) -> None:
    with pytest.raises(TrainerStateError, match=r"extra\.a: expected __float__ alone, with one of nan, inf, -inf"):
        load({**document(SMALL), "extra": {"a": mark}})
    with pytest.raises(TrainerStateError, match=r"extra\.a: expected keys .* found the key '__float__'"):
        dumps(dataclasses.replace(SMALL, extra={"a": mark}))


# ---- S03: what counts as a trainer state


def cut_in_the_middle() -> bytes:
    return dumps(FULL)[: len(dumps(FULL)) // 2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a JSON object, found an empty file"),
        (b" \n", "found an empty file"),
        (cut_in_the_middle(), r"line \d+, column \d+: expected JSON.*cut short or altered"),
        (dumps(FULL) + b"}", r"line \d+, column \d+: expected JSON"),
        (b"{}", r"schema_version: is missing \(of the fields expected, schema_version, global_step, .*extra are\)"),
        (b"[]", "the whole file: expected an object, found a list"),
        (b"7", r"the whole file: expected an object, found 7 \(a whole number\)"),
        (b"null", "the whole file: expected an object, found null"),
        (b'{"name": "web", "dependencies": {}}', "schema_version: is missing"),
        (b'{"schema_version": 1, "schema_version": 1}', "'schema_version': expected once in its object"),
        (b'{"schema_version": 1e999}', "expected numbers that fit a float, found 1e999"),
        (b'{"schema_version": ' + b"9" * 5000 + b"}", "integers of at most 4300 digits, found 5000"),
        (b'{"extra": ["\\ud800"]}', r"extra\[0\]: expected Unicode text, found half a surrogate pair"),
        (b'{"\\ud800": 1}', "expected Unicode text as keys"),
    ],
)
def test_s03_what_is_not_a_trainer_state_is_refused_by_place(data: bytes, message: str) -> None:
    with pytest.raises(TrainerStateError, match=rf"^root/step-00001200/trainer_state\.json: (.* )?{message}"):
        load(data)


@pytest.mark.parametrize("name", sorted(trainer_state._CHECKS))
def test_s03_each_missing_field_is_named(name: str) -> None:
    rest = {key: value for key, value in document().items() if key != name}
    with pytest.raises(TrainerStateError, match=rf"trainer_state\.json: {name}: is missing"):
        load(rest)


COUNTS = ("global_step", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "epoch", "tokens")
SIZES = ("micro_batch_size", "global_batch_size", "gradient_accumulation_steps")


@pytest.mark.parametrize("name", ["schema_version", *COUNTS, *SIZES])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("10", r'"10" \(text\)'),
        (10.0, r"10\.0 \(a float\)"),
        (True, r"true \(a boolean\)"),
        (-1, r"-1 \(a whole number\)"),
        (1 << 63, r"9223372036854775808 \(a whole number\)"),
        ([10], "a list"),
        ({"n": 10}, "an object"),
        (math.nan, r"NaN \(a float\)"),
    ],
    ids=repr,
)
def test_s03_counts_are_whole_numbers_and_nothing_else(name: str, value: Any, found: str) -> None:
    with pytest.raises(TrainerStateError, match=rf"trainer_state\.json: {name}: expected a whole .*, found {found}"):
        load({**document(), name: value})
    with pytest.raises(TrainerStateError, match=rf"to be written: {name}: expected a whole number"):
        dumps(dataclasses.replace(FULL, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("global_step", None, "global_step: expected a whole number of at least 0, found null"),
        ("micro_batch_size", 0, "micro_batch_size: expected a whole number of at least 1, found 0"),
        ("seed", 1.5, "seed: expected a whole number"),
        ("flops", "many", r'flops: expected a number, found "many" \(text\)'),
        ("flops", -1.0, "flops: expected a finite number of at least 0"),
        ("flops", math.inf, "flops: expected a finite number of at least 0"),
        ("best_metric", True, "best_metric: expected a number, found true"),
        ("finished", 1, "finished: expected true or false, found 1"),
        ("finished", None, "finished: expected true or false, found null"),
        ("healthy", "yes", "healthy: expected true or false"),
        ("data", ["train"], "data: expected an object, found a list"),
        ("data", {"train": [1]}, r"data\.train: expected an object, found a list"),
        ("versions", {"torch": 2.13}, r"versions\.torch: expected text, found 2\.13"),
        ("lineage", {"attempt": 1}, "lineage: expected a list of objects, found an object"),
        ("lineage", [{}, 3], r"lineage\[1\]: expected an object, found 3"),
        ("topology", {"tp": 2}, "topology lacks pp, dp"),
        ("topology", {**Topology(2, 2, 2).to_json(), "dp": "2"}, "topology: dp must be a whole number"),
        ("extra", 5, "extra: expected an object, found 5"),
    ],
)
def test_s03_each_wrong_type_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(TrainerStateError, match=rf"root/step-00001200/trainer_state\.json: {message}"):
        load({**document(), name: value})


# ---- hostile bytes


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 200_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    bomb = (
        json.dumps(document(SMALL))
        .encode()
        .replace(b'"extra": {}', b'"extra": {"a": ' + b"[" * depth + b"]" * depth + b"}")
    )
    with pytest.raises(TrainerStateError, match="expected at most 64 levels of nesting, found more"):
        load(bomb)


def test_nesting_that_was_written_can_be_read() -> None:
    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else math.inf

    deepest = dataclasses.replace(SMALL, extra={"a": nested(MAX_DEPTH - 2)})
    assert load(dumps(deepest)) == deepest
    endless: list[Any] = []
    endless.append(endless)
    for value in (nested(MAX_DEPTH - 1), endless):
        with pytest.raises(TrainerStateError, match=r"extra\.a\[0\].*: expected at most 64 levels of nesting"):
            dumps(dataclasses.replace(SMALL, extra={"a": value}))


def test_oversize_is_refused_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trainer_state.json"
    with path.open("wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    with pytest.raises(TrainerStateError, match=f"{path}: expected at most 16777216 bytes, found more"):
        read(path)
    with pytest.raises(TrainerStateError, match="keep `extra` small"):
        dumps(dataclasses.replace(SMALL, extra={"log": "x" * MAX_BYTES}))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_altered_bytes_are_read_or_refused_by_name(data: st.DataObject) -> None:
    good = dumps(FULL)
    start = data.draw(st.integers(0, len(good) - 1))
    end = data.draw(st.integers(start, min(len(good), start + 8)))
    altered = good[:start] + data.draw(st.binary(max_size=8)) + good[end:]
    try:
        state = load(altered)
    except TrainerStateError as error:
        assert str(error).startswith("root/step-00001200/trainer_state.json: ")
    else:
        assert dumps(load(dumps(state))) == dumps(state)


# ---- S01, files


def test_s01_a_directory_without_a_trainer_state_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "tp00-pp00-dp00.safetensors").touch()
    with pytest.raises(TrainerStateError, match=rf"{tmp_path} is not a checkpoint to resume from; .*weights_only=True"):
        read(tmp_path / "trainer_state.json")


def test_what_is_not_a_regular_file_is_refused_without_hanging(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "directory"):
        with pytest.raises(TrainerStateError, match=f"{name}: expected a regular file"):
            read(tmp_path / name)


# ---- S08: one encoding


def test_s08_text_is_utf8_under_any_locale(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    code = (
        "import sys; from megaresume.state.trainer_state import *;"
        "state = TrainerState(global_step=1, consumed_train_samples=2, extra={'run': 'na\\u00efve-\\u6a21\\u578b'});"
        "open(sys.argv[1], 'wb').write(dumps(state)); assert read(sys.argv[1]) == state"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=environment)
    assert "naïve-模型".encode() in path.read_bytes()
    assert read(path).extra == {"run": "naïve-模型"}


def test_s08_a_byte_order_mark_is_accepted() -> None:
    assert load(b"\xef\xbb\xbf" + dumps(FULL)) == FULL


def test_s08_other_encodings_are_refused_with_path_and_offset() -> None:
    text = dumps(FULL).decode()
    latin = text.replace("模型", "é").encode("latin-1")
    utf16 = text.encode("utf-16")
    bare16 = text.encode("utf-16-le")
    for data, offset in ((latin, latin.index(b"\xef")), (utf16, 0), (bare16, 1), (text.encode("gbk", "replace"), None)):
        where = rf"byte {offset}" if offset is not None else r"byte \d+"
        with pytest.raises(TrainerStateError, match=rf"trainer_state\.json: {where}: expected UTF-8 text.*convert it"):
            load(data)
    with pytest.raises(TrainerStateError, match="byte 5: expected UTF-8 text, found the byte 0xff"):
        load(b"\xef\xbb\xbf{ \xff}")


# ---- S11: values that JSON has no type for


def test_s11_numbers_and_paths_are_written_exactly() -> None:
    extra = {
        "steps": np.int64(2**62 + 1),
        "unsigned": np.uint64(2**64 - 1),
        "loss": np.float32(0.1),
        "double": np.float64(0.1),
        "flag": np.bool_(True),
        "array": np.array(7),
        "scale": torch.tensor(65536.0),
        "half": torch.tensor(0.1, dtype=torch.bfloat16),
        "count": torch.tensor(5),
        "on": torch.tensor(False),
        "bad": np.float32("nan"),
        "root": PurePosixPath("/data/naïve"),
        "nested": [{"deep": (np.int32(3), Path("a/b"))}],
        "ordered": OrderedDict(b=1, a=2),
    }
    back = load(dumps(dataclasses.replace(SMALL, global_step=np.int64(7), extra=extra)))  # type: ignore[arg-type]
    assert back.global_step == 7 and type(back.global_step) is int
    assert back.extra["steps"] == 2**62 + 1 and back.extra["unsigned"] == 2**64 - 1
    assert back.extra["loss"] == float(np.float32(0.1)) != 0.1
    assert back.extra["double"] == 0.1
    assert back.extra["half"] == torch.tensor(0.1, dtype=torch.bfloat16).item()
    assert (back.extra["flag"], back.extra["on"]) == (True, False)
    assert (back.extra["array"], back.extra["count"], back.extra["scale"]) == (7, 5, 65536.0)
    assert math.isnan(back.extra["bad"])
    assert back.extra["root"] == "/data/naïve"
    assert back.extra["nested"] == [{"deep": [3, "a/b"]}]
    assert list(back.extra["ordered"]) == ["b", "a"]
    assert {type(value) for value in back.extra.values()} == {int, float, bool, str, list, dict}


@dataclasses.dataclass
class Settings:
    width: int = 3


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        Settings(),
        b"bytes",
        bytearray(b"bytes"),
        1j,
        object(),
        np.array([1]),
        np.array([1.0])[0:1],
        np.datetime64("2026-01-01T00:00:00.000000001", "ns"),
        np.complex64(1),
        np.longdouble(1) / 3,
        torch.tensor([65536.0]),
        torch.tensor(1j),
        torch.empty((), device="meta"),
        10**4300,
        "\ud800",
        Path(os.fsdecode(b"\xff")),
        {3: "three"},
        {"\ud800": 1},
        range(3),
    ],
    ids=lambda value: f"{type(value).__module__}.{type(value).__name__}",
)
def test_s11_other_types_are_refused_by_key_path(value: Any) -> None:
    with pytest.raises(TrainerStateError, match=r"to be written: extra\.runs\[1\]\.cfg: expected .*, found"):
        dumps(dataclasses.replace(SMALL, extra={"runs": [{}, {"cfg": value}]}))


def test_s11_sections_are_held_to_the_same_types() -> None:
    with pytest.raises(TrainerStateError, match=r"scheduler\.milestones: expected .*, found set"):
        dumps(dataclasses.replace(SMALL, scheduler={"milestones": {10, 20}}))  # type: ignore[dict-item]


# ---- S13


def test_s13_a_finished_run_can_be_told_from_one_that_stopped() -> None:
    assert [load(dumps(dataclasses.replace(FULL, finished=value))).finished for value in (True, False)] == [True, False]
