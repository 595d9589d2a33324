"""A rank's shards, copied from their tiers into a file in pieces: read(k+1) | checksum(k) | write(k-1).

In a ring of a few buffers, so that memory stays bounded and the drive is never without a request.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import deepnvme
from zero3.bandwidth_centric import round_up
from zero3.unit import Unit

from . import checkpoint_format as layout
from .buffer_ring import BufferRing
from .checkpoint_format import DTYPES, KindRecord, UnitRecord
from .offload_engine import OffloadEngine, pieces
from .tiers import Wait

Checksums = dict[str, list[int]]
"""Of one unit: kind -> one for each piece."""


@dataclass(frozen=True)
class _Part:
    """Elements [start, stop) of one kind of a unit's shard, in a buffer."""

    unit: Unit
    kind: str
    record: KindRecord
    start: int
    elements: Tensor
    buffer: Tensor
    closes: bool  # the last part of what was asked for together

    @property
    def file_offset(self) -> int:
        return self.record.file_offset + self.start * self.elements.element_size()


class ShardCopy:
    """Copies units' shards to where their records say.

    One thread at a time may use it; `close` is for the thread that made it, since the buffers are the pool's.
    OSError from the drive surfaces in `copy` or `finish`.
    """

    def __init__(self, engine: OffloadEngine, path: Path, units: Sequence[Unit], records: Sequence[UnitRecord]):
        self._engine = engine
        self._records = dict(zip(units, records, strict=True))
        self._sums: dict[Unit, Checksums] = {unit: {kind: [] for kind in self._records[unit].kinds} for unit in units}
        self._reading: deque[tuple[_Part, Wait]] = deque()
        self._writing: deque[tuple[deepnvme.Request, Tensor]] = deque()
        largest = max((_largest_part(unit, record) for unit, record in self._records.items()), default=1)
        self._ring = BufferRing(engine, largest, "copying to a checkpoint")
        self._io = deepnvme.Engine()
        self._closed = False
        try:
            self._file = deepnvme.File(path, "w", size=file_nbytes(units, records))
        except BaseException:
            self._io.close()
            self._ring.close()
            raise

    def copy(self, wanted: Iterable[tuple[Unit, Sequence[str]]], arrived: Callable[[Unit], None]) -> None:
        """Copy kinds of units, drawn from `wanted` as there is room for them.

        `arrived(unit)`: all that was asked for of the unit is in our buffers, and it may change.
        """
        for unit, kinds in wanted:
            ranges = list(pieces(unit.shard_numel))
            for kind in kinds:
                for start, stop in ranges:
                    closes = kind == kinds[-1] and stop == unit.shard_numel
                    self._start_read(unit, kind, start, stop, closes, arrived)
            if not kinds:
                arrived(unit)
        while self._reading:
            self._start_write(arrived)
        while self._writing:
            self._end_write()

    def finish(self) -> list[Checksums]:
        """Everything is on the drive, durably; the checksums, in the order of the units."""
        self._io.flush()
        self._io.sync(self._file)
        return list(self._sums.values())

    def close(self) -> None:
        """Let go of file and buffers. Harmless when done twice."""
        if self._closed:
            return
        self._closed = True
        for _, wait in self._reading:  # after a failure: nothing may write into a buffer that is another's
            wait.settle()
        self._reading.clear()
        with contextlib.suppress(OSError):  # further failures of what has failed already; after `finish` there are none
            self._io.close()
        self._file.close()
        self._writing.clear()
        self._ring.close()

    def _start_read(
        self, unit: Unit, kind: str, start: int, stop: int, closes: bool, arrived: Callable[[Unit], None]
    ) -> None:
        while not self._ring.free:
            if self._reading and (not self._writing or self._reading[0][1].done()):
                self._start_write(arrived)
            else:
                self._end_write()
        buffer = self._ring.free.popleft()
        record = self._records[unit].kinds[kind]
        dtype = DTYPES[record.dtype]
        elements = buffer[: (stop - start) * dtype.itemsize].view(dtype)
        part = _Part(unit, kind, record, start, elements, buffer, closes)
        engine = self._engine
        self._reading.append((part, engine.tier(unit, kind).start_read(engine.key(unit, kind), elements, start)))

    def _start_write(self, arrived: Callable[[Unit], None]) -> None:
        part, wait = self._reading[0]
        wait()
        self._reading.popleft()
        if part.closes:
            arrived(part.unit)
        request = self._io.write(self._file, part.elements, part.file_offset)
        self._sums[part.unit][part.kind].append(deepnvme.crc32c(part.elements))
        self._writing.append((request, part.buffer))

    def _end_write(self) -> None:
        request, buffer = self._writing[0]
        request.wait()
        self._writing.popleft()
        self._ring.free.append(buffer)


def file_nbytes(units: Sequence[Unit], records: Sequence[UnitRecord]) -> int:
    """Length of a rank's file."""
    return max(
        (
            round_up(kind.file_offset + unit.shard_numel * DTYPES[kind.dtype].itemsize, layout.ALIGNMENT)
            for unit, record in zip(units, records, strict=True)
            for kind in record.kinds.values()
        ),
        default=0,
    )


def _largest_part(unit: Unit, record: UnitRecord) -> int:
    """Bytes."""
    longest = next((stop - start for start, stop in pieces(unit.shard_numel)), 0)
    return longest * max(DTYPES[kind.dtype].itemsize for kind in record.kinds.values())
