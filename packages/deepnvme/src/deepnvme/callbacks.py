"""Done-callbacks of requests, called in one thread per engine that is started when first needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _core

if TYPE_CHECKING:
    from .request import Request

_log = logging.getLogger("deepnvme")
_FAILED = "a done-callback of %r failed"


class Callbacks:
    """The engine's threads run no Python; this thread waits for what they finish, without the GIL."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()  # reentrant for signal handlers and finalizers that add callbacks
        self._waiting: dict[int, list[tuple[Request, Callable[[Request], Any]]]] = {}
        self._thread: threading.Thread | None = None

    def add(self, request: Request, fn: Callable[[Request], Any]) -> None:
        core = request._core
        if not core.done():  # else without the lock, which in a forked child may be held for ever
            with self._lock:
                self._start()
                if core.want_notification():
                    self._waiting.setdefault(core.id, []).append((request, fn))
                    return
        # It has ended, or is just about to be marked so.
        self._engine.wait(core, None)
        _call(request, fn)

    def join(self) -> None:
        """After the core engine was closed: until the last callback has returned."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="deepnvme-callbacks", daemon=True)
            thread.start()  # may fail: then the next one tries again
            self._thread = self._thread or thread  # a signal handler may have started one meanwhile

    def _serve(self) -> None:
        with self._lock:
            # None: an exception of a signal handler left _start() just behind thread.start().
            self._thread = self._thread or threading.current_thread()
            if self._thread is not threading.current_thread():
                return
        while ids := self._engine.wait_notifications():
            for id in ids:
                self._call_all(id)

    def _call_all(self, id: int) -> None:
        # Of its own, so that its variables are gone while _serve() waits: a request keeps its engine.
        with self._lock:
            waiting = self._waiting.pop(id, [])
        for request, fn in waiting:
            try:
                _call(request, fn)
            except BaseException:  # SystemExit, asyncio.CancelledError, ...: others wait for this thread
                _log.exception(_FAILED, request)


def _call(request: Request, fn: Callable[[Request], Any]) -> None:
    try:
        fn(request)
    except Exception:
        _log.exception(_FAILED, request)
