"""deepnvme beside fio on the same drive: paired ratios, as JSON.

    python benchmarks/against_fio.py DIR [--gib 2] [--pairs 9] [--runtime 2] [--json FILE]

Sequential read and overwrite with O_DIRECT and default settings of ours, against the best of a few settings of fio
(--time_based, huge pages under both). fio runs right before ours each time, so that a pair meets the drive in one
state. `aligned` is an array of 256 MiB; `as much as fio's` is its first part, as large as fio's buffers are together:
where the drive is a program of the host's, memory that stays in the cache moves faster. `plain` is an ordinary
torch-like tensor (malloc'ed, misaligned, touched before); `plain, small pages` the same, and our own memory too, where
huge pages are forbidden to the process; `checksum` sums up a crc32c on the way. 1.0 is fio's rate; `of_aligned`
compares with the aligned array's rate in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
import time
from collections.abc import Iterator

import numpy as np
from figures import put, rate_and_cpu, spread

import deepnvme
from deepnvme.bench import fio
from deepnvme.bench.sweep import Point, Workspace

FIO_SETTINGS = [(1 << 20, 32), (4 << 20, 16)]  # block, depth: the best of fio's own sweep
PR_SET_THP_DISABLE = 41


@contextlib.contextmanager
def small_pages(wanted: bool = True) -> Iterator[None]:
    """Memory that is touched meanwhile lies on small pages, whatever it asks for."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_THP_DISABLE, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_THP_DISABLE)")
    try:
        yield
    finally:
        libc.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


def misaligned(nbytes: int) -> np.ndarray:
    """As malloc places a large tensor: 64 bytes into a page, on whatever pages the system gives."""
    memory = np.empty(nbytes + 8192, np.uint8)
    start = (64 - memory.ctypes.data) % 4096
    memory[:] = 1
    return memory[start : start + nbytes]


def ours(space: Workspace, array: np.ndarray, op: str, seconds: float, checksum: bool = False) -> tuple[float, float]:
    """(GB/s, CPU s/GB) of whole passes over the file for at least so many seconds."""
    with deepnvme.Engine() as io, deepnvme.File(space.path, "r+") as file:
        io.read(file, array[:4096]).wait()

        def passes() -> int:
            moved, end = 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                for offset in range(0, space.size, array.nbytes):
                    io._submit(op == "write", file, array, offset, checksum)
                    moved += array.nbytes
                io.flush()
            return moved

        return rate_and_cpu(passes)


def small_requests(space: Workspace, array: np.ndarray, op: str, count: int, nbytes: int, depth: int) -> float:
    """GB/s of `count` requests of `nbytes` submitted one by one from Python."""
    with deepnvme.Engine(queue_depth=depth) as io, deepnvme.File(space.path, "r+") as file:
        started = time.perf_counter()
        for i in range(count):
            where = i * nbytes % (space.size - nbytes)
            part = array[where % (array.nbytes - nbytes) // 4096 * 4096 :][:nbytes]
            io._submit(op == "write", file, part, where)
        io.flush()
        return count * nbytes / 1e9 / (time.perf_counter() - started)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("directory")
    arguments.add_argument("--gib", type=float, default=2)
    arguments.add_argument("--pairs", type=int, default=9)
    arguments.add_argument("--runtime", type=int, default=2, help="seconds of each measurement")
    arguments.add_argument("--json")
    given = arguments.parse_args()
    if fio.why_not():
        sys.exit(fio.why_not())
    size = int(given.gib * (1 << 30))
    huge = deepnvme.empty(min(size, 256 << 20)).numpy()
    huge[:] = 1
    with small_pages():
        small = misaligned(huge.nbytes)
    arrays = {
        "aligned": huge,
        "as much as fio's": huge,
        "checksum": huge,
        "plain": misaligned(huge.nbytes),
        "plain, small pages": small,
    }
    result: dict = {"settings": vars(given), "backends": deepnvme.backends(), "sequential": {}, "small": {}}
    with Workspace(given.directory, size) as space:
        for op in ("read", "write"):
            found: dict[str, dict[str, list[float]]] = {
                name: {key: [] for key in ("of_fio", "of_aligned", "gigabytes_per_second", "cpu_seconds_per_gigabyte")}
                for name in arrays
            }
            fio_rates = []
            for pair in range(given.pairs):
                block, depth = FIO_SETTINGS[pair % len(FIO_SETTINGS)]
                for name, array in arrays.items():
                    peer = fio.measure(space, Point(op, "io_uring", block, depth), given.runtime)
                    if name == "as much as fio's":
                        array = array[: block * depth]
                    with small_pages(array is small):
                        rate, cpu = ours(space, array, op, given.runtime, checksum=name == "checksum")
                    fio_rates.append(peer["gigabytes_per_second"])
                    figures = found[name]
                    figures["of_fio"].append(rate / fio_rates[-1])
                    figures["gigabytes_per_second"].append(rate)
                    figures["of_aligned"].append(rate / found["aligned"]["gigabytes_per_second"][-1])
                    figures["cpu_seconds_per_gigabyte"].append(cpu)
            result["sequential"][op] = {
                "fio_gigabytes_per_second": spread(fio_rates),
                **{name: {key: spread(f) for key, f in figures.items()} for name, figures in found.items()},
            }
        for count, nbytes in ((200, 8 << 20), (5000, 64 << 10)):
            for op in ("read", "write"):
                pairs = []
                for _ in range(given.pairs):
                    peer = fio.measure(space, Point(op, "io_uring", nbytes, 64), 1)["gigabytes_per_second"]
                    pairs.append(small_requests(space, huge, op, count, nbytes, 64) / peer)
                result["small"][f"{count} x {nbytes} {op}, of fio at depth 64"] = spread(pairs)
    put(result, given.json)


if __name__ == "__main__":
    main()
