"""A rank's shards, copied from their tiers into a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

import deepnvme
from zero3.bandwidth_centric import round_up
from zero3.unit import Unit

from . import checkpoint_format as layout
from .checkpoint_format import DTYPES, KindRecord, UnitRecord
from .offload_engine import OffloadEngine, pieces
from .ring_copy import Copy, RingCopy
from .tiers import Wait

Checksums = dict[str, list[int]]
"""Of one unit: kind -> one for each piece."""


@dataclass(frozen=True)
class _Part:
    """Elements [start, stop) of one kind of a unit's shard."""

    unit: Unit
    kind: str
    record: KindRecord
    start: int
    stop: int
    closes: bool  # the last part of what was asked for together

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * DTYPES[self.record.dtype].itemsize

    @property
    def file_offset(self) -> int:
        return self.record.file_offset + self.start * DTYPES[self.record.dtype].itemsize


class ShardCopy:
    """Copies units' shards to where their records say.

    One thread at a time may use it; `close` is for the thread that made it, since the buffers are the pool's.
    OSError from the drive surfaces in `copy` or `finish`.
    """

    def __init__(self, engine: OffloadEngine, path: Path, units: Sequence[Unit], records: Sequence[UnitRecord]):
        self._engine = engine
        self._records = dict(zip(units, records, strict=True))
        # Of each piece in turn: its checksum, or the write that takes it.
        self._sums: dict[Unit, dict[str, list[int | deepnvme.Request]]] = {
            unit: {kind: [] for kind in self._records[unit].kinds} for unit in units
        }
        self._ring = RingCopy.for_pieces(engine, units, "copying to a checkpoint")
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
        self._ring.run(self._copies(wanted, arrived))

    def finish(self) -> list[Checksums]:
        """Everything is on the drive, durably; the checksums, in the order of the units."""
        self._io.flush()
        self._io.sync(self._file)
        return [{kind: [_known(one) for one in sums] for kind, sums in unit.items()} for unit in self._sums.values()]

    def close(self) -> None:
        """Let go of file and buffers. Harmless when done twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # further failures of what has failed already; after `finish` there are none
            self._io.close()
        self._ring.close()
        self._file.close()

    def _copies(self, wanted: Iterable[tuple[Unit, Sequence[str]]], arrived: Callable[[Unit], None]) -> Iterator[Copy]:
        for unit, kinds in wanted:
            ranges = list(pieces(unit.shard_numel))
            for kind in kinds:
                record = self._records[unit].kinds[kind]
                for start, stop in ranges:
                    closes = kind == kinds[-1] and stop == unit.shard_numel
                    yield self._copy(_Part(unit, kind, record, start, stop, closes), arrived)
            if not kinds:
                arrived(unit)

    def _copy(self, part: _Part, arrived: Callable[[Unit], None]) -> Copy:
        engine, unit = self._engine, part.unit
        tier, key, dtype = engine.tier(unit, part.kind), engine.key(unit, part.kind), DTYPES[part.record.dtype]

        def write(buffers: Sequence[Tensor], read: Wait) -> Wait:
            if part.closes:
                arrived(unit)
            return self._start_write(part, buffers[0], read.crc32c)

        return Copy([part.nbytes], lambda buffers: tier.start_read(key, buffers[0].view(dtype), part.start), write)

    def _start_write(self, part: _Part, content: Tensor, crc32c: int | None) -> Wait:
        """`crc32c`: of `content`, where the tier has taken it on the way."""
        request = self._io.write(self._file, content, part.file_offset, checksum=crc32c is None)
        self._sums[part.unit][part.kind].append(request if crc32c is None else crc32c)
        return Wait([request])


def _known(checksum: int | deepnvme.Request) -> int:
    if isinstance(checksum, int):
        return checksum
    taken = checksum.crc32c
    assert taken is not None
    return taken


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
