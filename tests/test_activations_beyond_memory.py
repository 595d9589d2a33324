"""Activation checkpoints that are four times what memory there is (paper, 5.1.2; to NVMe, which it leaves open)."""

from __future__ import annotations

import sys

import pytest
from memory_cgroup import run_inside

LIMIT = 768 << 20
BLOCKS, TOKENS, WIDTH = 96, 65536, 128

TRAINED = f"""
import sys, torch, zinf
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(2)
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.Tanh()) for _ in range({BLOCKS})])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
drive, activations = sys.argv[1:]
config = zinf.Config.preset("inf-nvme", nvme=[drive], resident=0, dtype=torch.float32, activations=activations)
with zinf.init(config):
    model = Deep()
optimizer = zinf.AdamW(model.parameters(), lr=1e-3)
x = torch.randn({TOKENS}, {WIDTH})
loss = model(x)
loss.backward()
optimizer.step()
optimizer.zero_grad()
with torch.no_grad():
    print(loss.item().hex(), model(x).item().hex(), zinf.report(model)["bytes"]["by_kind"]["activations"]["written"])
"""


@pytest.mark.slow
@pytest.mark.root
def test_four_times_the_memory_in_activations_trains_with_the_losses_of_memory(nvme, run_python):
    """Each block's input is 32 MiB, and all of them 3 GiB, in a memory cgroup of 768 MiB."""
    inputs = BLOCKS * TOKENS * WIDTH * 4
    assert inputs == 4 * LIMIT
    outcome = run_inside(LIMIT, [sys.executable, "-c", TRAINED, str(nvme), "nvme"], timeout=200)
    assert (outcome.status, outcome.killed) == (0, 0), outcome.errors
    *losses, written = outcome.output.split()
    assert int(written) >= inputs - inputs // BLOCKS
    assert losses == run_python(TRAINED, nvme, "cpu", timeout=200).split()[:2]
