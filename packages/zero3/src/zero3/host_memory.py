"""Give freed host memory back to the system while a model is built.

Full parameters are freed between shards that stay. glibc cannot put the next aligned block of the same size into
such a hole, so without this the heap would grow by every full parameter (measured: to twice the shards).
"""

from __future__ import annotations

import ctypes

# Trimming walks the whole heap; worth it once this much has been freed.
_TRIM_EVERY_NBYTES = 16 << 20


class HeapTrimmer:
    """Counts what is freed and trims the heap now and then. Without glibc it does nothing."""

    def __init__(self) -> None:
        self._freed_nbytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def freed(self, nbytes: int) -> None:
        """`nbytes` of host memory were freed."""
        self._freed_nbytes += nbytes
        if self._trim is not None and self._freed_nbytes >= _TRIM_EVERY_NBYTES:
            self._freed_nbytes = 0
            self._trim(0)
