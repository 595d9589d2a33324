"""What prefetching earns by batch size, as the paper's Figure 6d: throughput with it over throughput without.

    python packages/zinf/benchmarks/prefetch_gain.py --nvme DIR [--model gpt:layers=12,hidden=768,heads=12]
        [--batches 1 2 4 8 16] [--seq 64] [--pairs 4] [--overlap backward|next-forward|false] [--link 500MiB] [--json F]

Everything on NVMe, nothing resident; steps with and without alternate, and the ratio is the median over pairs. A small
batch computes little for the bytes it needs, so waiting for the drive shows; a large one hides it.

Without prefetch units and the optimizer's states are read when they are needed; writes go on by themselves in both
cases. On a virtual machine whose host copies the drive's bytes on the same cores, overlapping earns less than it hides.
With `--link` (needs root) a control group holds the drive to so many bytes a second, a slow one that takes few of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cgroups import add_link, go_on_link
from record import put, settings, spread
from trainee import OVERLAPS, Trainee

import zinf


def gain(drive: str, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """Of one batch size: the ratio of each pair of steps, and where the time of either went."""
    trainees = {}
    for prefetch in (True, False):
        config = zinf.Config.preset(
            "inf-nvme", nvme=[drive], resident=0, prefetch=prefetch, overlap_optimizer=OVERLAPS[given.overlap],
            host_memory=given.host_memory, device_memory=given.device_memory,
        )  # fmt: skip
        trainees[prefetch] = Trainee(config, model=given.model, batch=batch, seq=given.seq)
        trainees[prefetch].step()  # learns the order of the units
    pairs = []
    for number in range(given.pairs):
        order = (True, False) if number % 2 == 0 else (False, True)  # neither always follows the other's writes
        pairs.append({prefetch: trainees[prefetch].step() for prefetch in order})
    ratios = [pair[False].seconds / pair[True].seconds for pair in pairs]
    return {
        "batch": batch,
        "gain": spread(ratios),
        "seconds": {
            ("with" if prefetch else "without"): statistics.median(pair[prefetch].seconds for pair in pairs)
            for prefetch in trainees
        },
        "stall_share": {
            ("with" if prefetch else "without"): statistics.median(
                pair[prefetch].report["seconds"]["stall"] / pair[prefetch].seconds for pair in pairs
            )
            for prefetch in trainees
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="a directory of the drive")
    parser.add_argument("--model", default="gpt:layers=12,hidden=768,heads=12")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--overlap", default="next-forward", choices=list(OVERLAPS))
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="128MiB")
    add_link(parser)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    go_on_link(given)
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="prefetch-gain-") as drive:
        rows = [gain(drive, batch, given) for batch in given.batches]
    put({"settings": settings(given), "batches": rows}, given.json)


if __name__ == "__main__":
    main()
