"""trace(): a timeline of steps in the Chrome/Perfetto JSON format, in which the overlap can be seen."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .named_file import named_file
from .offload_engine import engine_of
from .spans import Span

# One row a stage, in the order in which a unit passes them.
_ROWS = ("nc", "cg", "gg", "stall", "reduce", "optimizer", "write")


@contextmanager
def trace(model: nn.Module, path: str | os.PathLike) -> Iterator[None]:
    """Write a timeline of what happens inside the block to `path`, when the block ends.

    Open it at ui.perfetto.dev or chrome://tracing. On several ranks give each its own path. TypeError for a model that
    is none of zinf's; OSError, before the block runs, for a path that cannot be written.
    """
    engine, machinery = engine_of(model)
    file = open(path, "w")  # noqa: SIM115  a mistake in the path costs no steps, and takes no error's place
    spans: list[Span] = []
    lock = threading.Lock()  # the drive's spans end in its own thread

    def hear(span: Span) -> None:
        with lock:
            spans.append(span)

    try:
        with engine.tiers.spans.heard_by(hear):
            yield
    finally:
        with lock:
            events = _events(spans, machinery.ranks.rank)
        with named_file(path), file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _events(spans: list[Span], rank: int) -> list[dict]:
    rows = {stage: number for number, stage in enumerate(_ROWS)}
    events: list[dict] = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": stage}}
        for stage, number in rows.items()
    ]
    events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
    for span in sorted(spans, key=lambda span: span.start):
        events.append(
            {
                "name": f"{span.stage} {span.label}",
                "cat": span.stage,
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": (span.stop - span.start) * 1e6,
                "pid": rank,
                "tid": rows[span.stage],
            }
        )
    return events
