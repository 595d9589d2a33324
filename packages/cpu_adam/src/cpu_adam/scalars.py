"""A scalar argument as a Python number, or a TypeError that names it."""

import operator
from typing import Any

from cpu_adam import errors


def real(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise errors.not_a_number(name, value, "a number") from None


def whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise errors.not_a_number(name, value, "a whole number") from None
