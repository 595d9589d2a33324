"""The memory wall: how much larger than the memory may a model be? A few steps inside a memory cgroup. Needs root.

    python packages/zinf/benchmarks/memory_wall.py --nvme DIR --limit 2GiB --model gpt:layers=22,hidden=2048,heads=16
        [--seq 128] [--batch 1] [--steps 3] [--overlap backward|next-forward|false] [--grads nvme] [--ranks 2]
        [--json F]

Everything is on the drive (preset inf-nvme, nothing resident), and the budgets are zinf's own choice. `states` are 20
bytes a parameter, as the paper counts model states (equation 2); how many times the limit they are is the height of
the wall. The cgroup counts all memory of all processes, page cache included.
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

PAPER_BYTES = 20  # of model states a parameter, mixed precision with Adam


def train(given: argparse.Namespace) -> None:
    """Builds and takes the steps; one JSON line each, by rank 0."""
    import torch

    import zinf
    from zinf.models.gpt import GPT
    from zinf.models.model_names import parse_model
    from zinf.training.ranks import Ranks
    from zinf.training.summary import peak_process_bytes

    ranks = Ranks.join()
    torch.manual_seed(0)
    sizes = parse_model(given.model, positions=given.seq)
    changes: dict[str, Any] = {"grads": given.grads} if given.grads else {}
    overlap = False if given.overlap == "false" else given.overlap
    config = zinf.Config.preset("inf-nvme", nvme=[given.nvme], resident=0, overlap_optimizer=overlap, **changes)

    def tell(**values: Any) -> None:
        if ranks.is_first:
            print(json.dumps(values), flush=True)

    tell(before=peak_process_bytes())
    started = time.perf_counter()
    with zinf.init(config):
        model = GPT(sizes)
    optimizer = zinf.AdamW(model.parameters(), lr=1e-4)
    tell(built=time.perf_counter() - started, process=peak_process_bytes(), file=file_pages())
    for _ in range(given.steps):
        tokens = torch.randint(0, sizes.vocab, (given.batch, given.seq + 1))
        started = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - started
        report = zinf.report(model)
        tell(
            loss=loss.item(), step=seconds, seconds=report["seconds"], bytes=report["bytes"],
            prefetch=report["prefetch"], process=peak_process_bytes(), file=file_pages(),
        )  # fmt: skip
    ranks.leave()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The record of one run inside the cgroup."""
    from deepnvme.sizes import parse_size
    from zinf.models.model_names import parse_model

    limit, numel = parse_size(given.limit), parse_model(given.model, positions=given.seq).numel
    with tempfile.TemporaryDirectory(dir=given.nvme) as drive:
        launcher = [] if given.ranks == 1 else _torchrun(given.ranks)
        flags = ["--nvme", drive, "--limit", given.limit, "--model", given.model, "--overlap", given.overlap]
        flags += ["--seq", str(given.seq), "--batch", str(given.batch), "--steps", str(given.steps)]
        flags += ["--grads", given.grads] if given.grads else []
        command = [sys.executable, *launcher, __file__, *flags, "--inside"]
        outcome = run_inside(limit, command, timeout=given.timeout)
    lines = [json.loads(line) for line in outcome.output.splitlines() if line.startswith("{")]
    steps = [line for line in lines if "step" in line]
    record = {
        "settings": {key: value for key, value in vars(given).items() if key not in ("json", "inside", "nvme")},
        "parameters": numel,
        "states_bytes": PAPER_BYTES * numel,
        "states_over_limit": PAPER_BYTES * numel / limit,
        "status": outcome.status,
        "killed": outcome.killed,
        "cgroup_peak_bytes": outcome.peak,
        "process_bytes_before": lines[0]["before"] if lines else None,
        "build_seconds": next((line["built"] for line in lines if "built" in line), None),
        "steps": [
            {
                **{key: line[key] for key in ("loss", "seconds", "prefetch", "file")},
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
    parser.add_argument("--overlap", default="backward", choices=["backward", "next-forward", "false"])
    parser.add_argument("--grads", choices=["cpu", "nvme"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for the whole run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        train(given)
        return
    record = measure(given)
    text = json.dumps(record, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text)


if __name__ == "__main__":
    main()
