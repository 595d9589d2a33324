"""How close a step with everything on NVMe comes to the limit of processor and drive, as ratios in one run.

    python packages/zinf/benchmarks/against_limit.py --nvme DIR [--model gpt:layers=24,hidden=1024,heads=16]
        [--batch 1] [--seq 128] [--steps 5] [--modes backward next-forward false] [--checksum]
        [--link 500MiB] [--json F]

Steps of the same model alternate: all in memory (preset zero3), then all on NVMe in each mode of overlap_optimizer. The
limit of a step is the sum over forward, backward and update of the larger of two: what that phase takes with everything
in memory, and its bytes (the kernel's count) over what fio moves at the phase's mix of reads and writes (as much as
there are of both at fio's rate for half and half, the rest at its rate for one alone). `of_limit` is the step over that
limit, `of_memory` the step over the same step in memory: what offloading costs when computation hides it.

That limit takes for granted that neither slows the other. On a virtual machine whose host copies every byte of the
drive on the same cores and memory, they do: `together` is what is left of the speed of computation and of drive while
fio moves half and half beside the steps in memory, `of_limit_together` the step over the limit at those speeds.
With `--link` (needs root) a control group holds the drive to so many bytes a second, one that takes few of the cores'
cycles: what is above the limit then is what the schedule does not hide.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cgroups import add_link, go_on_link
from record import put, settings
from trainee import OVERLAPS, PHASES, Step, Trainee, in_turn, same_losses, steps_parser

import zinf
from deepnvme.bench import fio
from deepnvme.bench.sweep import Point, Workspace

BLOCK_AND_DEPTH = (4 << 20, 16)  # the best of fio's own sweep on the drives that were tried
FILE = 1 << 30


def drive_rates(directory: str) -> dict[str, float]:
    """Bytes a second that fio reads, overwrites, and does half of each; medians of three."""
    with Workspace(directory, FILE) as space:
        taken: dict[str, list[float]] = {"read": [], "write": [], "mixed": []}
        for _ in range(3):
            for op, rates in taken.items():
                found = fio.measure(space, Point(op, "io_uring", *BLOCK_AND_DEPTH), 2)
                rates.append(found["gigabytes_per_second"] * 1e9)
    return {op: statistics.median(rates) for op, rates in taken.items()}


def drive_seconds(moved: dict[str, float], rates: dict[str, float]) -> float:
    """The least time in which the drive does these reads and writes together."""
    both = min(moved["read"], moved["written"])
    alone = (moved["read"] - both) / rates["read"] + (moved["written"] - both) / rates["write"]
    return 2 * both / rates["mixed"] + alone


def speeds_together(trainee: Trainee, directory: str, mixed: float) -> dict[str, float]:
    """What is left of the speed of computation and of drive (`mixed` bytes a second alone) when both run."""
    trainee.step()
    alone = statistics.median(trainee.step().seconds for _ in range(3))
    with Workspace(directory, FILE) as space, ThreadPoolExecutor(1) as beside:
        found = beside.submit(fio.measure, space, Point("mixed", "io_uring", *BLOCK_AND_DEPTH), 6 * alone)
        seconds = []
        while not found.done():
            seconds.append(trainee.step().seconds)
        rate = found.result()["gigabytes_per_second"] * 1e9
    # The last of them went on when fio had ended.
    return {"computation": alone / statistics.median(seconds[:-1] or seconds), "drive": rate / mixed}


def seconds_together(compute: float, drive: float, speeds: dict[str, float]) -> float:
    """The least time for what takes so long alone, when each slows the other while both run."""
    both = min(compute / speeds["computation"], drive / speeds["drive"])
    return both + max(compute - both * speeds["computation"], drive - both * speeds["drive"])


def medians(steps: list[Step]) -> dict[str, Any]:
    return {
        "seconds": statistics.median(step.seconds for step in steps),
        "phases": {name: statistics.median(step.phases[name] for step in steps) for name in PHASES},
        "moved": {
            name: {way: statistics.median(step.moved[name][way] for step in steps) for way in ("read", "written")}
            for name in PHASES
        },
    }


def compare(
    memory: dict[str, Any], steps: list[Step], rates: dict[str, float], speeds: dict[str, float], numel: int
) -> dict[str, Any]:
    """A mode's medians beside the limit."""
    found = medians(steps)
    drive = {name: drive_seconds(found["moved"][name], rates) for name in PHASES}
    limit = sum(max(memory["phases"][name], drive[name]) for name in PHASES)
    together = sum(seconds_together(memory["phases"][name], drive[name], speeds) for name in PHASES)
    return {
        "seconds": {"median": found["seconds"], "all": [step.seconds for step in steps], "phases": found["phases"]},
        "limit": {"seconds": limit, "seconds_together": together, "drive": drive},
        "of_limit": found["seconds"] / limit,
        "of_limit_together": found["seconds"] / together,
        "of_memory": found["seconds"] / memory["seconds"],
        "drive_share_of_compute": sum(drive.values()) / memory["seconds"],
        "stall_share": statistics.median(step.report["seconds"]["stall"] / step.seconds for step in steps),
        "bytes_a_parameter": {
            way: sum(found["moved"][name][way] for name in PHASES) / numel for way in ("read", "written")
        },
    }


def main() -> None:
    parser = steps_parser(__doc__, model="gpt:layers=24,hidden=1024,heads=16", batch=1, steps=5)
    add_link(parser)
    given = parser.parse_args()
    go_on_link(given)
    if reason := fio.why_not():
        sys.exit(reason)
    sizes = {"model": given.model, "batch": given.batch, "seq": given.seq}
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="against-limit-") as drive:
        rates = drive_rates(drive)
        in_memory = zinf.Config.preset("zero3", overlap_optimizer=False)
        speeds = speeds_together(Trainee(in_memory, **sizes), drive, rates["mixed"])
        trainees = {"memory": Trainee(in_memory, **sizes)}
        for mode in given.modes:
            config = zinf.Config.preset(
                "inf-nvme", nvme=[drive], resident=0, checksum=given.checksum,
                overlap_optimizer=OVERLAPS[mode],
            )  # fmt: skip
            trainees[mode] = Trainee(config, **sizes)
        taken = in_turn(trainees, 1 + given.steps)
    steps = {name: of_one[1:] for name, of_one in taken.items()}
    memory, numel = medians(steps["memory"]), trainees["memory"].sizes.numel
    record = {
        "settings": settings(given),
        "parameters": numel,
        "fio_bytes_per_second": rates,
        "together": speeds,
        "same_losses": same_losses(taken.values()),
        "memory": {"seconds": memory["seconds"], "phases": memory["phases"]},
        "modes": {mode: compare(memory, steps[mode], rates, speeds, numel) for mode in given.modes},
    }
    put(record, given.json)


if __name__ == "__main__":
    main()
