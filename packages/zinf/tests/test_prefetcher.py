"""Units come ahead of their use, within the budget; a wrong prediction costs a wait and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zinf_testing import config, offloaded, plain, train

import zero3
import zinf
from cpu_adam.torch import CPUAdam
from zinf.config import OVERLAPS


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_from_the_second_step_on_prefetches_hit(nvme, overlap):
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap), layers=6)
    for step in range(5):
        train(model, optimizer, [step])
        counts = zinf.report(model)["prefetch"]
        if step >= 1:
            assert counts["hits"] >= 0.9 * (counts["hits"] + counts["misses"]), step
            assert counts["hits"] > 0


@pytest.mark.parametrize("activations", ["device", "cpu", "nvme"])
def test_blocks_that_run_again_in_backward_come_ahead_too(nvme, activations):
    """Each block is one unit, whose hooks lie outside of its checkpoint."""
    cfg = config(nvme, activations=activations, unit_size="5KiB", device_memory="56KiB")
    model, optimizer = offloaded(cfg, layers=8)
    names = [unit.name for unit in zero3.units(model)]
    assert all(f"blocks.{i}" in names for i in range(8)), names
    for step in range(4):
        zinf.report(model)
        train(model, optimizer, [step])
        counts = zinf.report(model)["prefetch"]
        if step >= 1:  # every use is seen, and all but the very first come ahead
            assert counts["misses"] <= 1
            assert counts["hits"] >= 2 * 8


def test_without_prefetch_nothing_comes_ahead(nvme):
    model, optimizer = offloaded(config(nvme, prefetch=False))
    train(model, optimizer, 2)
    assert zinf.report(model)["prefetch"] == {"hits": 0, "misses": 0}


@pytest.mark.parametrize("budget", ["8KiB", "16KiB", "40KiB"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_gathered_units_stay_within_device_memory(nvme, budget, overlap):
    """At every moment, by the units themselves and not by the prefetcher's own count."""
    cfg = config(nvme, device_memory=budget, overlap_optimizer=overlap)
    model, optimizer = offloaded(cfg, layers=6)
    most = 0

    def look(*_):
        nonlocal most
        present = sum(unit.nbytes for unit in zero3.units(model) if str(unit.state) != "SHARDED")
        most = max(most, present)

    handles = [module.register_forward_hook(look) for module in model.modules()]
    handles += [module.register_full_backward_hook(look) for module in model.blocks]
    train(model, optimizer, 3)
    assert 0 < most <= cfg.device_memory
    assert zinf.report(model)["peak"]["device"] <= cfg.device_memory


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_order_that_changes_every_step(nvme, overlap):
    def run(model, optimizer):
        losses = []
        blocks = list(model.blocks)
        for step in range(6):
            shift = step % len(blocks)
            model.blocks = nn.ModuleList(blocks[shift:] + blocks[:shift])
            losses += train(model, optimizer, [step])
        return losses

    wanted = run(*plain(optimizer=CPUAdam))
    assert run(*offloaded(config(nvme, overlap_optimizer=overlap))) == wanted


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_nothing_is_in_flight_between_steps(nvme, overlap):
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    for step in range(4):
        train(model, optimizer, [step])
        assert {str(unit.state) for unit in zero3.units(model)} == {"SHARDED"}
        if step % 2:
            with torch.no_grad():
                model(model.data(step))
