"""The form of a shard file's logical index, held against bytes that may come from anywhere.

Everything after this check may rely on the containers and types, and on names and file agreeing; whether the values
are this run's is asked elsewhere. The form is specified in `docs/on-disk-format.md`. Knows no live object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from megaresume.errors import FormatError
from megaresume.store.strict_json import Misplaced

INDEX_VERSION = 1

# Takes a value; raises Misplaced unless it is of the form.
Check: TypeAlias = Callable[[Any], None]


def check_index(index: Mapping[str, Any], spans: Mapping[str, Any]) -> None:
    """Raise FormatError naming the field unless `index` is of this version's form and names the tensors of `spans`.

    `spans` are the tensors that the file holds, by name. What a live object once gave (options, extra states, values of
    registered objects) is any JSON here.
    """
    version = index.get("version")
    if type(version) is not int or version != INDEX_VERSION:
        raise FormatError(f"the index is of version {version!r}, this release reads version {INDEX_VERSION}")
    try:
        _INDEX(index)
    except Misplaced as error:
        raise FormatError(f"the index{error.where}: {error.reason}") from None
    listed = index["tensors"]
    stored = {name for name, entry in listed.items() if entry["kind"] == "stored"}
    for name in sorted(stored - spans.keys()):
        raise FormatError(f"the index names tensor {name}, which the file does not hold")
    for name in sorted(spans.keys() - stored):
        why = "does not name" if name not in listed else f"calls {listed[name]['kind']}"
        raise FormatError(f"the file holds tensor {name}, which the index {why}")
    for name, entry in listed.items():
        if entry["kind"] == "derived":
            _check_derived(name, entry, listed, spans)


def _check_derived(name: str, entry: Mapping[str, Any], listed: Mapping[str, Any], spans: Mapping[str, Any]) -> None:
    master = listed.get(entry["from"])
    if (
        master is None
        or master["kind"] != "stored"
        or (master["parameter"], master["slot"], entry["slot"]) != (entry["parameter"], "master", "weight")
        or spans[entry["from"]].dtype != "F32"
    ):
        raise FormatError(f"the index derives {name} from {entry['from']!r}, which is no stored master of that weight")
    if spans[entry["from"]].begin % 4:
        raise FormatError(
            f"the index derives {name} from {entry['from']!r}, which does not lie at a multiple of 4 bytes"
        )
    at, master_at = entry["range"], master["range"]
    if at is None or master_at is None or not master_at[0] <= at[0] <= at[1] <= master_at[1]:
        raise FormatError(f"the index derives {name}, elements {at}, from a master that has the elements {master_at}")


def _wrong(expected: str, found: Any) -> Misplaced:
    return Misplaced(f"expected {expected}, found {str(found)[:80]!r}")


def _anything(value: Any) -> None:
    pass


def _text(value: Any) -> None:
    if type(value) is not str:
        raise _wrong("text", value)


def _one_of(*choices: str) -> Check:
    def check(value: Any) -> None:
        if value not in choices:
            raise _wrong(" or ".join(choices), value)

    return check


def _count(value: Any) -> None:
    if type(value) is not int or value < 0:
        raise _wrong("a whole number, not negative", value)


def _range(value: Any) -> None:
    if type(value) is not list or len(value) != 2 or type(value[0]) is not int or type(value[1]) is not int:
        raise _wrong("[start, end)", value)
    if not 0 <= value[0] <= value[1]:
        raise _wrong("0 <= start <= end", value)


def _or_null(check: Check) -> Check:
    def check_unless_null(value: Any) -> None:
        if value is not None:
            check(value)

    return check_unless_null


def _list_of(check: Check) -> Check:
    def check_list(value: Any) -> None:
        if type(value) is not list:
            raise _wrong("a list", value)
        for number, part in enumerate(value):
            try:
                check(part)
            except Misplaced as error:
                raise error.within(f"[{number}]") from None

    return check_list


def _object_of(check: Check) -> Check:
    def check_object(value: Any) -> None:
        if type(value) is not dict:
            raise _wrong("an object", value)
        for name, part in value.items():
            try:
                check(part)
            except Misplaced as error:
                raise error.within(f": {name}") from None

    return check_object


def _record(optional: Mapping[str, Check] | None = None, **fields: Check) -> Check:
    """An object that has these fields, and perhaps the optional ones; others are left unread."""
    known = [(name, check, False) for name, check in fields.items()]
    known += [(name, check, True) for name, check in (optional or {}).items()]

    def check_record(value: Any) -> None:
        if type(value) is not dict:
            raise _wrong("an object", value)
        for name, check, may_be_missing in known:
            if name in value:
                try:
                    check(value[name])
                except Misplaced as error:
                    raise error.within(f": {name}") from None
            elif not may_be_missing:
                raise Misplaced(f"{name} is missing")

    return check_record


_TEXTS = _list_of(_text)


def _distinct(value: Any) -> None:
    _TEXTS(value)
    if len(set(value)) != len(value):
        raise _wrong("each name once", value)


_PLACE = _one_of("host", "parameter")
_PLACES = {"places": _object_of(_PLACE)}
_TENSOR_SLOT = _record(tensor=_text, place=_PLACE)
_VALUE_SLOT = _record(_PLACES, value=_anything)
_TENSOR_VALUE = _record(tensor=_anything, dtype=_text)
_VALUE = _record(value=_anything)


def _slot(value: Any) -> None:
    (_TENSOR_SLOT if type(value) is dict and "tensor" in value else _VALUE_SLOT)(value)


def _scaler_value(value: Any) -> None:
    (_TENSOR_VALUE if type(value) is dict and "tensor" in value else _VALUE)(value)


_MEMBER = _record(parameter=_text, range=_range, state=_object_of(_object_of(_slot)))
_GROUP = _record(_PLACES, options=_object_of(_anything), members=_list_of(_MEMBER))
_OPTIMIZER = _record(kind=_text, groups=_list_of(_GROUP), scaler=_or_null(_object_of(_scaler_value)))
_PLACE_BEFORE = _record(step=_count, attempt=_count, file=_text, tensor=_text)
_LISTED: dict[str, Check] = {"parameter": _or_null(_text), "slot": _text, "range": _or_null(_range)}
_KINDS = {
    "stored": _record({"digest": _text}, **_LISTED),
    "derived": _record(None, **_LISTED, **{"from": _text}),
    "referenced": _record(None, **_LISTED, digest=_text, **{"from": _PLACE_BEFORE}),
}


_KIND = _record(kind=_one_of(*_KINDS))


def _tensor(value: Any) -> None:
    _KIND(value)
    _KINDS[value["kind"]](value)


_INDEX = _record(
    parameters=_object_of(_object_of(_anything)),
    tensors=_object_of(_tensor),
    buffers=_distinct,
    extra_states=_object_of(_anything),
    optimizers=_list_of(_OPTIMIZER),
    rng=_or_null(_distinct),
    registered=_object_of(_anything),
)
