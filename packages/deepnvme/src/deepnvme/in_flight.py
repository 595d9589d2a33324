"""What must stay alive while the kernel works on it, and how it is let go.

The engine's threads touch no Python object. A finished request is noticed by the next Python thread that has
anything to do with its engine; until then, its array and file are kept.
"""

from __future__ import annotations

import threading
import weakref
from typing import NamedTuple

from . import _core
from .file import File, FileIdentity


class Entry(NamedTuple):
    request: _core.Request
    owner: object  # keeps the memory
    file: File  # keeps the descriptors


class InFlight:
    """The requests of one engine whose end nobody has noticed yet."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        # Makes "not done yet, so keep it" one step. Reentrant for signal handlers that use the engine.
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._submitting: dict[object, object] = {}
        # Failures that no wait() has raised, for flush() and sync(). Without their arrays and descriptors.
        self._failures: dict[int, tuple[_core.Request, FileIdentity]] = {}
        _all.add(self)

    def hold(self, owner: object) -> object:
        """Ahead of submitting: keeps the owner until add() is called with the key that this returns.

        A signal handler may raise between submitting and adding (KeyboardInterrupt). Then the kernel has the memory
        and nobody has the request, so the owner stays for as long as the engine.
        """
        key = object()
        self._submitting[key] = owner
        return key

    def withdraw(self, key: object) -> None:
        """It was not submitted after all."""
        del self._submitting[key]

    def add(self, entry: Entry, key: object) -> None:
        with self._lock:
            # A request is done before its id is listed as finished. So one that is not done here is still to be
            # listed, and will be let go; one that is done may have been listed and missed already.
            under_way = not entry.request.done()
            if under_way:
                self._entries[entry.request.id] = entry
        del self._submitting[key]
        if not under_way:
            self._note_failure(entry)

    def let_go(self) -> None:
        """Forgets the requests that finished since the last call."""
        with self._lock:
            entries = [self._entries.pop(id, None) for id in self._engine.take_finished()]
        for entry in entries:
            if entry is not None:
                self._note_failure(entry)
        # Arrays and files are released here, outside the lock: releasing may run anyone's finalizer.

    def let_go_of(self, request: _core.Request) -> None:
        """Forgets one that is done but perhaps not listed as finished yet."""
        with self._lock:
            entry = self._entries.pop(request.id, None)
        if entry is not None:
            self._note_failure(entry)

    def settle(self, request: _core.Request) -> None:
        """Someone waited for this one and hears of its failure, if any."""
        with self._lock:
            entry = self._entries.pop(request.id, None)
            self._failures.pop(request.id, None)
        del entry

    def entries(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def take_failures(self) -> list[_core.Request]:
        """Failures that were not raised yet, oldest first."""
        with self._lock:
            failures, self._failures = self._failures, {}
        return [failures[id][0] for id in sorted(failures)]

    def take_failure_of(self, file: File) -> _core.Request | None:
        """The oldest failure of a request for this file that was not raised yet."""
        with self._lock:
            ids = [id for id, (_, identity) in self._failures.items() if identity == file.identity]
            return self._failures.pop(min(ids))[0] if ids else None

    def _note_failure(self, entry: Entry) -> None:
        if entry.request.failed():
            with self._lock:
                self._failures[entry.request.id] = entry.request, entry.file.identity


_all: weakref.WeakSet[InFlight] = weakref.WeakSet()


def let_go_of_finished() -> None:
    """For who waits for memory that finished requests of any engine may be holding."""
    for in_flight in list(_all):
        in_flight.let_go()
