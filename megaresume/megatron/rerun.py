"""Megatron's rerun state machine, which re-executes suspicious steps: what of it outlives a step (checked with 0.14 and
0.16.1).

At a step boundary that is the iteration it counts and the values its spike detection compares with; the rest is of the
step under way.
"""

from __future__ import annotations

import sys
from typing import Any

from megaresume.errors import UnsupportedError

NAME = "megatron.rerun_state_machine"
_LASTING = ("current_iteration", "large_value_counts", "max_values")


class _RerunState:
    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def state_dict(self) -> dict[str, Any]:
        if self._machine.state.name != "NOT_RUNNING_YET":
            raise UnsupportedError(
                f"megatron's rerun state machine is re-running a step (state {self._machine.state.name}): save at a "
                "step boundary"
            )
        return {name: getattr(self._machine, name) for name in _LASTING}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _LASTING:
            setattr(self._machine, name, state[name])


def rerun_state() -> dict[str, Any]:
    """{name: object with state_dict and load_state_dict} of the rerun state machine where this run has one that is not
    disabled."""
    module = sys.modules.get("megatron.core.rerun_state_machine")
    machine = None if module is None else module._GLOBAL_RERUN_STATE_MACHINE
    if machine is None or machine.mode.value == "disabled":
        return {}
    return {NAME: _RerunState(machine)}
