"""Engine: hands out requests and says what is in force."""

from __future__ import annotations

import atexit
import errno
import math
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from . import _core
from .arrays import describe, describe_writable
from .callbacks import Callbacks
from .drive_profile import DriveProfile, load_profile
from .errors import ClosedError, ForkedError, io_error
from .file import Direct, File, PathLike, check_direct
from .in_flight import InFlight
from .request import Request
from .sizes import MOST_BYTES, parse_size, waiting_time, whole_number
from .statistics import Statistics

_MOST_DEPTH = 4096  # more in flight helps no drive and costs locked memory
MOST_BLOCK = 1 << 30  # the kernel moves less than 2 GiB in one call
# Enough blocks in flight, and large enough ones, to fill the drives that were measured; see benchmarks/.
_DEFAULT_DEPTH = 32
_DEFAULT_BLOCK = 2 << 20
_DEFAULT_THREADS = 8
DEFAULT_BOUNCE_BUFFERS = 6  # enough for the drive, few enough to stay in the cache, where copying costs half

_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

_warned_backends: set[str] = set()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Moves arrays to and from files, many at once, without Python taking part.

    backend: "io_uring", "libaio", "threads", or "auto": the first of these that works here.
    queue_depth: I/Os with the drive at once.
    block_size: the largest of them; a larger transfer is cut.
    threads: of the threads backend; rings of the others, one is enough unless a single core cannot fill the drive.
    bounce_buffers: MiB of memory through which misaligned transfers pass, for each ring.
        These four are, where None, what `deepnvme-bench tune` found for the drive of the first file, else a default.
    direct: True: O_DIRECT or an error; False: page cache; "auto": O_DIRECT where the filesystem has it. For files
        that are given as paths; a File has its own.

    Any thread may use it. OSError: the backend cannot run here. A forked child cannot use its parent's engine
    (ForkedError).
    """

    def __init__(
        self,
        backend: str = "auto",
        queue_depth: int | None = None,
        block_size: int | str | None = None,
        threads: int | None = None,
        bounce_buffers: int | None = None,
        direct: Direct = "auto",
    ) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._direct_setting = check_direct(direct)
        self._all_direct: bool | None = None
        self._flushed = 0  # requests that earlier flushes accounted for
        self._wanted = (backend, queue_depth, block_size, threads, bounce_buffers)
        self._start(DriveProfile(""))
        # The first file tells the drive, and so whether there is a profile for what was left open.
        self._may_adopt_profile = None in self._wanted
        self._adopting = threading.RLock()  # reentrant for signal handlers that use the engine
        # Files that were given as paths, as long as a request uses them: a thousand writes to one path open it once.
        self._open_paths: weakref.WeakValueDictionary[tuple[str, str], File] = weakref.WeakValueDictionary()
        _engines.add(self)

    # -- transfers ---------------------------------------------------------------------------------------------

    def write(self, file: PathLike | File, array: Any, offset: int = 0, *, checksum: bool = False) -> Request:
        """Starts writing the array's bytes to the file from byte `offset` on.

        A path is created if absent and never truncated: the file's length becomes max(old, offset + nbytes).
        `checksum`: a CRC-32C of the bytes is taken on their way; it is the request's `crc32c`.
        TypeError, ValueError: the array is not contiguous host memory, the engine or file is closed. OSError: the
        file cannot be opened. All that happens later is raised by the request's `wait`.
        """
        return self._submit(True, file, array, offset, checksum)

    def read(self, file: PathLike | File, out: Any, offset: int = 0, *, checksum: bool = False) -> Request:
        """Starts filling the array `out` with the file's bytes from byte `offset` on.

        As `write`; also TypeError: `out` is read-only. A file that is too short: `wait` raises OSError(ENODATA).
        """
        return self._submit(False, file, out, offset, checksum)

    def flush(self) -> int:
        """Waits for all that was submitted before; how many requests finished since the last flush.

        Raises the first failure that no `wait` has raised. Not durability: see `sync`.
        """
        self._check_usable()
        self._wait_for_all()
        self._in_flight.let_go()
        finished = self._core.counters()["finished"]
        count, self._flushed = finished - self._flushed, finished
        for failed in self._in_flight.take_failures():
            raise _failure_of(failed)
        return count

    def sync(self, file: PathLike | File) -> None:
        """Makes what was written to the file survive a loss of power (fdatasync), after waiting for its requests.

        OSError: it cannot be made durable, or one of them failed.
        """
        self._check_usable()
        opened = file if isinstance(file, File) else File(file, "r", direct=False)
        pending = [e.request for e in self._in_flight.entries() if e.file.identity == opened.identity]
        self._wait_for(pending)
        # Also of those that had ended before, if no wait has raised it.
        failed = self._in_flight.take_failure_of(opened)
        if failed is not None:
            raise _failure_of(failed)
        failure = opened._open_core().sync()
        if failure:
            raise io_error(*failure)
        if opened is not file:
            _sync_directory(opened.paths[0])
            opened.close()

    def stats(self) -> Statistics:
        """What it has done since it was made."""
        return Statistics(backend=self.backend, direct=self.direct, **self._core.counters())

    def latency(self, op: str, quantile: float) -> float:
        """Seconds within which this share of the pieces of "read" or "write" were done; nan when there were none.

        From handing a piece to the kernel to hearing of its end, at most 1/16 too long.
        """
        counts = self._core.latencies({"read": False, "write": True}[op])
        wanted = quantile * sum(count for _, count in counts)
        for bound, count in counts:
            wanted -= count
            if wanted <= 0:
                return bound / 1e9
        return math.nan

    @property
    def direct(self) -> bool | None:
        """Whether all files used so far bypass the page cache; None: that shows with the first file."""
        if self._all_direct is None and self._direct_setting != "auto":
            return bool(self._direct_setting)
        return self._all_direct

    def close(self) -> None:
        """Finishes what was submitted, then stops. Raises the first failure that was never raised."""
        if self.forked:
            self._closed = True
            return
        with self._adopting:  # else the engine could get a new core behind our back
            if self._closed:
                return
            self._closed = True
        self._core.close()
        self._callbacks.join()
        self._in_flight.let_go()
        for failed in self._in_flight.take_failures():
            raise _failure_of(failed)

    def __enter__(self) -> Engine:
        self._check_usable()
        return self

    def __exit__(self, exc_type: object, *_: object) -> None:
        try:
            self.close()
        except OSError:
            if exc_type is None:  # else the first exception is the one to see
                raise

    def __del__(self) -> None:
        if hasattr(self, "_callbacks"):  # else its making had failed
            self._close_unheard()

    def _close_unheard(self) -> None:
        # An engine that is dropped while busy finishes its work; there is no call left that could raise a failure.
        try:
            self.close()
        except OSError as e:
            warnings.warn(f"an Engine was dropped without close(), and a request had failed: {e}", RuntimeWarning, 2)

    def __reduce__(self) -> NoReturn:
        # A shallow copy would be a second owner of the same threads, and close them.
        raise TypeError("an Engine cannot be copied or pickled: make another one")

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"deepnvme.Engine({self.backend!r}, queue_depth={self.queue_depth}, block_size={self.block_size}{state})"

    # -- for Request and Swap ----------------------------------------------------------------------------------

    def _submit(
        self,
        writes: bool,
        file: PathLike | File,
        array: Any,
        offset: int,
        checksum: bool = False,
        after: Sequence[tuple[_core.Request, bool]] = (),
        submitted: list[_core.Request] | None = None,
        turn: Iterable[bool] = (True,),
    ) -> Request:
        """`submitted` has the request from the moment when it is submitted; only if `turn` still says so (InFlight)."""
        self._check_usable()
        offset = whole_number("offset", offset)
        if offset < 0:
            raise ValueError(f"offset must not be negative, found {offset}")
        host = describe(array) if writes else describe_writable(array)
        if offset + host.nbytes > MOST_BYTES:
            raise ValueError(f"{host.nbytes} bytes at offset {offset} end beyond 2**63 - 1, where every file does")
        opened = file if isinstance(file, File) else self._open_path(file, writes)
        if self._may_adopt_profile:
            self._adopt_profile(opened)
        core = opened._open_core()
        if writes and opened.mode == "r":
            raise ValueError(f"{opened!r} was opened for reading: use mode 'r+' or 'w'")
        arguments = writes, core, host.address, host.nbytes, offset, checksum, after
        try:
            request = self._in_flight.submit(
                arguments, host.owner, opened, [] if submitted is None else submitted, turn
            )
        except OSError as e:
            if e.errno == errno.ESHUTDOWN:  # closed by another thread just now
                raise ClosedError("the Engine is closed") from None
            raise
        if self._all_direct is not core.direct:
            self._all_direct = core.direct and self._all_direct is not False
        self._in_flight.let_go()
        return Request(self, request, request.crc if checksum else None)

    def _wait(self, request: _core.Request, timeout: float | None) -> None:
        timeout = waiting_time(timeout)
        if not request.done():
            self._check_process()
            if not self._core.wait(request, timeout):
                raise TimeoutError(f"the transfer has not ended within {timeout} s; it goes on")
        if not self.forked:  # else another thread may have held the lock
            self._in_flight.settle(request)

    def _cancel(self, request: _core.Request) -> bool:
        self._check_process()
        return self._core.cancel(request)

    # -- inside ------------------------------------------------------------------------------------------------

    def _start(self, profile: DriveProfile) -> None:
        """Starts the core with what was asked for, else the profile's settings, else the defaults."""
        backend, depth, block, threads, bounce_buffers = self._wanted
        self.queue_depth: int = _check_depth(_first(depth, profile.queue_depth, _DEFAULT_DEPTH))
        self.block_size: int = _check_block(_first(block, profile.block_size, _DEFAULT_BLOCK))
        slots = _first(bounce_buffers, profile.bounce_buffers, DEFAULT_BOUNCE_BUFFERS)
        self.bounce_buffers: int = _check_count("bounce_buffers", slots, 4096)
        self.backend, self.threads, self._core = self._start_core(backend, _first(threads, profile.threads))
        self._in_flight = InFlight(self._core)
        self._callbacks = Callbacks(self._core)

    def _start_core(self, wanted: str, threads: int | None) -> tuple[str, int, _core.Engine]:
        """The backend of that name, or with "auto" the best one that works here with these settings."""
        names = _core.backend_names()
        if wanted not in ("auto", *names):
            raise ValueError(f"backend must be 'auto' or one of {names}, found {wanted!r}")
        refusals: list[OSError] = []
        for name in names if wanted == "auto" else [wanted]:
            count = _check_count("threads", _first(threads, _DEFAULT_THREADS if name == "threads" else 1), 256)
            try:
                core = _core.Engine(name, self.queue_depth, self.block_size, count, self.bounce_buffers << 20)
            except OSError as e:
                refusals.append(OSError(e.errno, f"backend {name!r} cannot run here: {e.strerror}"))
            else:
                _warn_once_about(name, refusals)
                return name, count, core
        raise refusals[-1]

    def _adopt_profile(self, file: File) -> None:
        with self._adopting:
            self._check_usable()
            if not self._may_adopt_profile:
                return
            profile = load_profile(file.identity[0][0])
            if profile is not None:
                self._core.close()  # it has had nothing to do yet
                try:
                    self._start(profile)
                except (OSError, TypeError, ValueError) as e:
                    warnings.warn(f"the profile of drive {profile.drive!r} is not used: {e}", RuntimeWarning, 5)
                    self._start(DriveProfile(""))
            self._may_adopt_profile = False

    def _wait_for(self, requests: list[_core.Request]) -> None:
        for request in requests:
            self._core.wait(request, None)
            self._in_flight.let_go_of(request)

    def _wait_for_all(self) -> None:
        self._wait_for([entry.request for entry in self._in_flight.entries()])

    def _open_path(self, path: PathLike, writes: bool) -> File:
        name = os.fsdecode(path)
        mode = "w" if writes else "r"
        opened = self._open_paths.get((name, mode))
        if opened is not None and not opened.closed and _is_still(name, opened):
            return opened
        try:
            opened = File(name, mode, direct=self._direct_setting)
        except OSError as e:
            # Out of descriptors, perhaps only because of requests under way, which hold their files open.
            if e.errno not in _OUT_OF_DESCRIPTORS or not self._in_flight.entries():
                raise
            self._wait_for_all()
            opened = File(name, mode, direct=self._direct_setting)
        self._open_paths[name, mode] = opened
        return opened

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the Engine is closed")
        self._check_process()

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one that made the engine, which alone can use it."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        if self.forked:
            raise ForkedError(
                f"this Engine belongs to process {self._pid} and cannot be used in its forked child {os.getpid()}: "
                f"make an Engine after forking"
            )


def backends() -> dict[str, str]:
    """Each backend, best first, and "ok" or why it cannot run here."""
    return {name: _why_not(name) or "ok" for name in _core.backend_names()}


def _why_not(name: str) -> str:
    try:
        _core.try_backend(name)
    except OSError as e:
        return str(e.strerror)
    return ""


def _warn_once_about(name: str, refusals: list[OSError]) -> None:
    # Falling back is slower, and often due to a setting of the container that somebody could change.
    if refusals and name not in _warned_backends:
        _warned_backends.add(name)
        reasons = "; ".join(str(e.strerror) for e in refusals)
        warnings.warn(f"using the backend {name!r}: {reasons}", RuntimeWarning, stacklevel=4)


def _first(*settings: Any) -> Any:
    """The first that is not None."""
    return next((setting for setting in settings if setting is not None), None)


def _check_depth(depth: int) -> int:
    depth = _check_count("queue_depth", depth, None)
    if depth > _MOST_DEPTH:
        warnings.warn(
            f"queue_depth {depth} is more than any drive uses, and could exceed system limits (fs.aio-max-nr, "
            f"locked memory): using {_MOST_DEPTH}",
            RuntimeWarning,
            stacklevel=4,
        )
    return min(depth, _MOST_DEPTH)


def _check_block(block_size: int | str) -> int:
    nbytes = parse_size(block_size, "block_size")
    if nbytes == 0 or nbytes % 4096 or nbytes > MOST_BLOCK:
        raise ValueError(f"block_size must be a multiple of 4KiB up to 1GiB, found {block_size!r}")
    return nbytes


def _check_count(name: str, count: int, most: int | None) -> int:
    count = whole_number(name, count)
    if count < 1 or (most is not None and count > most):
        raise ValueError(f"{name} must be at least 1" + (f" and at most {most}" if most else "") + f", found {count}")
    return count


def _failure_of(request: _core.Request) -> OSError:
    failure = request.error()
    assert failure is not None
    return io_error(*failure)


def _is_still(path: str, opened: File) -> bool:
    """Whether the path still names the file that was opened under it."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return opened.identity == ((status.st_dev, status.st_ino),)


def _sync_directory(path: str) -> None:
    """A new file is found again after a loss of power only when its directory is durable too."""
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@atexit.register
def _finish_all() -> None:
    # While the interpreter is whole: transfers under way end, and no thread of ours outlives the arrays.
    for engine in list(_engines):
        engine._close_unheard()
