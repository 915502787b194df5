"""Checks of plain arguments: a count is an integer, and the message names the argument, its value and what would do.

Knows nothing of sampling.
"""

from __future__ import annotations

import operator
from typing import Any

from megaresume.errors import ConfigurationError

# Positions are int64 in numpy; 2**48 samples leave room for every sum and product made of them.
MAX_DATASET_SIZE = 2**48


def as_count(name: str, value: Any, *, minimum: int = 1) -> int:
    """`value` as an int not below `minimum`.

    Raises TypeError for what is not an integer (a bool or a float is none), ConfigurationError below `minimum`.
    """
    number = as_integer(name, value)
    if number < minimum:
        raise ConfigurationError(f"{name} must be at least {minimum}, got {number}")
    return number


def as_integer(name: str, value: Any) -> int:
    """`value` as an int of either sign; TypeError for what is not an integer (a bool or a float is none)."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    return operator.index(value)
