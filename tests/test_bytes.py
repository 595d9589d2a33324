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
    (FP32, "next-forward", "cpu"): (16, 12),  # the parameter is the master
    (FP32, "backward", "cpu"): (16, 12),
    (FP32, False, "cpu"): (20, 12),
    (FP16, "next-forward", "cpu"): (14, 14),  # the master is read, and its float16 copy written
    (FP16, "backward", "cpu"): (16, 14),
    (FP16, False, "cpu"): (16, 14),
}

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
    spared = dtype.itemsize / LAYERS  # the layer that forward ends with may be there still when backward begins
    assert read - spared <= reported[0] <= read
    if dtype is BF16:
        assert reported[0] == pytest.approx(read, rel=0.02)
    assert reported[1] == written
    assert kernel == pytest.approx(reported, rel=0.02)


# -- adapters on a frozen model --------------------------------------------------------------------------------

RANK = 8


class Adapted(nn.Module):
    """A frozen linear layer and a product of two narrow matrices beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, 2 * WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, 2 * WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh((self.frozen(x) + self.up(self.down(x))).view(*x.shape, 2).sum(-1))


def build_adapted(nvme, place, overlap="next-forward"):
    torch.manual_seed(0)
    unit = WIDTH * WIDTH * 2 * BF16.itemsize
    settings = {"unit_size": unit, "device_memory": unit, "resident": 0, "overlap_optimizer": overlap}
    cfg = zinf.Config(params=place, grads="cpu", optimizer=place, nvme=[nvme], dtype=BF16, **settings)
    model = zinf.shard(nn.Sequential(*[Adapted() for _ in range(LAYERS)]), cfg)
    return model, zinf.AdamW([p for p in model.parameters() if p.requires_grad], **SETTINGS)


def adapted_losses(model, optimizer, steps=4):
    """Batches of one row; the first layer's input needs no gradient, as with a real model."""
    losses = []
    for number in range(steps):
        x = torch.randn(1, WIDTH, dtype=BF16, generator=torch.Generator().manual_seed(number))
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("overlap", ["next-forward", "backward", False])
def test_a_frozen_parameter_under_adapters_is_read_twice_and_never_written(nvme, overlap):
    """2 bytes forward and 2 backward; the first layer's, whose input needs no gradient, only forward."""
    model, optimizer = build_adapted(nvme, "nvme", overlap)
    frozen = sum(unit.numel for unit in zero3.units(model) if not unit.trainable)
    trained = sum(unit.partition.shard_numel for unit in zero3.units(model) if unit.trainable)
    adapted_losses(model, optimizer, steps=2)
    before, steps = kernel_bytes(), 4
    for number in range(steps):
        adapted_losses(model, optimizer, steps=1)
        reported = zinf.report(model)["bytes"]
        kinds = reported["by_kind"]
        assert kinds["parameters"]["written"] + kinds["optimizer"]["written"] == 12 * trained, number
        assert kinds["optimizer"]["read"] == 10 * trained
        of_frozen = reported["nvme_read"] - kinds["optimizer"]["read"]
        assert 4 * frozen * (1 - 1 / LAYERS) <= of_frozen <= 4 * frozen + 4 * trained
    read, written = (after - b for after, b in zip(kernel_bytes(), before, strict=True))
    assert written <= steps * 12 * trained * 1.05  # and nothing of what is frozen
    assert read <= steps * (4 * frozen + 14 * trained) * 1.05


def test_adapters_on_a_drive_train_as_in_memory_bit_for_bit(nvme):
    wanted = adapted_losses(*build_adapted(nvme, "device"), steps=6)
    for overlap in ("next-forward", "backward", False):
        assert adapted_losses(*build_adapted(nvme, "nvme", overlap), steps=6) == wanted
    assert len(set(wanted)) == 6
