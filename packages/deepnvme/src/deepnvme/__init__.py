"""Asynchronous transfer of tensors between host memory and NVMe, at the speed of the drive."""

from __future__ import annotations

from .aligned_buffer import Buffer, empty
from .checksums import crc32c
from .engine import Engine, backends
from .errors import ChecksumError, ClosedError, ForkedError
from .file import File
from .pinned_pool import Pool
from .request import Request
from .statistics import Statistics
from .swap import Swap

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "jax":  # loaded on first access: importing jax takes longer than all of this package
        import importlib

        return importlib.import_module(".jax", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Buffer",
    "ChecksumError",
    "ClosedError",
    "Engine",
    "File",
    "ForkedError",
    "Pool",
    "Request",
    "Statistics",
    "Swap",
    "backends",
    "crc32c",
    "empty",
]
