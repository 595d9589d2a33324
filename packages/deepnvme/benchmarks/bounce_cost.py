"""What misaligned memory costs: bounced against direct, reading and writing, for several pools. JSON.

    python benchmarks/bounce_cost.py DIR [--mib 512] [--rounds 5]
"""

from __future__ import annotations

import argparse
import functools
import statistics

import numpy as np
from figures import put, rate_and_cpu

import deepnvme


def moved(io: deepnvme.Engine, file: deepnvme.File, array: np.ndarray, op: str) -> int:
    return getattr(io, op)(file, array).wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("directory")
    arguments.add_argument("--mib", type=int, default=512)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    nbytes = given.mib << 20

    aligned = deepnvme.empty(nbytes).numpy()
    ordinary = np.empty(nbytes + 8192, np.uint8)
    start = -ordinary.ctypes.data % 4096
    arrays = {
        "aligned, huge pages": aligned,
        "aligned, ordinary pages": ordinary[start:][:nbytes],
        "64 bytes off (bounces)": ordinary[start + 64 :][:nbytes],
    }
    for array in arrays.values():
        array[:] = 1
    found: dict[str, dict[str, list[float]]] = {}
    with deepnvme.File.anonymous(given.directory, size=nbytes) as file:
        with deepnvme.Engine() as io:
            io.write(file, aligned).wait()  # the first write of a place is slower than all others
        for _ in range(given.rounds):
            for mib in (3, 6, 16, 48):
                for name, array in arrays.items():
                    if mib != 6 and "bounces" not in name:
                        continue
                    with deepnvme.Engine(bounce_buffers=mib) as io:
                        io.read(file, array[: 64 << 20]).wait()  # the pool's first touch
                        for op in ("read", "write"):
                            gigabytes_per_second, cpu = rate_and_cpu(functools.partial(moved, io, file, array, op))
                            entry = found.setdefault(f"{op}, {name}, {mib} MiB", {"rate": [], "cpu": []})
                            entry["rate"].append(gigabytes_per_second)
                            entry["cpu"].append(cpu)
    report = {
        name: {
            "gigabytes_per_second": statistics.median(entry["rate"]),
            "cpu_seconds_per_gigabyte": statistics.median(entry["cpu"]),
        }
        for name, entry in found.items()
    }
    put(report, None)


if __name__ == "__main__":
    main()
