"""Request: a transfer under way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from . import _core
from .errors import io_error

if TYPE_CHECKING:
    from .engine import Engine


class Request:
    """What Engine.read and Engine.write return at once.

    The array must not be changed (a write) or used (a read) before `wait` has returned. It may be dropped: the
    engine keeps its memory until the kernel is done with it.
    """

    __slots__ = ("__weakref__", "_checksum", "_core", "_engine", "_outcome")

    def __init__(
        self,
        engine: Engine,
        core: _core.Request,
        checksum: Callable[[], int] | None,
        outcome: Callable[[_core.Request], Any] | None = None,
    ) -> None:
        self._engine = engine
        self._core = core
        self._checksum = checksum  # tells the crc32c of a transfer that succeeded, where there is one
        self._outcome = outcome  # makes result() of a transfer that succeeded; may raise

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until the transfer has ended; the number of bytes moved.

        OSError: it failed, with errno, path, offset and length. TimeoutError (an OSError too): not ended within
        `timeout` seconds; it goes on. concurrent.futures.CancelledError: it was cancelled.
        """
        self.result(timeout)
        return self._core.nbytes

    def result(self, timeout: float | None = None) -> Any:
        """`wait`, and what the transfer produced: the bytes moved, or the array of Swap.get."""
        self._engine._wait(self._core, timeout)
        if self._core.cancelled():
            raise concurrent.futures.CancelledError(f"the {self!r} was cancelled")
        failure = self._core.error()
        if failure:
            raise io_error(*failure)
        return self._core.nbytes if self._outcome is None else self._outcome(self._core)

    @property
    def crc32c(self) -> int | None:
        """The CRC-32C of the bytes moved, as `crc32c(array)` would give it; None where none was asked for.

        Waits, and raises, as `result` does.
        """
        if self._checksum is None:
            return None
        self.result()
        return self._checksum()

    def done(self) -> bool:
        """Whether it has ended, in whatever way. Never blocks and never raises."""
        return self._core.done()

    def cancel(self) -> bool:
        """Starts no further part of it. False when all parts had started: then it completes as usual.

        True does not mean that it has ended: `wait` still waits for the parts that were under way, and then raises
        concurrent.futures.CancelledError. A cancelled write may have changed any part of its range.
        """
        return self._engine._cancel(self._core)

    def add_done_callback(self, fn: Callable[[Request], Any]) -> None:
        """Calls fn(request) once it has ended: at once if it has, else in a thread of the engine's."""
        if not self.done():
            self._engine._check_process()  # nothing would ever call it in a forked child
        self._engine._callbacks.add(self, fn)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def set_ended() -> None:
            if not ended.done():  # the task may have been cancelled
                ended.set_result(None)

        def wake(_: Request) -> None:
            # A loop that was closed meanwhile raises; nobody waits in it any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(set_ended)

        self.add_done_callback(wake)
        try:
            yield from ended
            return self.result()
        except asyncio.CancelledError:
            self.cancel()
            raise
        except concurrent.futures.CancelledError as e:
            raise asyncio.CancelledError(*e.args) from None

    def __repr__(self) -> str:
        return f"deepnvme.Request({self._core.nbytes} bytes, {'done' if self.done() else 'under way'})"
