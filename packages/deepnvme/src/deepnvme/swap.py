"""Swap: named tensors on NVMe, with dtype and shape kept."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Any, NoReturn, TypeVar

from . import _core
from .aligned_buffer import empty
from .arrays import describe, describe_writable, dtype_and_shape, made_contiguous
from .dtypes import DType
from .engine import Engine
from .errors import ChecksumError, ClosedError, io_error
from .extents import Extents
from .file import File, PathLike
from .in_flight import Overtaken
from .request import Request
from .sizes import format_size, parse_size, whole_number

# Bytes reserved ahead when the space grows, since reserving little by little scatters it; but of what the drive has
# free this part at most: others want room there too.
_GROW_BY = 256 << 20
_GROW_BY_PART = 1 / 16

# Exceptions between any two steps. A signal handler may raise anywhere (KeyboardInterrupt), and it or a finalizer may
# use the Swap in the middle of another operation: the lock is reentrant. So
# - what the entries say (`_stored`, `_leaving` and `_putting`) is the truth at any time. A put is made in one step,
#   that of InFlight.submit: before it the name has the old value, after it the new one, which `_settle` enters. A name
#   goes in one step too (`_let_leave`).
# - `_extents` follow from the entries. Where a put did not get to its end, `_recover` makes them anew.
# - every operation begins by taking the turn from the one that it interrupts, if any. That one can submit nothing any
#   more (Overtaken), and begins again.

_T = TypeVar("_T")


@dataclass(eq=False)
class _Stored:
    """A tensor's place. Its bytes are those of `put`, once that has succeeded."""

    start: int
    room: int  # bytes of the extent, at least nbytes
    nbytes: int
    dtype: DType
    shape: tuple[int, ...]
    crc32c: int | None  # where it was known; else `put` takes it, if the Swap has checksums
    submitted: list[_core.Request] = field(default_factory=list)  # `put`, from its submission on
    # Perhaps still under way, by the identity of the list; one that was not submitted is empty.
    gets: dict[int, list[_core.Request]] = field(default_factory=dict)

    @property
    def put(self) -> _core.Request:
        return self.submitted[0]

    def checksum(self) -> int:
        return self.put.crc() if self.crc32c is None else self.crc32c

    def forget_ended_gets(self) -> None:
        for key, get in list(self.gets.items()):  # oldest first
            if get and not get[0].done():
                return
            self.gets.pop(key, None)

    def users(self) -> list[_core.Request]:
        self.forget_ended_gets()
        return [self.put, *(get[0] for get in list(self.gets.values()) if get)]


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
        self._leaving: set[_Stored] = set()  # popped or replaced, but still being read or written
        self._putting: tuple[str, _Stored] | None = None
        self._unfinished = False  # whether a put has begun and not ended: `_extents` may have room that nobody has
        self._turn: list[bool] = []  # of the operation at work; emptied when another takes it
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
        request = self._alone(self._put, name, array, nbytes, dtype, shape, crc32c)
        return request if crc32c is None else Request(self._engine, request._core, lambda: crc32c)

    def get(self, name: str, out: Any = None) -> Request:
        """Starts reading a tensor; `result()` is a Buffer of its dtype and shape, or `out`, filled.

        `out`: a contiguous array of as many bytes, whatever its dtype. KeyError: no such tensor. The request raises
        ChecksumError (an OSError) when the bytes are not those that were put.
        """
        request, stored, array = self._alone(self._get, name, out)
        start, nbytes, path = stored.start, stored.nbytes, self.path

        def outcome(done: _core.Request) -> Any:
            if self._checksum and done.crc() != stored.checksum():
                raise ChecksumError(name, str(path), start, nbytes, stored.checksum(), done.crc())
            return array

        return Request(self._engine, request._core, stored.checksum if self._checksum else None, outcome)

    def pop(self, name: str) -> None:
        """Forgets a tensor; its room is used again. Reads that were started before are completed. KeyError."""
        self._alone(self._pop, name)

    def names(self) -> list[str]:
        """Of the stored tensors, in the order in which they were first put."""
        return list(self._alone(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._alone(self._entries)

    def __len__(self) -> int:
        return len(self._alone(self._entries))

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensors."""
        return sum(stored.nbytes for stored in self._alone(self._entries).values())

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
        self._alone(self._close)
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

    def __reduce__(self) -> NoReturn:
        # A shallow copy would be a second owner of the same space, and close it.
        raise TypeError("a Swap cannot be copied or pickled: its tensors are for this process, by their names")

    # -- operations; all under the lock, in their turn -----------------------------------------------------------------

    def _alone(self, operation: Callable[..., _T], *arguments: Any) -> _T:
        """Under the lock; again when a signal handler or a finalizer used the Swap meanwhile."""
        self._engine._check_process()  # first: in a forked child another thread may have held the lock
        with self._lock:
            while True:
                self._turn.clear()
                if self._unfinished:
                    self._recover()
                self._turn = turn = [True]
                try:
                    return operation(*arguments)
                except BaseException as e:
                    if not turn:  # whose end was taken for that of this one, too
                        self._unfinished = True
                    if not isinstance(e, Overtaken):
                        raise

    def _put(
        self, name: str, array: Any, nbytes: int, dtype: DType, shape: tuple[int, ...], crc32c: int | None
    ) -> Request:
        turn = self._turn
        self._check_open()
        self._unfinished = True
        old = self._stored.get(name)
        if old is not None and nbytes <= old.room < 2 * max(nbytes, self._extents.unit):
            start, room, after = old.start, old.room, old.users()
        else:
            start, room, after = self._allocate(name, nbytes), self._extents.rounded(nbytes), []
            if old is not None:
                self._leaving.update(compress((old,), turn))
        new = _Stored(start, room, nbytes, dtype, shape, crc32c)
        self._putting = name, new
        request = self._engine._submit(
            True,
            self._file,
            array,
            start,
            self._checksum and crc32c is None,
            [(user, False) for user in after],
            new.submitted,
            turn,
        )
        self._settle()
        self._unfinished = False
        return request

    def _get(self, name: str, out: Any) -> tuple[Request, _Stored, Any]:
        turn = self._turn
        self._check_open()
        stored = self._find(name)
        array = empty(stored.shape, stored.dtype.name) if out is None else out
        nbytes = describe_writable(array).nbytes
        if nbytes != stored.nbytes:
            raise ValueError(f"tensor {name!r} has {stored.nbytes} bytes, `out` has {nbytes}")
        stored.forget_ended_gets()
        submitted: list[_core.Request] = []
        stored.gets[id(submitted)] = submitted
        request = self._engine._submit(
            False, self._file, array, stored.start, self._checksum, [(stored.put, True)], submitted, turn
        )
        return request, stored, array

    def _pop(self, name: str) -> None:
        self._check_open()
        self._find(name)
        self._let_leave(name)

    def _entries(self) -> dict[str, _Stored]:
        self._drop_failed()
        return self._stored.copy()

    def _close(self) -> None:
        for stored in [*self._stored.values(), *self._leaving]:
            self._wait_for(stored)
        self._file.close()
        self._stored.clear()
        self._leaving.clear()

    def _settle(self) -> None:
        """Enters a put that was submitted. No call between looking and entering: nothing comes in between."""
        putting = self._putting
        if putting is not None and putting[1].submitted:
            self._stored[putting[0]] = putting[1]
        self._putting = None

    def _recover(self) -> None:
        """Completes or undoes a put that did not get to its end."""
        self._settle()
        self._leaving.difference_update(self._stored.values())  # what it was to replace stays
        self._extents = self._extents_of_entries()
        self._unfinished = False

    def _extents_of_entries(self) -> Extents:
        entries = {*self._stored.values(), *self._leaving}
        taken = [(entry.start, entry.room) for entry in entries if entry.room]
        return Extents(self._extents.capacity, taken=taken)

    # -- room ----------------------------------------------------------------------------------------------------------

    def _allocate(self, name: str, nbytes: int) -> int:
        if nbytes == 0:
            return 0
        self._collect_left()
        try:
            return self._take(name, nbytes)
        except OSError:
            # What is stored next must not get this room, which the drive has not.
            self._extents = self._extents_of_entries()
            if not self._leaving:
                raise
        for stored in list(self._leaving):  # their room comes free
            self._wait_for(stored)
        self._collect_left()
        return self._take(name, nbytes)

    def _wait_for(self, stored: _Stored) -> None:
        for user in stored.users():
            self._engine._core.wait(user, None)

    def _take(self, name: str, nbytes: int) -> int:
        start = self._extents.allocate(nbytes)
        if start is None:
            raise OSError(
                errno.ENOSPC,
                f"{os.strerror(errno.ENOSPC)}: tensor {name!r} of {nbytes} bytes does not fit into a Swap of "
                f"{format_size(self._extents.capacity or 0)}, of which {self._extents.used} bytes are in use",
                ", ".join(self._file.paths),
            )
        self._reserve_up_to(self._extents.end)
        return start

    def _reserve_up_to(self, end: int) -> None:
        if end <= self._reserved:
            return
        core = self._file._open_core()
        ahead = self._reserved + min(_GROW_BY, int(_free_bytes(core) * _GROW_BY_PART) // 4096 * 4096)
        if ahead > end and core.reserve(ahead) is None:
            self._reserved = ahead
            return
        failure = core.reserve(end)  # room for this one may be left, if not for more
        if failure:
            raise io_error(*failure)
        self._reserved = end

    def _collect_left(self) -> None:
        extents = self._extents  # others by the time when who interrupts us has collected the same
        for stored in [stored for stored in list(self._leaving) if all(user.done() for user in stored.users())]:
            self._leaving.discard(stored)
            if stored.room:
                extents.free(stored.start, stored.room)

    def _let_leave(self, *names: str) -> None:
        # Within C, so in one step: an entry is never in none of the two.
        self._leaving.update(filter(None, map(self._stored.pop, names, repeat(None))))

    def _drop_failed(self) -> None:
        self._let_leave(*[name for name, stored in list(self._stored.items()) if _is_lost(stored)])

    def _find(self, name: str) -> _Stored:
        stored = self._stored.get(name)
        if stored is not None and not _is_lost(stored):
            return stored
        if stored is None:
            raise KeyError(name)
        failure = stored.put.error()
        self._drop_failed()
        raise KeyError(f"{name}: storing it had failed: {io_error(*failure) if failure else 'cancelled'}")

    def _check_open(self) -> None:
        if self._file.closed:
            raise ClosedError("the Swap is closed")


def _is_lost(stored: _Stored) -> bool:
    """Whether its put ended without storing it."""
    return stored.put.done() and (stored.put.failed() or stored.put.cancelled())


def _free_bytes(file: _core.File) -> int:
    """What others may still store on the fullest of its drives."""
    return min(status.f_bavail * status.f_frsize for status in map(os.fstatvfs, file.filenos()))
