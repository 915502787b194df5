"""Adapters' names on disk and in parameters' names: reversible, apart on every file system, never outside."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaresume.adapters.naming import MAX_ENCODED, decode_name, encode_name
from megaresume.errors import ConfigurationError

NAMES = [
    "org/name-v1.5",
    "../up",
    "..",
    ".",
    "A",
    "a",
    "x y",
    "日本語",
    "con",
    "type",
    "%61",
    "a%2fb",
    "\n",
    "a\u0301",
    "á",
]


def test_l04_names_are_kept_apart_and_inside(tmp_path: Path) -> None:
    encoded = [encode_name(name) for name in NAMES]
    assert [decode_name(each) for each in encoded] == NAMES
    assert len({each.lower() for each in encoded}) == len(NAMES), "two would be one directory where case is ignored"
    for each in encoded:
        assert (tmp_path / each).parent == tmp_path and (tmp_path / each).resolve().parent == tmp_path
        assert "." not in each, "a dot ends a part of a parameter's name"


@pytest.mark.parametrize("name", ["", "a" * (MAX_ENCODED + 1), "é" * 40, "\ud800", None, 3])
def test_l04_other_names_are_refused_by_the_rule(name: object) -> None:
    with pytest.raises(ConfigurationError, match="a name is text of at least one character"):
        encode_name(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", ["A", "%2F", "%zz", "%", "a.b", "", "%61", "%ff", "a b", ".trash-1"])
def test_what_is_no_encoded_name_is_nobodys(entry: str) -> None:
    assert decode_name(entry) is None


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=16))
def test_every_name_comes_back(name: str) -> None:
    assert decode_name(encode_name(name)) == name
