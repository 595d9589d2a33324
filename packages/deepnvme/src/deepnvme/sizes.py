"""Numbers as people give them: whole ones, seconds, and sizes such as 4096 or "1MiB"."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

MOST_BYTES = (1 << 63) - 1  # of a file or of memory: what the system counts with is signed
_LONGEST = 1e9  # seconds; the clocks of the system overflow soon behind it

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def parse_size(size: int | str, name: str = "size") -> int:
    """Bytes of an int or of a string with a binary unit; `name` is what a refusal calls it.

    >>> parse_size("512KiB")
    524288
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{name} {size!r} is not a size: use bytes or a binary unit, such as 4096 or '1MiB'")
        nbytes = int(match[1]) * unit if match[1].isdigit() else int(float(match[1]) * unit)
    else:
        try:
            nbytes = operator.index(size)
        except TypeError:
            raise TypeError(f"{name} must be an int or a string, not {type(size).__name__}") from None
    if nbytes < 0:
        raise ValueError(f"{name} must not be negative, found {nbytes}")
    if nbytes > MOST_BYTES:
        raise ValueError(f"{name} must be at most 2**63 - 1 bytes, found {size!r}")
    return nbytes


def format_size(nbytes: int) -> str:
    """The shortest exact way to write a size: "4MiB", "1000B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit.upper()] == 0:
            return f"{nbytes // _UNITS[unit.upper()]}{unit}"
    return f"{nbytes}B"


def waiting_time(timeout: float | None) -> float | None:
    """Seconds to wait; None, as for any number above 30 years: until it ends. TypeError, ValueError: no number."""
    if timeout is None:
        return None
    try:
        no_number = math.isnan(timeout)
    except TypeError:  # text, a sequence
        raise TypeError(f"timeout must be a number of seconds or None, found {timeout!r}") from None
    if no_number:
        raise ValueError("timeout must be a number of seconds or None, found nan")
    return timeout if timeout < _LONGEST else None


def whole_number(name: str, value: Any) -> int:
    """TypeError, which names it, for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, found {value!r}") from None
