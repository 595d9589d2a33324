"""The counters that Engine.stats() returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Statistics:
    """Since the engine was made. Bytes are those that people asked for, not what padding added."""

    backend: str
    direct: bool | None  # of the files used so far: all with O_DIRECT; None: no file yet
    requests: int
    finished: int  # of these, whatever the outcome
    failed: int
    cancelled: int
    bytes_read: int
    bytes_written: int
    bounced_bytes: int  # of these, copied through the bounce pool, because memory or offset was not aligned
    cached_bytes: int  # of these, through the page cache: without O_DIRECT, and unaligned ends of writes
    pieces: int  # I/Os of the operating system
    resumed: int  # of these, continuations of short ones
