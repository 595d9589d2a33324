"""Fair timing on a machine whose memory speed drifts: systems take turns, ratios are taken inside each turn.

A host can be twice as fast for some minutes. So nothing is compared with what ran at another time: in every round
each system makes one step, and the ratio of two systems is the median over rounds of their ratio within the round.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class System(NamedTuple):
    """Something that steps `numel` parameters."""

    step: Callable[[], object]
    bytes_per_param: int  # what one ideal pass must read and write


def alternate(systems: Mapping[str, System], rounds: int) -> dict[str, list[float]]:
    """Seconds of each system's step, one per round. A first round, not counted, touches memory and starts threads."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for counted in [False] + [True] * rounds:
        for name, system in systems.items():
            begin = time.perf_counter()
            system.step()
            if counted:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def ratio(seconds: Mapping[str, list[float]], ours: str, other: str) -> float:
    """How many times as fast `ours` is: median over rounds."""
    return statistics.median(b / a for a, b in zip(seconds[ours], seconds[other], strict=True))


def record(name: str, system: System, seconds: list[float], numel: int) -> dict[str, Any]:
    """One system's figures: medians, and the extremes of the time."""
    median = statistics.median(seconds)
    return {
        "system": name,
        "params_per_s": numel / median,
        "bytes_per_param": system.bytes_per_param,
        "gb_per_s": system.bytes_per_param * numel / median / 1e9,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "rounds": len(seconds),
    }
