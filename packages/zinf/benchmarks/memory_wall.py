"""The memory wall: how much larger than the memory may a model be? A few steps inside a memory cgroup. Needs root.

    python packages/zinf/benchmarks/memory_wall.py --nvme DIR --limit 2GiB --model gpt:layers=22,hidden=2048,heads=16
        [--seq 128] [--batch 1] [--steps 3] [--overlap backward|next-forward|false] [--grads nvme]
        [--activations nvme|cpu|none] [--ranks 2] [--json F]

Everything is on the drive (preset inf-nvme, nothing resident), the inputs of checkpointed blocks included, and the
budgets are zinf's own choice. `states` are 20 bytes a parameter, as the paper counts model states (equation 2); how
many times the limit they are is the height of the wall. The cgroup counts all memory of all processes, page cache
included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memory_cgroup import file_pages, run_inside
from record import put, settings
from trainee import OVERLAPS, Trainee

import zinf
from deepnvme.sizes import parse_size
from zinf.models.model_names import parse_model
from zinf.planner.memory import MODEL_STATE_BYTES
from zinf.training.ranks import Ranks
from zinf.training.summary import peak_process_bytes


def train(given: argparse.Namespace) -> None:
    """Builds and takes the steps; one JSON line each, by rank 0."""
    ranks = Ranks.join()
    config = zinf.Config.preset(
        "inf-nvme", nvme=[given.nvme], resident=0, grads=given.grads, overlap_optimizer=OVERLAPS[given.overlap],
        activations=None if given.activations == "none" else given.activations,
    )  # fmt: skip

    def tell(**values: Any) -> None:
        if ranks.is_first:
            print(json.dumps({**values, "process": peak_process_bytes(), "file": file_pages()}), flush=True)

    tell()
    started = time.perf_counter()
    trainee = Trainee(config, model=given.model, batch=given.batch, seq=given.seq)
    tell(built=time.perf_counter() - started)
    for _ in range(given.steps):
        step = trainee.step()
        report = {key: step.report[key] for key in ("seconds", "bytes", "prefetch")}
        tell(loss=step.loss, step=step.seconds, phases=step.phases, **report)
    ranks.leave()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The record of one run inside the cgroup."""
    limit, numel = parse_size(given.limit), parse_model(given.model, positions=given.seq).numel
    with tempfile.TemporaryDirectory(dir=given.nvme) as drive:
        launcher = [] if given.ranks == 1 else _torchrun(given.ranks)
        flags = ["--nvme", drive, "--limit", given.limit, "--model", given.model, "--overlap", given.overlap]
        flags += ["--seq", str(given.seq), "--batch", str(given.batch), "--steps", str(given.steps)]
        flags += ["--activations", given.activations]
        flags += ["--grads", given.grads] if given.grads else []
        command = [sys.executable, *launcher, __file__, *flags, "--inside"]
        outcome = run_inside(limit, command, timeout=given.timeout)
    lines = [json.loads(line) for line in outcome.output.splitlines() if line.startswith("{")]
    steps = [line for line in lines if "step" in line]
    record = {
        "settings": settings(given),
        "parameters": numel,
        "states_bytes": MODEL_STATE_BYTES * numel,
        "states_over_limit": MODEL_STATE_BYTES * numel / limit,
        "status": outcome.status,
        "killed": outcome.killed,
        "cgroup_peak_bytes": outcome.peak,
        "process_bytes": [line["process"] for line in lines],
        "build_seconds": next((line["built"] for line in lines if "built" in line), None),
        "steps": [
            {
                **{key: line[key] for key in ("loss", "phases", "seconds", "prefetch", "file")},
                "bytes_a_parameter": {
                    way: line["bytes"][f"nvme_{way}"] * given.ranks / numel for way in ("read", "written")
                },
            }
            for line in steps
        ],
    }
    if outcome.status:
        record["errors"] = outcome.errors[-2000:]
    return record


def _torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--limit", default="2GiB")
    parser.add_argument("--model", default="gpt:layers=22,hidden=2048,heads=16")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--overlap", default="backward", choices=list(OVERLAPS))
    parser.add_argument("--grads", choices=["cpu", "nvme"])
    parser.add_argument("--activations", default="nvme", choices=["nvme", "cpu", "none"], help="none: no checkpointing")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the whole run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        train(given)
        return
    record = measure(given)
    put(record, given.json)


if __name__ == "__main__":
    main()
