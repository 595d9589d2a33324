"""What must stay alive while the kernel works on it, and how it is let go.

The engine's threads touch no Python object. A finished request is noticed by the next Python thread that has
anything to do with its engine; until then, its array and file are kept.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from itertools import compress, starmap
from typing import Any, NamedTuple

from . import _core
from .file import File, FileIdentity


class Entry(NamedTuple):
    request: _core.Request
    owner: object  # keeps the memory
    file: File  # keeps the descriptors


class Overtaken(Exception):
    """What was to be submitted must be thought over: something else came in between."""


class InFlight:
    """The requests of one engine whose end nobody has noticed yet."""

    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        # Makes "not done yet, so keep it" one step. Reentrant for signal handlers that use the engine.
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        # Being submitted, by the identity of the list; an exception of a signal handler may leave one here.
        self._submitting: dict[int, tuple[list[_core.Request], object, File]] = {}
        self._letting_go = False
        # Failures that no wait() has raised, for flush() and sync(). Without their arrays and descriptors.
        self._failures: dict[int, tuple[_core.Request, FileIdentity]] = {}
        _all.add(self)

    def submit(
        self,
        arguments: tuple[Any, ...],
        owner: object,
        file: File,
        submitted: list[_core.Request],
        turn: Iterable[bool] = (True,),
    ) -> _core.Request:
        """Submits a request of these arguments to the engine, and keeps what it needs until it has ended.

        A signal handler may raise between any two steps of Python (KeyboardInterrupt), but not within C: there the
        request is submitted and put into `submitted` in one step. Who has that list never misses the request.
        Overtaken: `turn` was cleared before, and nothing is submitted.
        """
        key = id(submitted)
        try:
            self._submitting[key] = submitted, owner, file
            submitted.extend(starmap(self._engine.submit, compress((arguments,), turn)))
        finally:
            if not submitted:
                self._submitting.pop(key, None)
        if not submitted:
            raise Overtaken
        entry = Entry(submitted[0], owner, file)
        with self._lock:
            # A request is done before its id is listed as finished. So one that is not done here is still to be
            # listed, and will be let go; one that is done may have been listed and missed already.
            under_way = not entry.request.done()
            if under_way:
                self._entries[entry.request.id] = entry
        # Another thread may have let it go already, and noted its failure.
        if self._submitting.pop(key, None) is not None and not under_way:
            self._note_failure(entry)
        return entry.request

    def let_go(self) -> None:
        """Forgets the requests that finished since the last call."""
        with self._lock:
            # An exception of a signal handler that came in between the last time took the list with it.
            ids = [id for id, entry in self._entries.items() if entry.request.done()] if self._letting_go else []
            self._letting_go = True
            entries = [self._entries.pop(id, None) for id in (*ids, *self._engine.take_finished())]
            self._letting_go = False
        if self._submitting:
            for key, (submitted, owner, file) in list(self._submitting.items()):
                if submitted and submitted[0].done() and self._submitting.pop(key, None) is not None:
                    entries.append(Entry(submitted[0], owner, file))
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
            cut_short = [Entry(s[0], owner, file) for s, owner, file in list(self._submitting.values()) if s]
            return [*self._entries.values(), *cut_short]

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
