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

__version__ = "0.1.0"

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
    "backends",
    "crc32c",
    "empty",
]
