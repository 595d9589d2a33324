"""Peak bytes against a written formula, by the pool's count and by the kernel's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zinf_testing import SETTINGS

import zinf

WIDTH = 512
UNIT = WIDTH * WIDTH * 2  # bytes of a gathered layer in bfloat16


def trained(nvme, layers, overlap, grads, steps=3, **changes):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    settings = {"device_memory": 4 * UNIT, "host_memory": "64MiB", "resident": 0, "unit_size": UNIT, **changes}
    model = zinf.shard(
        net, zinf.Config.preset("inf-nvme", nvme=[nvme], grads=grads, overlap_optimizer=overlap, **settings)
    )
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    for _ in range(steps):
        model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def bound(stream):
    """Bytes of the pool at most: gathered units, a unit's flat gradient, gradients on their way out and in, and the
    optimizer's stream. A pooled buffer may be up to twice what is asked of it."""
    gathered, gradient, waiting = 4 * UNIT, UNIT, 3 * UNIT
    return 2 * (gathered + gradient + waiting + stream)


@pytest.mark.parametrize(("overlap", "grads"), [("backward", "cpu"), ("next-forward", "nvme"), (False, "nvme")])
def test_memory_does_not_grow_with_the_number_of_layers(nvme, overlap, grads):
    """What is in use is the same at any depth. The pool keeps no more than twice that: which sizes it has at hand when
    one is asked for is a matter of timing."""
    peaks = {}
    for layers in (8, 32, 96):
        model = trained(nvme, layers, overlap, grads)
        engine = model._zero3_model.store
        pool = engine.tiers.host_pool
        peaks[layers] = pool.peak_in_use
        assert pool.nbytes <= min(2 * pool.peak_in_use, bound(engine.updates.stream.budget))
        assert engine.tiers.of("cpu").nbytes == engine.tiers.of("device").nbytes == 0
        assert zinf.report(model)["peak"]["device"] <= 4 * UNIT
        del model, engine, pool
    assert max(peaks[32], peaks[96]) <= peaks[8] + UNIT


def test_waiting_gradients_in_memory_are_two_bytes_a_parameter(nvme):
    for layers in (4, 8):
        model = trained(nvme, layers, "next-forward", "cpu")
        assert model._zero3_model.store.tiers.of("cpu").nbytes == 2 * layers * WIDTH * WIDTH


BUILT = """
import sys, torch, zinf
from torch import nn
sizes = {"resident": 0, "host_memory": "96MiB", "unit_size": "4MiB"}
cfg = zinf.Config.preset("inf-nvme", nvme=[sys.argv[1]], grads="nvme", **sizes)
torch.optim.SGD([nn.Parameter(torch.ones(8, 8) @ torch.ones(8, 8))])  # what torch itself loads and sets up once
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
before = peak()
with zinf.init(cfg):
    model = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(int(sys.argv[2]))])
optimizer = zinf.AdamW(model.parameters())
print(peak() - before)
"""


# Blocks of this size and more get a mapping of their own and go back when they are freed, so that the kernel's count is
# of what is held, and not of what glibc keeps in its heap for later (up to 40 MB here, different in each run).
HELD = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def test_building_a_model_takes_no_more_memory_than_a_layer_and_the_pool(nvme, run_python):
    """64 layers of 1 million parameters: 256 MB in float32, never there at once."""
    few, many = (int(run_python(BUILT, nvme, layers, environment=HELD, timeout=120)) for layers in (16, 64))
    layer = 4_000_000
    assert many <= few + layer
    assert many < 64 * layer / 6
