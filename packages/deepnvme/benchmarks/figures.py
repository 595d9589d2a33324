"""Figures of the benchmarks in this folder: what a measurement took, how far several lie apart, all of it as JSON."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any


def rate_and_cpu(move: Callable[[], int]) -> tuple[float, float]:
    """(GB/s, CPU s/GB of all threads of this process) of a call that moves bytes and returns how many."""
    cpu, started = _cpu_seconds(), time.perf_counter()
    gigabytes = move() / 1e9
    return gigabytes / (time.perf_counter() - started), (_cpu_seconds() - cpu) / gigabytes


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def put(found: dict[str, Any], path: str | None) -> None:
    """Prints it, and writes it into the file if one was given."""
    text = json.dumps(found, indent=2)
    print(text)
    if path:
        with open(path, "w") as f:
            f.write(text)
