"""A scalar argument as a Python number, or a TypeError that names it."""

import operator
from typing import Any

from cpu_adam import errors

_ROUNDING = 1e-12  # far above what is left of a rate of double precision, far below any that somebody means


def real(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise errors.not_a_number(name, value, "a number") from None


def scheduled_rate(value: Any) -> float:
    """A learning rate as a schedule leaves it: one that falls to 0 may end a rounding below, as torch's LinearLR."""
    rate = real("lr", value)
    return 0.0 if -_ROUNDING < rate < 0.0 else rate


def whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise errors.not_a_number(name, value, "a whole number") from None
