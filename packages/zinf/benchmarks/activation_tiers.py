"""What activation checkpoints off the device cost by hidden size, as the paper's Figure 6e: steps over steps on device.

    python packages/zinf/benchmarks/activation_tiers.py --nvme DIR [--hidden 256 512 1024 2048] [--layers 5]
        [--batch 4] [--seq 128] [--rounds 5] [--states nvme --host-memory 1GiB --device-memory 512MiB] [--link 10MiB]
        [--json F]

Parameters and optimizer states stay in memory, or go to the drive where they are too large; every block is
checkpointed, and its input lies on the device, in host memory or on the drive. The three alternate, and a ratio is the
median over rounds. A checkpoint grows with the hidden size, the computation that hides its transfer with the square
of it. With `--link` (needs root) a control group holds the drive to so many bytes a second: one that is slow beside the
computation, as a real drive is beside a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from cgroups import add_link, go_on_link
from record import put, settings, spread
from trainee import Trainee, in_turn, same_losses

import zinf

TIERS = ("device", "cpu", "nvme")


def cost(drive: str, hidden: int, given: argparse.Namespace) -> dict[str, Any]:
    """Of one hidden size: each tier's seconds, and its ratio to the device's in the same round."""
    model = f"gpt:layers={given.layers},hidden={hidden},heads={max(1, hidden // 64)}"
    preset, changes = "zero3", {}
    if given.states == "nvme":
        budgets = {"host_memory": given.host_memory, "device_memory": given.device_memory}
        preset, changes = "inf-nvme", {"overlap_optimizer": "backward", "resident": 0, **budgets}
    trainees = {
        tier: Trainee(
            zinf.Config.preset(preset, nvme=[drive], activations=tier, **changes),
            model=model,
            batch=given.batch,
            seq=given.seq,
        )
        for tier in TIERS
    }
    taken = {tier: steps[1:] for tier, steps in in_turn(trainees, 1 + given.rounds).items()}
    ratios = {
        tier: [step.seconds / device.seconds for step, device in zip(steps, taken["device"], strict=True)]
        for tier, steps in taken.items()
    }
    return {
        "hidden": hidden,
        "parameters": trainees["device"].sizes.numel,
        "same_losses": same_losses(taken.values()),
        "seconds": {tier: statistics.median(step.seconds for step in steps) for tier, steps in taken.items()},
        "slowdown": {tier: spread(of_one) for tier, of_one in ratios.items()},
        "moved_by_nvme": {
            way: statistics.median(sum(phase[way] for phase in step.moved.values()) for step in taken["nvme"])
            for way in ("read", "written")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="a directory of the drive")
    parser.add_argument("--hidden", nargs="+", type=int, default=[256, 512, 1024, 2048])
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--states", choices=["memory", "nvme"], default="memory")
    parser.add_argument("--host-memory")
    parser.add_argument("--device-memory")
    add_link(parser)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    go_on_link(given)
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="activation-tiers-") as drive:
        rows = [cost(drive, hidden, given) for hidden in given.hidden]
    put({"settings": settings(given), "rows": rows}, given.json)


if __name__ == "__main__":
    main()
