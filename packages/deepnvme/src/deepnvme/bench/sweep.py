"""One point of a sweep -> one record."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..aligned_buffer import Buffer, empty
from ..engine import Engine
from ..file import File
from .residency import cached_nbytes, evict

OPERATIONS = ("read", "write", "mixed")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
# A request is cut into blocks by the engine: no Python runs for a block.
_REQUEST = 64 << 20
_MIXED_REQUEST = 4 << 20  # small, so that reads and writes are with the drive at the same time


@dataclass(frozen=True)
class Point:
    """One setting of everything that a sweep varies."""

    op: str  # "read", "write" (over what was written before) or "mixed" (half of the bytes each)
    backend: str
    block_size: int  # bytes
    queue_depth: int
    threads: int | None = None  # None: the engine's default
    direct: Any = "auto"


Record = dict[str, Any]  # a Point's fields, and either what was measured or "why_not"


class Workspace:
    """A scratch file of a given size on the drive under test, written once, and buffers that were touched."""

    def __init__(self, directory: str, size: int) -> None:
        self.directory = os.path.abspath(directory)
        self.size = size
        self.path = os.path.join(self.directory, f".deepnvme-bench-{os.getpid()}")
        self.written = 0  # bytes, by everything done here
        self.buffer: Buffer = empty(min(size, _REQUEST))
        self.buffer.numpy()[:] = 0x5A  # first touch is not what is measured
        try:
            with File(self.path, "w", size=size) as file, Engine() as io:
                for offset in range(0, size, self.buffer.nbytes):
                    nbytes = min(self.buffer.nbytes, size - offset)
                    io.write(file, self.buffer.numpy()[:nbytes], offset)
                io.flush()
                io.sync(file)
            self.written += size
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if os.path.exists(self.path):
            os.unlink(self.path)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measure(space: Workspace, point: Point, seconds: float | None = None) -> Record:
    """Moves the whole file once, or again and again for so many seconds. A setting that cannot run is a record too."""
    record: Record = asdict(point)
    try:
        io = Engine(
            point.backend,
            queue_depth=point.queue_depth,
            block_size=point.block_size,
            threads=point.threads,
            direct=point.direct,
        )
    except OSError as e:
        return record | {"why_not": e.strerror}
    evict(space.path)
    record |= {"file_size": space.size, "cached_before": cached_nbytes(space.path)}
    with io, File(space.path, "r+", direct=point.direct) as file:
        cpu = _cpu_seconds()
        started = time.perf_counter()
        passes = 0
        while passes == 0 or (seconds is not None and time.perf_counter() - started < seconds):
            _submit_pass(io, file, space, point.op)
            io.flush()
            passes += 1
        elapsed = time.perf_counter() - started
        cpu = _cpu_seconds() - cpu
        stats = io.stats()
        record |= {
            "backend": io.backend,
            "direct": file.direct,
            "threads": io.threads,
            "seconds": elapsed,
            "read_bytes": stats.bytes_read,
            "written_bytes": stats.bytes_written,
            "gigabytes_per_second": (stats.bytes_read + stats.bytes_written) / 1e9 / elapsed,
            "cpu_seconds_per_gigabyte": cpu / ((stats.bytes_read + stats.bytes_written) / 1e9),
            "latency_microseconds": {
                op: {name: io.latency(op, q) * 1e6 for name, q in QUANTILES.items()}
                for op in ("read", "write")
                if point.op in (op, "mixed")
            },
        }
    space.written += stats.bytes_written
    record["cached_after"] = cached_nbytes(space.path)
    return record


def measure_steadily(space: Workspace, point: Point, seconds: float, interval: float = 0.5) -> Record:
    """`measure` with a series of rates over time: where a drive's write cache is full, the rate falls off a cliff."""
    record: Record = asdict(point)
    series: list[tuple[float, float]] = []
    with (
        Engine(point.backend, queue_depth=point.queue_depth, block_size=point.block_size, direct=point.direct) as io,
        File(space.path, "r+", direct=point.direct) as file,
    ):
        started = last = time.perf_counter()
        moved = 0
        while last - started < seconds:
            _submit_pass(io, file, space, point.op)
            io.flush()
            now = time.perf_counter()
            if now - last >= interval:
                stats = io.stats()
                total = stats.bytes_read + stats.bytes_written
                series.append((now - started, (total - moved) / 1e9 / (now - last)))
                moved, last = total, now
        stats = io.stats()
        record |= {"backend": io.backend, "direct": file.direct, "file_size": space.size}
        record |= {"series": series, "written_bytes": stats.bytes_written, "read_bytes": stats.bytes_read}
    space.written += stats.bytes_written
    return record


def _submit_pass(io: Engine, file: File, space: Workspace, op: str) -> None:
    view = space.buffer.numpy()
    step = min(view.nbytes, _MIXED_REQUEST if op == "mixed" else _REQUEST)
    for i, offset in enumerate(range(0, space.size, step)):
        part = view[: min(step, space.size - offset)]
        if op == "write" or (op == "mixed" and i % 2):
            io.write(file, part, offset)
        else:
            io.read(file, part, offset)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
