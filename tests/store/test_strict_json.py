"""Strict JSON: what is refused, and that writer and reader agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.errors import CheckpointDamagedError, ConfigurationError
from megaresume.store import strict_json

REFUSED = {
    "nothing": b"",
    "not JSON": b"{",
    "more after it": b"{} {}",
    "single quotes": b"{'a': 1}",
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "beyond a float": b'{"a": 1e999}',
    "a key twice": b'{"a": 1, "b": {"c": 1, "c": 1}}',
    "a key twice, written differently": b'{"a": 1, "\\u0061": 2}',
    "Latin-1": '{"ä": 1}'.encode("latin-1"),
    "overlong UTF-8": b'{"\xc0\xaf": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "byte order mark": '{"a": 1}'.encode("utf-8-sig"),
    "half a surrogate pair": b'{"a": "\\ud800"}',
    "half a surrogate pair as a key": b'{"\\uDC00": 1}',
    "control character": b'{"a": "\x01"}',
    "zero bytes": bytes(4096),
    "one level too deep": b"[" * 101 + b"]" * 101,
    "nested without bound": b"[" * 1_000_000,
    "nested without bound, objects": b'{"a":' * 1_000_000,
    "endless number": b"1" * 5000,
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_json(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(REFUSED[what])
    with pytest.raises(CheckpointDamagedError, match=r"x\.json"):
        strict_json.read_json_strict(path, 10_000_000)


def test_a_repeated_key_is_found_quickly_and_named() -> None:
    keys = ",".join(f'"k{number}":0' for number in range(50_000))
    with pytest.raises(CheckpointDamagedError, match="'k49999' stands twice"):
        strict_json.parse_json(f'{{{keys},"k49999":0}}'.encode(), source="x")


def test_an_endless_number_is_refused_by_interpreters_that_have_no_limit_too() -> None:
    limit = getattr(sys, "get_int_max_str_digits", lambda: 0)()
    getattr(sys, "set_int_max_str_digits", lambda _: None)(0)
    try:
        with pytest.raises(CheckpointDamagedError, match="5000 digits"):
            strict_json.parse_json(b"1" * 5000, source="x")
    finally:
        getattr(sys, "set_int_max_str_digits", lambda _: None)(limit)


def test_accepted_json() -> None:
    value = {"int": 2**127 + 1, "text": "\U0001f600 ä \x7f", "deep": json.loads("[" * 99 + "]" * 99), "float": -0.0}
    assert strict_json.parse_json(json.dumps(value).encode(), source="x") == value
    assert strict_json.parse_json(strict_json.dump_json(value), source="x") == value


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=50)
@given(value=JSON_VALUES)
def test_what_we_write_we_read(value: Any) -> None:
    try:
        data = strict_json.dump_json(value)
    except ConfigurationError as error:
        assert "surrogate" in str(error)
        return
    assert strict_json.parse_json(data, source="x") == value
    assert strict_json.parse_json(strict_json.compact_json(value).encode(), source="x") == value


@settings(deadline=None, max_examples=50)
@given(data=st.binary(max_size=300) | st.text(alphabet='{}[]",:\\ue0+-1.dD8 ', max_size=60).map(str.encode))
def test_any_bytes_are_a_value_or_named_damage(data: bytes) -> None:
    try:
        value = strict_json.parse_json(data, source="x")
    except CheckpointDamagedError:
        return
    assert strict_json.parse_json(strict_json.dump_json(value), source="x") == value, (
        "accepted, so our own writer must be able to keep it"
    )


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {"b": [1.0, float("nan")]}}, r"value\.a\.b\[1\].*nan"),
        ({"a": float("-inf")}, r"value\.a.*-inf"),
        ({"a": {1: "x"}}, r"value\.a.*keys.*1 of type int"),
        ({"a": np.int64(3)}, r"value\.a.*numpy\.int64"),
        ({"a": np.zeros(2)}, r"value\.a.*numpy\.ndarray"),
        ({"a": {1, 2}}, r"value\.a.*set"),
        ({"a": b"bytes"}, r"value\.a.*bytes"),
        ({"a": "\ud800"}, r"value\.a.*surrogate"),
        ({"\udc00": 1}, r"value.*surrogate"),
    ],
)
def test_a_value_that_is_no_json_is_refused_by_its_place(value: Any, where: str) -> None:
    for dump in (strict_json.dump_json, strict_json.compact_json):
        with pytest.raises(ConfigurationError, match=where):
            dump(value)


def test_writer_and_reader_agree_on_the_deepest_level() -> None:
    deep: Any = []
    for _ in range(strict_json.MAX_JSON_DEPTH - 1):
        deep = [deep]
    assert strict_json.parse_json(strict_json.dump_json(deep), source="x") == deep
    with pytest.raises(ConfigurationError, match="levels deep"):
        strict_json.dump_json([deep])
    with pytest.raises(ConfigurationError, match="levels deep"):
        strict_json.dump_json({"a": deep})
    with pytest.raises(CheckpointDamagedError, match="levels deep"):
        strict_json.parse_json(json.dumps([deep]).encode(), source="x")


def test_sorted_compact_json_is_one_text_for_one_value() -> None:
    one, two = {"b": {"y": 1, "x": (2, 3)}, "a": "é"}, {"a": "é", "b": {"x": [2, 3], "y": 1}}
    assert strict_json.compact_json(one, sort_keys=True) == strict_json.compact_json(two, sort_keys=True)
    assert strict_json.compact_json(one, sort_keys=True) == '{"a":"é","b":{"x":[2,3],"y":1}}'
