"""A few equal buffers of the one pinned pool, used in turn for a stream."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from zero3.bandwidth_centric import round_up

from .offload_engine import OffloadEngine

# Of all buffers together: a few pieces of float32, as many requests as keep a drive busy.
_RING_BYTES = 64 << 20
_MOST_BUFFERS = 16

# Of host_memory at most, where that is small; two buffers there must be.
_RING_PART = 1 / 8

_ALIGNMENT = 4096  # so that every buffer can be read into and written from directly


class BufferRing:
    """Buffers of at least `nbytes` each. `free`: those that nobody uses; whoever takes one puts it back."""

    def __init__(self, engine: OffloadEngine, nbytes: int, user: str):
        nbytes = round_up(max(nbytes, 1), _ALIGNMENT)
        share = min(_RING_BYTES, int(engine.placement.host_memory * _RING_PART))
        count = max(2, min(_MOST_BUFFERS, share // nbytes))
        self._pool = engine.tiers.host_pool
        # Each by itself: where a tile is all that fits into one stretch of memory, no longer one is asked for.
        self._taken = [self._pool.take(nbytes, user) for _ in range(count)]
        self.free: deque[Tensor] = deque(buffer.storage[:nbytes] for buffer in self._taken)

    def close(self) -> None:
        """To the pool again; no buffer may be in use any more."""
        self.free.clear()
        while self._taken:
            self._pool.give_back(self._taken.pop())
