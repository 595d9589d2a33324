"""States copied piece by piece between tiers and files: read(k+1) | look(k) | write(k-1).

In a ring of a few buffers, so that memory stays bounded and the drive is never without a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from zero3.unit import Unit

from .buffer_ring import BufferRing
from .offload_engine import OffloadEngine
from .tiers import Wait
from .tiers.nvme import PIECE
from .unit_states import update_kinds

Buffers = Sequence[Tensor]


@dataclass(frozen=True)
class Copy:
    """What passes through the ring together.

    nbytes   of each of its buffers, of which there are at most two
    read     begins to fill the buffers, (nbytes,) uint8 each
    write    called when they are full, with them and with what `read` returned: looks at what arrived, and begins to
             write it
    """

    nbytes: Sequence[int]
    read: Callable[[Buffers], Wait]
    write: Callable[[Buffers, Wait], Wait]


class RingCopy:
    """Makes copies in their order.

    One thread at a time may use it; `close` is for the thread that made it, since the buffers are the pool's.
    """

    def __init__(self, engine: OffloadEngine, largest: int, user: str):
        """`largest`: bytes of the largest buffer that any copy asks for. `user`: for messages."""
        self._ring = BufferRing(engine, largest, user)
        self._reading: deque[tuple[Copy, list[Tensor], Wait]] = deque()
        self._writing: deque[tuple[list[Tensor], Wait]] = deque()

    @classmethod
    def for_pieces(cls, engine: OffloadEngine, units: Iterable[Unit], user: str) -> RingCopy:
        """Its buffers hold a piece of any kind of the shards of `units`."""
        return cls(engine, max(map(_largest_piece, units), default=0), user)

    def run(self, copies: Iterable[Copy]) -> None:
        """Draws copies as there is room for them. All were written at the end; OSError from whatever they do."""
        for copy in copies:
            while len(self._ring.free) < len(copy.nbytes):
                self._make_room()
            whole = [self._ring.free.popleft() for _ in copy.nbytes]
            self._reading.append((copy, whole, copy.read(_cut(whole, copy))))
        while self._reading:
            self._start_write()
        while self._writing:
            self._end_write()

    def close(self) -> None:
        """Wait for what is still on its way, after a failure, and let go of the buffers. Harmless when done twice."""
        for wait in [*(wait for _, _, wait in self._reading), *(wait for _, wait in self._writing)]:
            wait.settle()
        self._reading.clear()
        self._writing.clear()
        self._ring.close()

    def __enter__(self) -> RingCopy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_room(self) -> None:
        if self._reading and (not self._writing or self._reading[0][2].done()):
            self._start_write()
        else:
            self._end_write()

    def _start_write(self) -> None:
        copy, whole, arrived = self._reading[0]
        arrived()
        self._reading.popleft()
        self._writing.append((whole, copy.write(_cut(whole, copy), arrived)))

    def _end_write(self) -> None:
        whole, written = self._writing[0]
        written()
        self._writing.popleft()
        self._ring.free += whole


def _largest_piece(unit: Unit) -> int:
    """Bytes, of any kind of its states."""
    return min(PIECE, unit.shard_numel) * max(dtype.itemsize for dtype in update_kinds(unit.dtype).values())


def _cut(whole: Sequence[Tensor], copy: Copy) -> list[Tensor]:
    return [buffer[:nbytes] for buffer, nbytes in zip(whole, copy.nbytes, strict=True)]
