"""What is read back is what was written: CRC-32C by the fastest instructions of this CPU."""

from __future__ import annotations

from typing import Any

from . import _core
from .arrays import describe


def crc32c(array: Any, value: int = 0) -> int:
    """The CRC-32C (Castagnoli) of an array's bytes, continuing that of earlier bytes, `value`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    host = describe(array)
    return _core.crc32c(value, host.address, host.nbytes)
