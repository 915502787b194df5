"""Plain state goes through JSON text and comes back as it was, and JSON from anywhere decodes or is refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.errors import FormatError, UnsupportedError
from megaresume.state.tree import MAX_DEPTH, from_json, tensor_names, to_json
from megaresume.store.strict_json import compact_json, parse_json
from tests.state.objects import frozen


def through_text(value):
    tensors: dict[str, torch.Tensor] = {}
    text = compact_json(to_json(value, "state", tensors))
    node = parse_json(text.encode(), source="test")
    assert sorted(tensor_names(node)) == sorted(tensors)
    return from_json(node, tensors)


numpy_scalars = st.one_of(
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.booleans().map(np.bool_),
)
texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts, numpy_scalars)
keys = st.one_of(scalars, st.tuples(scalars, scalars), st.just("~"), st.just("v"))
tensors = st.sampled_from([torch.tensor(0.1), torch.arange(3, dtype=torch.int32), torch.zeros(0, 2).bool()])
values = st.recursive(
    st.one_of(scalars, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=10,
)


@given(values)
@settings(max_examples=120, deadline=None)
def test_any_state_comes_back(value) -> None:
    assert frozen(through_text(value)) == frozen(value)


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 1, 5: 2}),
        torch.Size([2, 3]),
        {1: "int", "1": "text", None: 0, False: 2, (1, "a"): 3, 2.5: 4},
        {"~": "tensor", "v": "optim/0/exp_avg/w"},
        {"~": "float"},
        -0.0,
        5e-324,
        2**70,
        [float("nan"), math.inf, -math.inf],
    ],
    ids=str,
)
def test_what_json_does_not_know(value) -> None:
    assert frozen(through_text(value)) == frozen(value)


def test_paths_that_look_alike_are_kept_apart() -> None:
    state = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)}
    assert frozen(through_text(state)) == frozen(state)


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": {"b": object()}}, "state/a/b is a builtins.object"),
        ([1, {2, 3}], "state/1 is a builtins.set"),
        ({"x": b"bytes"}, "state/x is a builtins.bytes"),
        ({"x": Pair(1, 2)}, r"state/x is a tests\.state\.test_tree\.Pair"),
        ({"x": defaultdict(int)}, r"state/x is a collections\.defaultdict"),
        ({"x": np.zeros(3)}, r"state/x is a numpy\.ndarray"),
        ({"x": np.longdouble(1)}, "state/x is a numpy"),
        ({"x": np.str_("text")}, r"state/x is a numpy\.str_"),
        ({"x": 1j}, r"state/x is a builtins\.complex"),
        ({"x": torch.float32}, r"state/x is a torch\.dtype"),
        ({torch.tensor(1): 2}, "state has a tensor as a key"),
        ({(torch.tensor(1),): 2}, "state has a tensor as a key"),
    ],
)
def test_what_is_no_data_is_named(value, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        to_json(value, "state", {})


def nested(depth: int, kind) -> object:
    value: object = 1
    for _ in range(depth):
        value = kind([value])
    return value


@pytest.mark.parametrize("kind", [list, tuple, lambda items: {"a": items[0]}, lambda items: {1: items[0]}])
def test_what_is_saved_can_be_read_however_deep(kind) -> None:
    node = to_json(nested(MAX_DEPTH, kind), "state", {})
    assert from_json(node, {}) == nested(MAX_DEPTH, kind)
    with pytest.raises(UnsupportedError, match=f"deeper than {MAX_DEPTH}"):
        to_json(nested(MAX_DEPTH + 1, kind), "state", {})


def test_a_cycle_is_refused() -> None:
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(UnsupportedError, match="break its cycle"):
        to_json(cycle, "state", {})


@pytest.mark.parametrize(
    "node",
    [
        {"~": "unknown", "v": 1},
        {"~": None},
        {"~": ["tuple"], "v": []},
        {"~": "float", "v": "1e5"},
        {"~": "float", "v": [1]},
        {"~": "float"},
        {"~": "tuple", "v": {"a": 1}},
        {"~": "tuple"},
        {"~": "size", "v": ["a"]},
        {"~": "dict", "v": [[1]]},
        {"~": "dict", "v": [1]},
        {"~": "dict", "v": {"a": 1}},
        {"~": "dict", "v": [[["list"], 1]]},
        {"~": "ordered", "v": [[{"a": 1}, 1]]},
        {"~": "counter", "v": [[{"~": "tensor", "v": "here"}, 1]]},
        {"~": "tensor", "v": "not here"},
        {"~": "tensor", "v": ["here"]},
        {"~": "tensor"},
        {"~": "numpy.int8", "v": 300},
        {"~": "numpy.int8", "v": "1"},
        {"~": "numpy.float32", "v": [1.0, 2.0]},
        {"~": "numpy.ndarray", "v": 1},
        {"~": "numpy.", "v": 1},
        {"~": "builtins.eval", "v": "1"},
        json.loads("[" * 50 + "]" * 50),
        json.loads('{"a":' * 50 + "1" + "}" * 50),
    ],
    ids=lambda node: json.dumps(node)[:40],
)
def test_hostile_json_is_refused_by_name(node) -> None:
    with pytest.raises(FormatError, match="stored state"):
        from_json({"part": [node]}, {"here": torch.zeros(1)})


kinds = st.sampled_from(["dict", "ordered", "counter", "tuple", "size", "float", "tensor", "numpy.int8", 1])
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=2),
        st.fixed_dictionaries({"~": kinds, "v": inner}),
    ),
    max_leaves=12,
)


@given(json_values)
@settings(max_examples=150, deadline=None)
def test_any_json_decodes_or_is_refused(node) -> None:
    try:
        from_json(node, {})
    except FormatError:
        pass
