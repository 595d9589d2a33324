"""What misaligned memory and checksums cost: beside direct transfers, reading and writing, for several pools. JSON.

What bounces and checksums cannot be much cheaper than stands beside them, done by NumPy piece by piece: `copy` moves
the misaligned array out of, or into, a buffer of the pool's size that stays in the cache; `look` looks at every byte of
the aligned array once. `alone` is without any drive; `beside` goes at the drive's pace while that moves the aligned
array, whose CPU time counts too: where the drive is a program of the host's, both meet in memory. `of_aligned` and
`more_cpu` compare with the aligned array moved right before.

    python benchmarks/bounce_cost.py DIR [--mib 512] [--rounds 5]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
from figures import put, rate_and_cpu

import deepnvme

_PIECE = 1 << 20  # as large as a bounced piece is
_PART = 64 << 20  # what the drive is given at once


def moved(io: deepnvme.Engine, file: deepnvme.File, array: np.ndarray, op: str, checksum: bool = False) -> int:
    return getattr(io, op)(file, array, checksum=checksum).wait()


def moved_beside(
    io: deepnvme.Engine, file: deepnvme.File, array: np.ndarray, op: str, work: Callable[[slice], int], rate: float
) -> int:
    """The drive moves `array` while this thread does `work` with part after part, at `rate` GB/s."""
    request = getattr(io, op)(file, array)
    started = time.perf_counter()
    for start in range(0, array.nbytes, _PART):
        time.sleep(max(0, started + start / 1e9 / rate - time.perf_counter()))
        work(slice(start, start + _PART))
    return request.wait()


def looked_at(array: np.ndarray, part: slice = slice(None)) -> int:
    """Every byte once, by NumPy's fastest way of looking."""
    array = array[part]
    for start in range(0, array.nbytes, _PIECE):
        np.bitwise_xor.reduce(array[start : start + _PIECE].view(np.uint64))
    return array.nbytes


def copied(array: np.ndarray, pool: np.ndarray, op: str, part: slice = slice(None)) -> int:
    """As the bounces of a transfer copy: pieces that go round the pool."""
    array = array[part]
    for start in range(0, array.nbytes, _PIECE):
        outside = array[start : start + _PIECE]
        inside = pool[start % pool.nbytes :][: outside.nbytes]
        target, source = (outside, inside) if op == "read" else (inside, outside)
        np.copyto(target, source)
    return array.nbytes


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
    found: dict[str, list[dict[str, float]]] = {}

    def take(name: str, move: Callable[[], int], aligned: tuple[float, float] | None = None) -> tuple[float, float]:
        rate, cpu = rate_and_cpu(move)
        figures = {"gigabytes_per_second": rate, "cpu_seconds_per_gigabyte": cpu}
        if aligned:
            figures |= {"of_aligned": rate / aligned[0], "more_cpu": cpu - aligned[1]}
        found.setdefault(name, []).append(figures)
        return rate, cpu

    with deepnvme.File.anonymous(given.directory, size=nbytes) as file:
        with deepnvme.Engine() as io:
            io.write(file, aligned).wait()  # the first write of a place is slower than all others
        pool = deepnvme.empty(6 << 20).numpy()
        pool[:] = 1
        for _ in range(given.rounds):
            with deepnvme.Engine() as io:
                for op in ("read", "write"):
                    works = {
                        "copy": functools.partial(copied, arrays["64 bytes off (bounces)"], pool, op),
                        "look": functools.partial(looked_at, aligned),
                    }
                    one = functools.partial(moved, io, file, aligned, op)
                    for name, work in works.items():
                        take(f"{op}, {name} alone", work)
                        plain = take(f"{op}, aligned", one)
                        both = functools.partial(moved_beside, io, file, aligned, op, work, plain[0])
                        take(f"{op}, {name} beside", both, plain)
                    plain = take(f"{op}, aligned", one)
                    take(f"{op}, aligned, checksum", functools.partial(one, checksum=True), plain)
            for mib in (3, 6, 16, 48):
                for name, array in arrays.items():
                    if mib != 6 and "bounces" not in name:
                        continue
                    with deepnvme.Engine(bounce_buffers=mib) as io:
                        io.read(file, array[: 64 << 20]).wait()  # the pool's first touch
                        for op in ("read", "write"):
                            take(f"{op}, {name}, {mib} MiB", functools.partial(moved, io, file, array, op))
    report = {
        name: {figure: statistics.median(one[figure] for one in rounds) for figure in rounds[0]}
        for name, rounds in found.items()
    }
    put(report, None)


if __name__ == "__main__":
    main()
