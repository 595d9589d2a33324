"""New states for a model, written to their tiers behind the back of whoever makes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from zero3.unit import Unit

from . import unit_states
from .buffer_ring import BufferRing
from .offload_engine import OffloadEngine
from .tiers import Wait
from .tiers.nvme import PIECE


class TierFill:
    """Takes states piece by piece. A context manager: at its end all are on their tiers.

    OSError from the drive surfaces at a later piece or at the end.
    """

    def __init__(self, engine: OffloadEngine, units: Iterable[Unit]):
        """`units`: all that will be filled."""
        self._engine = engine
        self._ring = BufferRing(engine, max(map(_largest_part, units), default=0), "filling a model's states")
        self._writing: deque[tuple[Wait, Tensor]] = deque()

    def __enter__(self) -> TierFill:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            while self._writing and failed is None:
                self._end_write()
        finally:
            for wait, _buffer in self._writing:
                wait.settle()
            self._writing.clear()
            self._ring.close()

    @contextmanager
    def part(self, unit: Unit, kind: str, dtype: torch.dtype, start: int, stop: int) -> Iterator[Tensor]:
        """(stop - start,) elements to be filled inside the block: [start, stop) of a kind of state."""
        with self.parts(unit, {kind: dtype}, start, stop) as parts:
            yield parts[kind]

    @contextmanager
    def parts(self, unit: Unit, kinds: Mapping[str, torch.dtype], start: int, stop: int) -> Iterator[dict[str, Tensor]]:
        """The same of several kinds at once, at most two: as many buffers as there are for sure."""
        while len(self._ring.free) < len(kinds):
            self._end_write()
        buffers = {kind: self._ring.free.popleft() for kind in kinds}
        parts = {kind: buffers[kind][: (stop - start) * dtype.itemsize].view(dtype) for kind, dtype in kinds.items()}
        yield parts
        engine = self._engine
        engine.before_change(unit)
        for kind, elements in parts.items():
            wait = engine.tier(unit, kind).start_write(engine.key(unit, kind), elements, start)
            self._writing.append((wait, buffers[kind]))

    def _end_write(self) -> None:
        wait, buffer = self._writing[0]
        wait()
        self._writing.popleft()
        self._ring.free.append(buffer)


def _largest_part(unit: Unit) -> int:
    """Bytes of the longest piece of the widest kind of a unit's states."""
    widest = max(dtype.itemsize for dtype in unit_states.update_kinds(unit.dtype).values())
    return min(PIECE, unit.shard_numel) * widest
