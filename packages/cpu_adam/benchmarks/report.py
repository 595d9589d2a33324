"""What the benchmark scripts share: options, one fresh process a thread count, JSON."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cpu_adam.alternation import System, alternate, ratio, record
from cpu_adam.bench import in_fresh_process, machine

Systems = Callable[[int, int], Mapping[str, System]]  # (numel, threads) -> name -> system
Ratios = Mapping[str, tuple[str, str]]  # what it says -> (ours, other)


def measure(systems: Systems, ratios: Ratios, numel: int, threads: int, rounds: int) -> tuple[list, dict[str, Any]]:
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks there
        chosen = systems(numel, threads)
        seconds = alternate(chosen, rounds)
    records = [{"threads": threads, **record(name, chosen[name], seconds[name], numel)} for name in chosen]
    return records, {"threads": threads, **{text: ratio(seconds, *pair) for text, pair in ratios.items()}}


def main(description: str, systems: Systems, ratios: Ratios) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    results = [
        in_fresh_process(threads, measure, systems, ratios, options.numel, threads, options.rounds)
        for threads in options.threads
    ]
    report = {
        "machine": machine(),
        "numel": options.numel,
        "ratios": [ratios for _, ratios in results],
        "records": [row for records, _ in results for row in records],
    }
    print(json.dumps(report, indent=1))
