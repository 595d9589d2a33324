"""Swap: named tensors on NVMe, with dtype and shape kept."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _core
from .aligned_buffer import empty
from .arrays import describe, describe_writable, dtype_and_shape, made_contiguous
from .dtypes import DType
from .engine import Engine
from .errors import ChecksumError, ClosedError, io_error
from .extents import Extents
from .file import File, PathLike
from .request import Request
from .sizes import format_size, parse_size, whole_number

_GROW_BY = 256 << 20  # bytes reserved ahead when the space grows: reserving little by little scatters it


@dataclass
class _Stored:
    """A tensor's place. Its bytes are those of `put`, once that has succeeded."""

    start: int
    room: int  # bytes of the extent, at least nbytes
    nbytes: int
    dtype: DType
    shape: tuple[int, ...]
    put: _core.Request
    crc32c: int | None = None  # where it was known; else `put` takes it, if the Swap has checksums
    gets: list[_core.Request] = field(default_factory=list)  # perhaps still under way

    def checksum(self) -> int:
        return self.put.crc() if self.crc32c is None else self.crc32c

    def users(self) -> list[_core.Request]:
        self.gets = [get for get in self.gets if not get.done()]
        return [*self.gets, self.put]


class Swap:
    """Tensors by name in private space on one drive or striped over several.

    dirs: a directory, or a sequence of them, one a drive. The space is anonymous or mode 0600, and gone after
        `close` and after a crash.
    capacity: bytes reserved at once; None: the space grows as needed. ENOSPC when it or the drive is full.
    checksum: a crc32c of every tensor is taken while it is written and compared when it is read.
    engine: an Engine to share; otherwise the Swap has one of its own.

    Operations on one name take effect in the order of the calls, operations on different names in any order. Space
    is overwritten and never given back before `close`: what a drive has written once it writes faster again. Any
    thread may use it.
    """

    def __init__(
        self,
        dirs: PathLike | Sequence[PathLike],
        capacity: int | str | None = None,
        checksum: bool = True,
        *,
        stripe: int | str = "1MiB",
        engine: Engine | None = None,
    ) -> None:
        nbytes = None if capacity is None else parse_size(capacity, "capacity")
        self._checksum = checksum
        self._lock = threading.RLock()
        self._stored: dict[str, _Stored] = {}
        self._extents = Extents(None if nbytes is None else -(-nbytes // 4096) * 4096)
        self._leaving: list[_Stored] = []  # popped or replaced, but still being read or written
        self._file = File.anonymous(dirs, size=self._extents.capacity, stripe=stripe)
        self._reserved = self._extents.capacity or 0
        self._owns_engine = engine is None
        self._engine = Engine() if engine is None else engine

    def put(self, name: str, array: Any, *, crc32c: int | None = None) -> Request:
        """Starts storing an array under a name, in place of what was there.

        The array must not change until the request has ended. One that is not contiguous is copied first. OSError
        (ENOSPC): no room; what the name held before is still there. A put that fails later leaves nothing there.
        `crc32c`: of the array's bytes, from whoever had them before. It is believed, and `get` compares with it: bytes
        that were damaged on their way here are found too, and none is taken again.
        """
        if crc32c is not None and not 0 <= whole_number("crc32c", crc32c) < 1 << 32:
            raise ValueError(f"crc32c must have 32 bits, found {crc32c}")
        array = made_contiguous(array)
        dtype, shape = dtype_and_shape(array)
        nbytes = describe(array).nbytes
        with self._turn():
            old = self._stored.get(name)
            in_place = old is not None and nbytes <= old.room < 2 * max(nbytes, self._extents.unit)
            if old is not None and in_place:
                start, room, after = old.start, old.room, old.users()
            else:
                start, room, after = self._allocate(name, nbytes), self._extents.rounded(nbytes), []
            try:
                request = self._engine._submit(
                    True, self._file, array, start, self._checksum and crc32c is None, [(user, False) for user in after]
                )
            except BaseException:
                if not in_place:
                    self._free(start, room)
                raise
            self._stored[name] = _Stored(start, room, nbytes, dtype, shape, request._core, crc32c)
            if old is not None and not in_place:
                self._leaving.append(old)
            return request if crc32c is None else Request(self._engine, request._core, lambda: crc32c)

    def get(self, name: str, out: Any = None) -> Request:
        """Starts reading a tensor; `result()` is a Buffer of its dtype and shape, or `out`, filled.

        `out`: a contiguous array of as many bytes, whatever its dtype. KeyError: no such tensor. The request raises
        ChecksumError (an OSError) when the bytes are not those that were put.
        """
        with self._turn():
            stored = self._find(name)
            array = empty(stored.shape, stored.dtype.name) if out is None else out
            nbytes = describe_writable(array).nbytes
            if nbytes != stored.nbytes:
                raise ValueError(f"tensor {name!r} has {stored.nbytes} bytes, `out` has {nbytes}")
            request = self._engine._submit(
                False, self._file, array, stored.start, self._checksum, [(stored.put, True)]
            )
            stored.gets = [*(get for get in stored.gets if not get.done()), request._core]
        start, path = stored.start, self.path

        def outcome(done: _core.Request) -> Any:
            if self._checksum and done.crc() != stored.checksum():
                raise ChecksumError(name, str(path), start, nbytes, stored.checksum(), done.crc())
            return array

        return Request(self._engine, request._core, stored.checksum if self._checksum else None, outcome)

    def pop(self, name: str) -> None:
        """Forgets a tensor; its room is used again. Reads that were started before are completed. KeyError."""
        with self._turn():
            self._find(name)
            self._leaving.append(self._stored.pop(name))

    def names(self) -> list[str]:
        """Of the stored tensors, in the order in which they were first put."""
        with self._lock:
            self._drop_failed()
            return list(self._stored)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            self._drop_failed()
            return name in self._stored

    def __len__(self) -> int:
        return len(self.names())

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        with self._lock:
            self._drop_failed()
            return sum(stored.nbytes for stored in self._stored.values())

    @property
    def path(self) -> str | tuple[str, ...]:
        """Where this process can open the space, which has no name of its own; a tuple for several drives."""
        fds = self._file._open_core().filenos()
        paths = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in fds)
        return paths[0] if len(paths) == 1 else paths

    def close(self) -> None:
        """Waits for what is under way; then tensors and space are gone. In a forked child they stay the parent's."""
        if self._engine.forked:
            self._file.close()  # nothing under way there ends here
            return
        with self._lock:
            if self._file.closed:
                return
            for stored in [*self._stored.values(), *self._leaving]:
                for user in stored.users():
                    self._engine._core.wait(user, None)
            self._stored.clear()
            self._leaving.clear()
            self._file.close()
        if self._owns_engine:
            # A put that failed unheard matters no more: its tensor would be gone now anyway.
            self._engine._in_flight.let_go()
            self._engine._in_flight.take_failures()
            self._engine.close()

    def __enter__(self) -> Swap:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"deepnvme.Swap({', '.join(self._file.paths)!r}, {len(self._stored)} tensors)"

    # -- room; all under the lock ----------------------------------------------------------------------------------

    def _allocate(self, name: str, nbytes: int) -> int:
        if nbytes == 0:
            return 0
        self._collect_left()
        try:
            return self._take(name, nbytes)
        except OSError:
            if not self._leaving:
                raise
        for stored in self._leaving:  # their room comes free
            for user in stored.users():
                self._engine._core.wait(user, None)
        self._collect_left()
        return self._take(name, nbytes)

    def _take(self, name: str, nbytes: int) -> int:
        end = self._extents.end
        start = self._extents.allocate(nbytes)
        if start is None:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: tensor {name!r} of {nbytes} bytes does not fit into a Swap of "
                f"{format_size(self._extents.capacity or 0)}, of which {self._extents.used} bytes are in use",
                ", ".join(self._file.paths),
            )
        try:
            self._reserve_up_to(self._extents.end)
        except OSError:
            self._extents.free(start, nbytes)
            self._extents.shrink(end)  # or what is stored next might get this room, which the drive has not
            raise
        return start

    def _reserve_up_to(self, end: int) -> None:
        if end <= self._reserved:
            return
        core = self._file._open_core()
        ahead = max(end, self._reserved + _GROW_BY)
        if core.reserve(ahead) is None:
            self._reserved = ahead
            return
        failure = core.reserve(end)  # room for this one may be left, if not for more
        if failure:
            raise io_error(*failure)
        self._reserved = end

    def _free(self, start: int, room: int) -> None:
        if room:
            self._extents.free(start, room)

    def _collect_left(self) -> None:
        still = []
        for stored in self._leaving:
            if all(user.done() for user in stored.users()):
                self._free(stored.start, stored.room)
            else:
                still.append(stored)
        self._leaving = still

    def _drop_failed(self) -> None:
        for name in [name for name, stored in self._stored.items() if _is_lost(stored)]:
            self._leaving.append(self._stored.pop(name))

    def _find(self, name: str) -> _Stored:
        stored = self._stored.get(name)
        if stored is not None and not _is_lost(stored):
            return stored
        if stored is None:
            raise KeyError(name)
        failure = stored.put.error()
        self._drop_failed()
        raise KeyError(f"{name}: storing it had failed: {io_error(*failure) if failure else 'cancelled'}")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The lock, of an open Swap. A forked child is refused first: another thread may have held the lock."""
        self._engine._check_process()
        with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._file.closed:
            raise ClosedError("the Swap is closed")


def _is_lost(stored: _Stored) -> bool:
    """Whether its put ended without storing it."""
    return stored.put.done() and (stored.put.failed() or stored.put.cancelled())
