"""Does training from the drive converge as training in memory does? Loss curves on the built-in text, same batches.

    python packages/zinf/benchmarks/convergence.py --nvme DIR [--model gpt:layers=8,hidden=512,heads=8] [--steps 200]
        [--batch 4] [--seq 128] [--lr 3e-4] [--runs zinf torch-bf16 torch-fp32] [--json F] [--png F]

    zinf         this package: everything on NVMe, bf16 parameters whose float32 master is split between two tensors
    torch-bf16   plain torch: parameters and states of torch.optim.AdamW in bf16
    torch-fp32   plain torch in float32

All start from the same values, which the second rounds to bf16, and take the same schedule: a linear warm-up over a
tenth of the steps, then a cosine to a tenth of `--lr`. With --json, runs that the file holds already are kept, so that
they can be made one by one. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import put, settings
from torch import Tensor, nn

import zinf
from zinf.models.gpt import GPT
from zinf.models.model_names import parse_model
from zinf.training.byte_gpt import ByteGPT
from zinf.training.text_source import BUILTIN
from zinf.training.token_data import training_batch, validation_batches

ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_SMOOTH = 10  # steps over which the picture's curves are averaged
_LABELS = {
    "zinf": "everything on NVMe, bf16 with split master",
    "torch-bf16": "torch bf16 AdamW",
    "torch-fp32": "torch fp32 AdamW",
}


def zinf_run(given: argparse.Namespace, drive: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    with zinf.init(zinf.Config.preset("inf-nvme", nvme=[drive], resident=0, grads="nvme")):
        model = GPT(parse_model(given.model, positions=given.seq))
    return model, zinf.AdamW(model.parameters(), lr=given.lr, **ADAMW)


def torch_run(given: argparse.Namespace, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GPT(parse_model(given.model, positions=given.seq)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=given.lr, **ADAMW)


RUNS = {
    "zinf": zinf_run,
    "torch-bf16": lambda given, _: torch_run(given, torch.bfloat16),
    "torch-fp32": lambda given, _: torch_run(given, torch.float32),
}


def learning_rate(step: int, given: argparse.Namespace) -> float:
    """Of `step`, counted from 0."""
    warm_up = max(given.steps // 10, 1)
    if step < warm_up:
        return given.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(given.steps - warm_up, 1)
    return given.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def curve(name: str, given: argparse.Namespace, drive: str) -> dict[str, Any]:
    """Losses of each step, and of the text that nobody trains on at the end."""
    torch.manual_seed(0)
    data = ByteGPT(given.model, BUILTIN, seq=given.seq).data
    model, optimizer = RUNS[name](given, drive)
    losses = []
    for step in range(given.steps):
        tokens, targets = training_batch(data, seed=0, step=step, batch=given.batch, seq=given.seq)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, given)
        loss: Tensor = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        batches = validation_batches(data, batches=16, batch=given.batch, seq=given.seq)
        validation = [model(tokens, targets).item() for tokens, targets in batches]
    return {"losses": losses, "validation": statistics.mean(validation)}


def draw(curves: dict[str, Any], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).add_subplot()
    for name, of_one in curves.items():
        losses, label = of_one["losses"], f"{_LABELS[name]}: {of_one['validation']:.3f}"
        smooth = [statistics.mean(losses[max(0, i + 1 - _SMOOTH) : i + 1]) for i in range(len(losses))]
        line = "--" if name == "torch-fp32" else "-"  # it would cover the one beneath
        axes.plot(range(1, len(losses) + 1), smooth, line, label=label, linewidth=1.2)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, nats a byte (mean of {_SMOOTH} steps)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(title="validation loss at the end")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="a directory of the drive")
    parser.add_argument("--model", default="gpt:layers=8,hidden=512,heads=8")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    asked = {key: value for key, value in settings(given).items() if key not in ("runs", "png")}
    curves: dict[str, Any] = {}
    if given.json and given.json.exists():
        earlier = json.loads(given.json.read_text())
        if earlier["settings"] != asked:
            parser.error(f"{given.json} holds runs with other settings")
        curves = earlier["curves"]
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="convergence-") as drive:
        curves |= {name: curve(name, given, drive) for name in given.runs}
    numel = parse_model(given.model, positions=given.seq).numel
    last = given.steps // 10
    record = {
        "settings": asked,
        "parameters": numel,
        "curves": curves,
        "last_tenth": {name: statistics.mean(of_one["losses"][-last:]) for name, of_one in curves.items()},
    }
    if {"zinf", "torch-fp32"} <= curves.keys():
        both = zip(curves["zinf"]["losses"], curves["torch-fp32"]["losses"], strict=True)
        record["largest_distance_from_fp32"] = max(abs(one - other) for one, other in both)
    put(record, given.json)
    if given.png:
        draw(curves, f"GPT of {numel / 1e6:.0f} million parameters, {given.batch * given.seq} bytes a step", given.png)


if __name__ == "__main__":
    main()
