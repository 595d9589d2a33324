"""The two state machines of a unit, and the only place that moves them (DESIGN.md, section 4).

    parameters   SHARDED → READING → STAGED → GATHERING → READY → SHARDED
    gradient     NONE → ACCUMULATING → REDUCING → REDUCED (→ ACCUMULATING) → COMMITTED → NONE

A state says what memory the unit holds:

    SHARDED    only the shard, in its tier
    READING    a flat buffer, whose own slice is being filled from the tier
    STAGED     the own slice is there
    GATHERING  the other ranks' slices are on their way
    READY      the flat buffer is whole, and the parameters are views of it once somebody uses the unit

After an exception any state of the parameters goes to SHARDED, and the gradient to what earlier backwards left.
"""

from __future__ import annotations

from enum import Enum

from .errors import StateError


class ParamState(Enum):
    SHARDED = "SHARDED"
    READING = "READING"
    STAGED = "STAGED"
    GATHERING = "GATHERING"
    READY = "READY"

    __hash__ = object.__hash__  # Enum's own is a function in Python, and these are looked up all the time

    def __str__(self) -> str:
        return self.value


class GradState(Enum):
    NONE = "NONE"
    ACCUMULATING = "ACCUMULATING"
    REDUCING = "REDUCING"
    REDUCED = "REDUCED"
    COMMITTED = "COMMITTED"

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.value


# By these names in what runs for every unit: to look a member up in its class takes as long as a call.
SHARDED, READING, STAGED, GATHERING, READY = ParamState
NONE, ACCUMULATING, REDUCING, REDUCED, COMMITTED = GradState

_PARAM_MOVES = {
    SHARDED: {READING},
    READING: {STAGED, SHARDED},
    STAGED: {GATHERING, SHARDED},
    GATHERING: {READY, SHARDED},
    READY: {SHARDED},
}

# REDUCED → ACCUMULATING is the next micro-batch, and the second segment of a reentrant checkpoint.
# ACCUMULATING → NONE is a zero_grad() or an abort in between.
_GRAD_MOVES = {
    NONE: {ACCUMULATING},
    ACCUMULATING: {REDUCING, NONE},
    REDUCING: {REDUCED, NONE},
    REDUCED: {ACCUMULATING, COMMITTED, NONE},
    COMMITTED: {NONE},
}


def move_param(unit, target: ParamState) -> None:
    """Move the parameters' state of `unit` to `target`; StateError when that move does not exist."""
    if target not in _PARAM_MOVES[unit.state]:
        raise StateError(f"unit {unit.name}: parameters cannot go from {unit.state} to {target}")
    unit.state = target


def move_grad(unit, target: GradState) -> None:
    """Move the gradient's state of `unit` to `target`; StateError when that move does not exist."""
    if target not in _GRAD_MOVES[unit.grad_state]:
        raise StateError(f"unit {unit.name}: gradient cannot go from {unit.grad_state} to {target}")
    unit.grad_state = target


def forget_fresh(unit, reduced: bool) -> None:
    """A backward was aborted: the gradient is what earlier ones left, reduced or nothing."""
    unit.grad_state = REDUCED if reduced else NONE
