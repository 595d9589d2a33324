"""Figure 6b in kind: the largest hidden size on a device that has no contiguous stretch above N bytes.

    python packages/zinf/benchmarks/largest_hidden.py [--contiguous 4MiB] [--tiles 2 4 8 16] [--json F] [--png F]

The model is the paper's operator, linear layers of hidden to 4 hidden and back. Without tiling the largest is h; with
T tiles, each 16 hidden² / T bytes in float32, it should be √T · h; automatic tiling is tried at 8 h. Memory answers
ENOMEM above N bytes (refusing_allocator.py). The paper's row, in powers of two, goes from 8K without tiling to 64K
with 16 tiles. The picture, needing matplotlib, shows both by what they multiply.
"""

from __future__ import annotations

import argparse
import math
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from record import put
from refusing_allocator import preloaded, refuse_above
from torch import nn

import zinf
from zero3.unit_grouping import parse_size

STEP = 64  # of the search
PAPER = {1: 8 << 10, 16: 64 << 10}  # Figure 6b; of 2, 4 and 8 tiles its text gives two sets of figures
SLACK = 64 << 10  # bytes that an allocator adds for alignment


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contiguous", type=parse_size, default=4 << 20)
    parser.add_argument("--tiles", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--preloaded", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.preloaded:
        return run_preloaded(sys.argv[1:] if argv is None else argv)
    record = measure(options.contiguous, options.tiles)
    put(record, options.json)
    if options.png:
        draw(record, options.png)
    return 0


def draw(record: dict[str, Any], path: Path) -> None:
    """Largest hidden sizes by tiles, ours and the paper's, over those without tiling."""
    from matplotlib.figure import Figure

    whole = record["without_tiling"]
    ours = {1: 1.0} | {count: row["hidden"] / whole for count, row in record["with_tiles"].items()}
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).add_subplot()
    axes.loglog(list(ours), [math.sqrt(count) for count in ours], ":", color="grey", label="√T", base=2)
    axes.loglog(list(ours), list(ours.values()), "o-", label=f"zinf, over {whole} without tiling", base=2)
    axes.loglog(list(PAPER), [hidden / PAPER[1] for hidden in PAPER.values()], "s", label="paper, over 8K", base=2)
    axes.set(xlabel="tiles T", ylabel="largest hidden size / that without tiling")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend()
    figure.savefig(path, dpi=120)


def run_preloaded(argv: list[str]) -> int:
    """This script again, with the allocator."""
    with preloaded() as environment:
        command = [sys.executable, __file__, *argv, "--preloaded"]
        return subprocess.run(command, env=environment, check=False).returncode


def measure(contiguous: int, tiles: list[int]) -> dict[str, Any]:
    """Largest hidden sizes, and whether automatic tiling trains at 8 times the one without tiling."""
    trains(STEP)  # what is allocated once a process: the probe of the memory's bandwidth, threads
    refuse_above(contiguous + SLACK)
    try:
        start = int(math.sqrt(contiguous / 16))
        whole = largest(lambda hidden: trains(hidden, tile_bytes=1 << 60), start)
        rows = {}
        for count in tiles:
            guess = int(start * math.sqrt(count))
            found = largest(lambda hidden, t=count: trains(hidden, tile_bytes=bytes_of_tile(hidden, t)), guess)
            rows[count] = {"hidden": found, "of_sqrt_tiles": found / (math.sqrt(count) * whole)}
        automatic = trains(8 * whole, device_memory=contiguous)
    finally:
        refuse_above(0)
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "torch": torch.__version__},
        "contiguous_bytes": contiguous,
        "without_tiling": whole,
        "with_tiles": rows,
        "automatic_at_8_times": automatic,
    }


def bytes_of_tile(hidden: int, count: int) -> int:
    """Of the larger of both layers' tiles: whole rows, of hidden and of 4 hidden elements."""
    return max(-(-4 * hidden // count) * 4 * hidden, -(-hidden // count) * 16 * hidden)


def largest(fits, guess: int) -> int:
    """The largest multiple of STEP that fits; looked for around `guess`."""
    low, high = 0, max(2 * guess // STEP, 2)  # in steps; `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * STEP) else (low, middle)
    return low * STEP


def trains(hidden: int, **changes: Any) -> bool:
    """Whether construction and two steps get the memory that they ask for."""
    config = zinf.Config.preset("inf-cpu", dtype=torch.float32, overlap_optimizer="backward", **changes)
    try:
        with zinf.init(config):
            model = nn.Sequential(nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False))
        optimizer = zinf.AdamW(model.parameters(), lr=1e-4)
        for _ in range(2):
            model(torch.ones(1, hidden)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except (MemoryError, RuntimeError, OSError) as error:
        if "alloc" not in str(error).lower() and "memory" not in str(error).lower():
            raise
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
