"""Fine-tuning a Hugging Face directory with its states on a drive, against the same steps in plain torch.

    python packages/zinf/benchmarks/against_transformers.py --model DIR --out run --steps 20 [--limit 1GiB]

Prints JSON: losses of both and their largest relative difference, held-out loss before and after, the loss of the
exported directory in transformers, and the median seconds of a step. `--limit` trains and exports ours inside a memory
cgroup (needs root), where the other would not fit. `--only zinf` stops there; what it finds is kept in `--out`, and
`--only plain` goes on from it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from memory_cgroup import run_inside
from record import put, settings
from torch.nn import functional as F

from deepnvme.sizes import parse_size
from zinf.training.hugging_face import HuggingFaceModel
from zinf.training.preparation import BETAS, WEIGHT_DECAY
from zinf.training.settings import DTYPES
from zinf.training.token_data import training_batch, validation_batches

SEED = 0
VALIDATION_BATCHES = 4


def offloaded(arguments: argparse.Namespace) -> None:
    """`zinf train` and `zinf export` in processes of their own; summary and peak memory go to `--out`."""
    flags = {
        "--model": arguments.model, "--data": arguments.data, "--out": arguments.out / "run", "--seed": SEED,
        "--steps": arguments.steps, "--batch": arguments.batch, "--seq": arguments.seq, "--lr": arguments.lr,
        "--dtype": arguments.dtype, "--warmup": 0, "--decay": 0, "--validation-batches": VALIDATION_BATCHES,
        "--sample-length": arguments.sample_length, "--preset": "inf-nvme",
    }  # fmt: skip
    peaks = {}
    for name, words in (
        ("train", [word for flag in flags.items() for word in flag]),
        ("export", [arguments.out / "run", arguments.out / "exported"]),
    ):
        command = [sys.executable, "-m", "zinf", name, *map(str, words)]
        output, peaks[name] = run(command, arguments.limit)
        (arguments.out / f"{name}.txt").write_text(output)
    (arguments.out / "peaks.json").write_text(json.dumps(peaks))


def run(command: list[str], limit: str | None) -> tuple[str, int | None]:
    """What it printed, and the most memory that its cgroup held, in bytes; None without a limit."""
    if limit is None:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout, None
    outcome = run_inside(parse_size(limit), command, timeout=3600)
    if outcome.status:
        killed = ", killed for want of memory" if outcome.killed else ""
        raise SystemExit(f"{' '.join(command)}: status {outcome.status}{killed}\n{outcome.errors}")
    return outcome.output, outcome.peak


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    # In float64: torch's own in float32 is 5e-6 of the loss too small over 49,152 words.
    return F.cross_entropy(logits.flatten(0, -2).double(), targets.flatten()).float()


@torch.no_grad()
def validation_loss(folder: Path, task: HuggingFaceModel, arguments: argparse.Namespace) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[arguments.dtype])
    batches = validation_batches(task.data, batches=VALIDATION_BATCHES, batch=arguments.batch, seq=arguments.seq)
    return statistics.mean(loss_of(model, *batch).item() for batch in batches)


def plain(task: HuggingFaceModel, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """(losses, seconds) of the steps with torch.optim.AdamW; bf16: on a float32 master, as ours."""
    dtype = DTYPES[arguments.dtype]
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    masters = [param.detach().float().clone() for param in model.parameters()]
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=BETAS, eps=1e-8)
    losses, seconds = [], []
    for step in range(arguments.steps):
        started = time.perf_counter()
        batch = training_batch(task.data, seed=SEED, step=step, batch=arguments.batch, seq=arguments.seq)
        loss = loss_of(model, *batch)
        loss.backward()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                master.grad, param.grad = param.grad.float(), None
            optimizer.step()
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
                master.grad = None
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    return losses, seconds


def compare(arguments: argparse.Namespace) -> dict:
    task = HuggingFaceModel(arguments.model, arguments.data, seq=arguments.seq)
    lines = (arguments.out / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    ours = [record["loss"] for record in records]
    losses, seconds = plain(task, arguments)
    summary = (arguments.out / "train.txt").read_text()
    before, after = map(float, re.search(r"loss: (\S+) before, (\S+) after", summary).groups())
    moved = [record["report"]["bytes"] for record in records]
    return {
        "settings": settings(arguments),
        "parameters": task.numel,
        "cgroup_peak_bytes": json.loads((arguments.out / "peaks.json").read_text()),
        "losses": {"zinf": ours, "plain": losses},
        "largest_relative_difference": max(abs(a - b) / b for a, b in zip(ours, losses, strict=True)),
        "validation": {
            "zinf": {"before": before, "after": after},
            "plain_before": validation_loss(arguments.model, task, arguments),
            "exported_in_transformers": validation_loss(arguments.out / "exported", task, arguments),
        },
        "sample": summary[summary.index("Sample") : summary.index("Model states")].splitlines()[1:-1],
        "median_seconds_per_step": {
            "zinf": statistics.median(record["seconds"] for record in records[1:]),
            "plain": statistics.median(seconds[1:]),
        },
        "bytes_a_parameter": {
            way: statistics.median(nbytes[f"nvme_{way}"] for nbytes in moved) / task.numel
            for way in ("read", "written")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", help="memory for training and export, as 1GiB")
    parser.add_argument("--model", type=Path, required=True, help="a directory in Hugging Face's layout")
    parser.add_argument("--data", default="builtin")
    parser.add_argument("--out", type=Path, required=True, help="a folder on the drive")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--sample-length", type=int, default=24)
    parser.add_argument("--only", choices=["zinf", "plain"])
    parser.add_argument("--json", type=Path, help="also write the record into this file")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only != "plain":
        offloaded(arguments)
    if arguments.only != "zinf":
        put(compare(arguments), arguments.json)


if __name__ == "__main__":
    main()
