"""A pool of reused host memory (paper, 6.3: pinned memory management layer)."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import warnings
import weakref

from . import _core
from .aligned_buffer import Buffer
from .dtypes import dtype_named
from .errors import ClosedError
from .extents import Extents
from .in_flight import let_go_of_finished
from .sizes import format_size, parse_size, waiting_time

_WARN_AFTER = 10.0  # seconds
# Finished requests hold their arrays until someone looks; a pool that waits for such an array looks itself.
_LOOK_EVERY = 0.01  # seconds


class Pool:
    """A fixed amount of aligned host memory, on huge pages where allowed, handed out in pieces and reused.

    Memory is slow the first time it is touched and fast ever after; a pool of the size of the working set is
    touched once, whatever passes through it. Thread-safe.

    lock: keep the pages from being swapped out (mlock). `locked` says whether the locked-memory limit allowed it.
    """

    def __init__(self, capacity: int | str, *, lock: bool = False) -> None:
        self.capacity = parse_size(capacity, "capacity")
        self._extents = Extents(-(-self.capacity // 4096) * 4096)
        self._memory = _core.AlignedMemory(self.capacity)
        self.huge_pages: bool = self._memory.huge_pages
        self.locked = False
        if lock:
            self._lock_pages()
        self._turn = threading.Lock()  # held by the one thread that may take, perhaps waiting
        self._books = threading.Lock()  # guards the extents; never held while waiting
        # Ranges on their way back. A SimpleQueue may be filled from a finalizer that interrupts anything, even us.
        self._returned: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def take(self, nbytes: int | str, timeout: float | None = None) -> Buffer:
        """A uint8 Buffer of `nbytes`; its content is whatever was there before.

        Waits while the pool is too full, and warns every 10 s. It goes back to the pool by `release()`, or when it
        and all its views are garbage. ValueError: larger than the pool; TimeoutError: no room within `timeout`
        seconds.
        """
        nbytes = parse_size(nbytes, "nbytes")
        if nbytes > self.capacity:
            raise ValueError(
                f"a buffer of {format_size(nbytes)} does not fit into a pool of {format_size(self.capacity)}: "
                f"make the pool larger, or the buffer smaller"
            )
        timeout = waiting_time(timeout)
        started = time.monotonic()
        # One at a time, so that a large buffer is not starved by small ones that slip in between.
        if not self._turn.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            raise self._too_late(nbytes, timeout)
        try:
            start = self._wait_for_room(nbytes, started, timeout)
        finally:
            self._turn.release()
        return PooledBuffer(self, start, nbytes)

    @property
    def used(self) -> int:
        """Bytes handed out at present, in whole pages."""
        with self._books:
            self._collect()
            return self._extents.used

    def _wait_for_room(self, nbytes: int, started: float, timeout: float | None) -> int:
        warned_at = started
        while True:
            with self._books:
                self._collect()
                start = self._extents.allocate(nbytes) if nbytes else 0
            if start is not None:
                return start
            now = time.monotonic()
            if timeout is not None and now - started >= timeout:
                raise self._too_late(nbytes, timeout)
            if now - warned_at >= _WARN_AFTER:
                warned_at = now
                warnings.warn(
                    f"waiting for {now - started:.0f} s for a pool buffer of {format_size(nbytes)}: "
                    f"{format_size(self._extents.used)} of {format_size(self.capacity)} are in use",
                    RuntimeWarning,
                    stacklevel=3,
                )
            let_go_of_finished()
            with contextlib.suppress(queue.Empty):
                came_back = self._returned.get(timeout=_LOOK_EVERY)
                self._returned.put(came_back)  # for the next look, under the lock

    def _collect(self) -> None:
        while True:
            try:
                self._give_back(*self._returned.get_nowait())
            except queue.Empty:
                return

    def _give_back(self, start: int, nbytes: int) -> None:
        if nbytes:
            self._extents.free(start, nbytes)

    def _too_late(self, nbytes: int, timeout: float | None) -> TimeoutError:
        return TimeoutError(
            f"no room for a buffer of {format_size(nbytes)} within {timeout} s: "
            f"{format_size(self._extents.used)} of {format_size(self.capacity)} are in use"
        )

    def _lock_pages(self) -> None:
        code = self._memory.lock()
        self.locked = code == 0
        if code:
            warnings.warn(
                f"the pool of {format_size(self.capacity)} is not locked in memory ({os.strerror(code)}): "
                f"raise the locked-memory limit (ulimit -l)",
                RuntimeWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return f"deepnvme.Pool({format_size(self.capacity)!r})"


class PooledBuffer(Buffer):
    """A Buffer whose memory goes back to its Pool."""

    def __init__(self, pool: Pool, start: int, nbytes: int) -> None:
        super().__init__(pool._memory, start, (nbytes,), dtype_named("uint8"))
        self._return = weakref.finalize(self, pool._returned.put, (start, nbytes))
        self._return.atexit = False

    def release(self) -> None:
        """Gives the memory back now. Only when no transfer and no view uses it any more; again is harmless."""
        self.released = True
        self._return()

    def __enter__(self) -> PooledBuffer:
        if self.released:
            raise ClosedError("the Buffer was given back to its Pool")
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
