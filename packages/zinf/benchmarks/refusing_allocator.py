"""Memory without long stretches: an allocator that answers ENOMEM above so many bytes (refusing_allocator.c)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


@contextmanager
def preloaded() -> Iterator[dict[str, str]]:
    """The environment of a process that has it; compiled on the way. CalledProcessError where that does not work."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "refusing_allocator.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(_SOURCE), "-o", str(library), "-ldl"], check=True)
        yield {**os.environ, "LD_PRELOAD": str(library)}


def refuse_above(nbytes: int) -> None:
    """In this process, which runs with it, from now on; 0: nothing is refused."""
    set_limit = ctypes.CDLL(None).refuse_above
    set_limit.argtypes = [ctypes.c_size_t]
    set_limit.restype = None
    set_limit(nbytes)
