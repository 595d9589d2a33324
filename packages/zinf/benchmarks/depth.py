"""Step time and peak memory by the number of layers, at one width: is time linear, and memory constant?

    python packages/zinf/benchmarks/depth.py --nvme DIR [--layers 6 12 24 48 96] [--hidden 512] [--seq 64] [--steps 3]
        [--overlap backward|next-forward|false] [--grads nvme] [--activations nvme|cpu|none] [--json F]

Everything on NVMe, the inputs of checkpointed blocks included (with "none" each layer's activations stay in memory
until backward, as in plain torch); nothing resident, fixed budgets; each depth in a process of its own. `fit` is the
straight line through the medians by least squares: seconds of a layer and of the rest, and how far the medians lie
from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from record import put, settings
from trainee import OVERLAPS, Trainee

import zinf
from zinf.training.summary import peak_process_bytes


def train(given: argparse.Namespace) -> dict[str, Any]:
    """One depth, in this process."""
    before = peak_process_bytes()
    config = zinf.Config.preset(
        "inf-nvme", nvme=[given.nvme], resident=0, host_memory="512MiB", device_memory="128MiB", grads=given.grads,
        overlap_optimizer=OVERLAPS[given.overlap],
        activations=None if given.activations == "none" else given.activations,
    )  # fmt: skip
    [layers] = given.layers
    heads = max(given.hidden // 64, 1)
    trainee = Trainee(
        config, model=f"gpt:layers={layers},hidden={given.hidden},heads={heads}", batch=given.batch, seq=given.seq
    )
    steps = [trainee.step() for _ in range(1 + given.steps)][1:]
    return {
        "layers": layers,
        "parameters": trainee.sizes.numel,
        "seconds": statistics.median(step.seconds for step in steps),
        "host_pool_bytes": max(step.report["peak"]["host"] for step in steps),
        "gathered_bytes": max(step.report["peak"]["device"] for step in steps),
        "process_bytes": peak_process_bytes() - before,
    }


def in_a_process_of_its_own(given: argparse.Namespace, layers: int, drive: str) -> dict[str, Any]:
    flags = ["--nvme", drive, "--hidden", given.hidden, "--seq", given.seq, "--batch", given.batch]
    flags += ["--steps", given.steps, "--overlap", given.overlap, "--layers", layers, "--inside"]
    flags += ["--activations", given.activations, *(["--grads", given.grads] if given.grads else [])]
    done = subprocess.run([sys.executable, __file__, *map(str, flags)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def line(rows: list[dict[str, Any]]) -> dict[str, float]:
    layers = np.array([row["layers"] for row in rows], float)
    seconds = np.array([row["seconds"] for row in rows])
    slope, offset = np.polyfit(layers, seconds, 1)
    return {
        "seconds_a_layer": slope,
        "seconds_of_the_rest": offset,
        "largest_distance": float(np.abs(slope * layers + offset - seconds).max() / seconds.max()),
        "correlation": float(np.corrcoef(layers, seconds)[0, 1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="a directory of the drive")
    parser.add_argument("--layers", nargs="+", type=int, default=[6, 12, 24, 48, 96])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--overlap", default="backward", choices=list(OVERLAPS))
    parser.add_argument("--grads", choices=["cpu", "nvme"])
    parser.add_argument("--activations", default="nvme", choices=["nvme", "cpu", "none"], help="none: no checkpointing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(train(given)))
        return
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="depth-") as drive:
        rows = [in_a_process_of_its_own(given, layers, drive) for layers in given.layers]
    put({"settings": settings(given), "depths": rows, "fit": line(rows)}, given.json)


if __name__ == "__main__":
    main()
