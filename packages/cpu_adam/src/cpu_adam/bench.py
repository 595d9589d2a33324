"""python -m cpu_adam.bench: the optimizer step's speed on this machine, as a fraction of a copy's bandwidth.

Beside our own forms stand torch's fused AdamW and DeepSpeedCPUAdam where they are installed.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import cpu_adam
from cpu_adam import contestants
from cpu_adam.alternation import System, alternate, ratio, record

Result = TypeVar("Result")
COPY = "copy"


def in_fresh_process(threads: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls it in a new process whose OpenMP libraries use `threads` threads."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def installed_contestants(numel: int, threads: int) -> dict[str, System]:
    systems = {
        COPY: contestants.plain_copy(numel, threads),
        "cpu_adam fp32": contestants.fp32(numel, threads),
        "cpu_adam fp32, bf16 copy in the same pass": contestants.fp32_with_bf16_copy(numel, threads),
        "cpu_adam split master, bf16 gradient": contestants.split_master(numel, threads),
    }
    if importlib.util.find_spec("torch"):
        systems["torch AdamW fused"] = contestants.torch_fused(numel)
    if importlib.util.find_spec("torch") and importlib.util.find_spec("deepspeed"):
        systems["DeepSpeedCPUAdam"] = contestants.deepspeed(numel)
    return systems


def measure(numel: int, threads: int, rounds: int) -> list[dict[str, Any]]:
    """One record a system; `of_copy` is its bandwidth over the copy's, within rounds."""
    systems = installed_contestants(numel, threads)
    seconds = alternate(systems, rounds)
    records = []
    for name, system in systems.items():
        of_copy = ratio(seconds, name, COPY) * system.bytes_per_param / systems[COPY].bytes_per_param
        records.append({"threads": threads, **record(name, system, seconds[name], numel), "of_copy": of_copy})
    return records


def machine() -> dict[str, Any]:
    """Where the figures were made."""
    versions = {"python": platform.python_version()}
    for package in ("cpu_adam", "numpy", "torch", "deepspeed"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": cpu_adam.isa(),
        "isas": cpu_adam.isas(),
        "versions": versions,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cpu_adam.bench", description=__doc__)
    parser.add_argument("--json", metavar="F", help="also write the records to this file")
    parser.add_argument("--numel", type=int, default=100_000_000, help="parameters (default: 100 million)")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts (default: 1 and all cores)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which every system steps once")
    options = parser.parse_args(arguments)
    if options.json and not os.path.isdir(os.path.dirname(options.json) or "."):
        parser.error(f"--json {options.json}: no such directory")  # not after the measurement, which would be lost
    counts = options.threads or sorted({1, len(os.sched_getaffinity(0))})

    records = []
    print(f"{'threads':>7} {'Mparam/s':>9} {'GB/s':>7} {'of copy':>8}  system ({options.numel:,} parameters)")
    for threads in counts:
        for row in in_fresh_process(threads, measure, options.numel, threads, options.rounds):
            records.append(row)
            print(
                f"{row['threads']:7} {row['params_per_s'] / 1e6:9.0f} {row['gb_per_s']:7.1f} {row['of_copy']:8.2f}  "
                f"{row['system']}",
                flush=True,
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine(), "numel": options.numel, "records": records}, file, indent=1)
        print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
