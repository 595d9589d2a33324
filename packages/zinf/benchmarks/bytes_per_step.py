"""Bytes that a step of `zinf train` moves, as zinf counts them and as the kernel does, and where its time goes.

    python packages/zinf/benchmarks/bytes_per_step.py --nvme DIR [--json F]

The kernel's count is /proc/self/io of the whole process, so it holds for direct I/O (through the page cache it would
miss what the cache served). The time of a step stands beside the longest of its limits, which no step can beat.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import put
from trainee import Trainee, kernel_bytes

import zinf
from zinf.models.model_names import BUILTIN_MODEL

WARM_UP = 2  # steps: the first learns the order of the units, the second is the first that prefetches


def measure(drive: str, *, model_name: str, batch: int, seq: int, steps: int, **changes: Any) -> dict[str, Any]:
    """The record of one run with preset inf-nvme, nothing resident, and `changes` to its Config."""
    config = zinf.Config.preset("inf-nvme", nvme=[drive], resident=0, **changes)
    trainee = Trainee(config, model=model_name, batch=batch, seq=seq)
    for _ in range(WARM_UP):
        trainee.step()
    before = kernel_bytes()
    taken = [trainee.step() for _ in range(steps)]
    after = kernel_bytes()
    reports, seconds = [step.report for step in taken], [step.seconds for step in taken]
    numel = trainee.sizes.numel
    per_parameter = 1 / (numel * steps)
    reported = {
        "read": sum(report["bytes"]["nvme_read"] for report in reports),
        "written": sum(report["bytes"]["nvme_written"] for report in reports),
    }
    prefetch = {key: sum(report["prefetch"][key] for report in reports) for key in ("hits", "misses")}
    return {
        "settings": {key: str(value) for key, value in changes.items()},
        "parameters": numel,
        "tokens": batch * seq,
        "io": reports[-1]["io"],
        "bytes_per_parameter_and_step": {way: nbytes * per_parameter for way, nbytes in reported.items()},
        "kernel_over_report": {way: (after[way] - before[way]) / reported[way] for way in reported},
        "prefetch_hit_share": prefetch["hits"] / max(1, sum(prefetch.values())),
        "seconds": {
            "median": statistics.median(seconds),
            "smallest": min(seconds),
            "largest": max(seconds),
            **{
                part: statistics.median(report["seconds"][part] for report in reports) for part in reports[0]["seconds"]
            },
        },
        "limit_seconds": {
            limit: statistics.median(report["limit"][limit] for report in reports) for limit in reports[0]["limit"]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nvme", required=True, help="a directory of the drive")
    parser.add_argument("--model", default=BUILTIN_MODEL)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = {"model_name": arguments.model, "batch": arguments.batch, "seq": arguments.seq, "steps": arguments.steps}

    with tempfile.TemporaryDirectory(dir=arguments.nvme, prefix="bytes-per-step-") as drive:
        runs = [
            measure(drive, **sizes, overlap_optimizer=overlap, prefetch=prefetch)
            for overlap in ("next-forward", "backward", False)
            for prefetch in (True, False)
        ]
    record = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
        "runs": runs,
    }
    put(record, arguments.json)


if __name__ == "__main__":
    main()
