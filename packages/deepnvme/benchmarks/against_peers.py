"""Each backend of deepnvme, and DeepSpeed's aio_handle where it is installed, beside the default engine. JSON.

    DS_ACCELERATOR=cpu GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/against_peers.py DIR [--gib 1]

One file is read and overwritten whole by each in turn, round by round; a ratio is to the default engine's rate in the
same round, so 1.0 is ours. DeepSpeed runs with its locked tensor and hand-tuned settings, with its defaults, and with
an ordinary tensor; ours with an aligned buffer and with an ordinary tensor. The tunable gives DeepSpeed's memory the
huge pages that our buffers ask for by themselves. deepspeed builds its operator at its first use, which takes minutes.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Callable

import numpy as np
from figures import put, rate_and_cpu, spread

import deepnvme
from deepnvme.bench.sweep import Workspace

Move = Callable[[str], int]  # op -> bytes, of the whole file


def of_engine(space: Workspace, array: np.ndarray, backend: str) -> Move:
    io, file = deepnvme.Engine(backend), deepnvme.File(space.path, "r+")

    def move(op: str) -> int:
        return getattr(io, op)(file, array).wait()

    return move


def of_deepspeed(space: Workspace, block: int, depth: int, threads: int, locked: bool) -> Move:
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load().aio_handle(block, depth, False, True, threads)
    tensor = torch.empty(space.size, dtype=torch.uint8)
    if locked:
        tensor = handle.new_cpu_locked_tensor(space.size, tensor)
    tensor.fill_(1)
    path = str(space.path)

    def move(op: str) -> int:
        start = handle.async_pread if op == "read" else handle.async_pwrite
        if start(tensor, path, 0) != 0 or handle.wait() != 1:
            raise OSError(f"DeepSpeed could not {op}")
        return space.size

    return move


def contestants(space: Workspace) -> dict[str, Move]:
    aligned = deepnvme.empty(space.size).numpy()
    aligned[:] = 1
    ordinary = np.ones(space.size, np.uint8)
    found = {"auto": of_engine(space, aligned, "auto")}
    found |= {name: of_engine(space, aligned, name) for name, state in deepnvme.backends().items() if state == "ok"}
    found["ordinary tensor"] = of_engine(space, ordinary, "auto")
    try:
        found["deepspeed 8M depth 32, 2 threads"] = of_deepspeed(space, 8 << 20, 32, 2, True)
        found["deepspeed 1M depth 8, 1 thread"] = of_deepspeed(space, 1 << 20, 8, 1, True)
        found["deepspeed ordinary tensor"] = of_deepspeed(space, 8 << 20, 32, 2, False)
    except ImportError as e:
        print(f"without DeepSpeed: {e}", file=sys.stderr)
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("directory")
    arguments.add_argument("--gib", type=float, default=1)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--json")
    given = arguments.parse_args()
    result: dict = {"settings": vars(given), "read": {}, "write": {}}
    with Workspace(given.directory, int(given.gib * (1 << 30))) as space:
        moves = contestants(space)
        for op in ("read", "write"):
            rates: dict[str, list[float]] = {name: [] for name in moves}
            cpus: dict[str, list[float]] = {name: [] for name in moves}
            for _ in range(given.rounds):
                for name in random.sample(list(moves), len(moves)):
                    rate, cpu = rate_and_cpu(functools.partial(moves[name], op))
                    rates[name].append(rate)
                    cpus[name].append(cpu)
            result[op] = {
                name: {
                    "of auto": spread([rate / ours for rate, ours in zip(rates[name], rates["auto"], strict=True)]),
                    "gigabytes_per_second": spread(rates[name]),
                    "cpu_seconds_per_gigabyte": spread(cpus[name]),
                }
                for name in moves
            }
    put(result, given.json)


if __name__ == "__main__":
    main()
