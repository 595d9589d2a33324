"""Bytes are the speed: what a step moves, counted by the report and by the kernel, against DESIGN.md section 6."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from zinf_testing import SETTINGS

import zero3
import zinf

# Read and written bytes per trained parameter, everything on nvme, one rank.
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
EXPECTED = {
    # (dtype, overlap, grads): (read, written)
    (BF16, "next-forward", "cpu"): (14, 12),
    (BF16, "backward", "cpu"): (14, 12),
    (BF16, False, "cpu"): (16, 12),
    (BF16, "next-forward", "nvme"): (16, 14),
    (BF16, False, "nvme"): (18, 14),
}
MOST = {BF16: 28, FP32: 36, FP16: 34}

WIDTH, LAYERS = 512, 6


class Wide(nn.Module):
    """Layers of 1 MiB in bfloat16 and a multiple of 4 KiB: padding does not count."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x).view(*x.shape, 2).sum(-1))
        return x


def build(nvme, dtype=BF16, grads="cpu", **changes):
    torch.manual_seed(0)
    unit = WIDTH * WIDTH * 2 * dtype.itemsize
    settings = {"unit_size": unit, "device_memory": unit, "resident": 0, **changes}
    cfg = zinf.Config.preset("inf-nvme", nvme=[nvme], grads=grads, dtype=dtype, **settings)
    model = zinf.shard(Wide(), cfg)
    return model, zinf.AdamW(model.parameters(), **SETTINGS)


def step(model, optimizer, inputs=1):
    for _ in range(inputs):
        x = torch.ones(
            1, WIDTH, dtype=zero3.units(model)[0].dtype, requires_grad=True
        )  # so that backward needs all layers
        model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def kernel_bytes():
    """(read, written) that this process caused on drives so far, once nothing is on its way any more."""
    last = None
    while True:
        with open("/proc/self/io") as file:
            counts = dict(line.split(": ") for line in file)
        now = int(counts["read_bytes"]), int(counts["write_bytes"])
        if now == last:
            return now
        last = now
        time.sleep(0.1)


def moved(model, optimizer, steps=4):
    """Bytes a parameter that the steps after the second one move: (read, written) by report, and by the kernel."""
    numel = sum(unit.numel for unit in zero3.units(model))
    for _ in range(2):
        step(model, optimizer)
    before = kernel_bytes()
    reported = [0, 0]
    for _ in range(steps):
        step(model, optimizer)
        moved = zinf.report(model)["bytes"]
        reported[0] += moved["nvme_read"]
        reported[1] += moved["nvme_written"]
    after = kernel_bytes()
    per = numel * steps
    return [count / per for count in reported], [(b - a) / per for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize(("dtype", "overlap", "grads"), EXPECTED, ids=str)
def test_a_step_moves_what_the_design_says(nvme, dtype, overlap, grads):
    model, optimizer = build(nvme, dtype, grads, overlap_optimizer=overlap)
    reported, kernel = moved(model, optimizer)
    read, written = EXPECTED[dtype, overlap, grads]
    assert reported[1] >= 12
    assert reported == pytest.approx([read, written], rel=0.02)
    assert kernel == pytest.approx(reported, rel=0.02)
