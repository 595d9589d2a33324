"""When things ran: named intervals, from which the step's report and the timeline are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One thing that ran. Seconds of time.perf_counter()."""

    stage: str
    """"nc", "cg", "gg", "reduce", "optimizer", "write", "stall" or "forward"."""
    label: str
    start: float
    stop: float


class Spans:
    """A recorder. Cheap enough to be always on: two clock reads and an append a span."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._listeners: list[Callable[[Span], None]] = []

    def begin(self, stage: str, label: str) -> Callable[[], None]:
        """Start a span that ends when the returned function is called, perhaps by another thread."""
        start = time.perf_counter()
        return lambda: self.add(stage, label, start, time.perf_counter())

    @contextmanager
    def running(self, stage: str, label: str = "") -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, label, start, time.perf_counter())

    def add(self, stage: str, label: str, start: float, stop: float) -> None:
        span = Span(stage, label, start, stop)
        self._spans.append(span)
        for listener in self._listeners:
            listener(span)

    def take(self) -> list[Span]:
        """All spans since the last call."""
        spans, self._spans = self._spans, []
        return spans

    @contextmanager
    def heard_by(self, listener: Callable[[Span], None]) -> Iterator[None]:
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)


def covered(spans: list[Span], *stages: str) -> float:
    """Seconds in which at least one span of one of `stages` ran: what overlaps counts once."""
    total, end = 0.0, float("-inf")
    for span in sorted((span for span in spans if span.stage in stages), key=lambda span: span.start):
        if span.stop > end:
            total += span.stop - max(span.start, end)
            end = span.stop
    return total
