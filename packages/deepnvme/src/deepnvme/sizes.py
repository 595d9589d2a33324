"""Numbers as people give them: whole ones, and sizes such as 4096 or "1MiB"."""

from __future__ import annotations

import operator
import re
from typing import Any

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
    return nbytes


def format_size(nbytes: int) -> str:
    """The shortest exact way to write a size: "4MiB", "1000B"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit.upper()] == 0:
            return f"{nbytes // _UNITS[unit.upper()]}{unit}"
    return f"{nbytes}B"


def whole_number(name: str, value: Any) -> int:
    """TypeError, which names it, for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, found {value!r}") from None
