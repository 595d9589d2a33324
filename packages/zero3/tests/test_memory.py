"""Memory against written formulas; N elements, dp ranks, fp32 (4 bytes)."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import nn
from zero3_models import Regression
from zero3_testing import DistantStore, parts

import zero3


class Wide(Regression):
    """Eight equal layers; each is a unit."""

    width = 256

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])

    def forward(self, x):
        return self.layers(x)


def trained(rank, world):
    """Bytes after two steps: (shards, gradients, moments, peak of the pool, its end)."""
    store = DistantStore()
    model = zero3.shard(Wide(), store=store, unit_size=1)
    opt = torch.optim.Adam(model.parameters())
    for step in range(2):
        model.loss(parts(model.data(step), world)[rank]).backward()
        opt.step()
        gradients = store._gradient_pool.nbytes
        opt.zero_grad()
    shards = sum(shard.nbytes for shard in store._shards.values())
    moments = sum(v.nbytes for state in opt.state.values() for v in state.values() if v.ndim)
    pool = model._zero3_model.pool
    return shards, gradients, moments, pool.peak_in_use, pool.in_use, sum(unit.numel for unit in zero3.units(model))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_states_fall_as_one_over_ranks_and_units_in_flight_are_bounded(ranks, world):
    """States 4 N/dp + 4 N/dp + 8 N/dp, with padding to 64 elements a unit and rank.

    In flight: two units gathered, 2 U; and of gradients the unit that is being reduced and one before it, each a
    flat buffer and one for what arrives from the others: 4 U.
    """
    results = ranks(trained, world) if world > 1 else [trained(0, 1)]
    for shards, gradients, moments, peak, at_end, numel in results:
        padding = 8 * 64 * 4
        assert shards <= 4 * numel / world + padding
        assert gradients <= 4 * numel / world + padding
        assert moments <= 8 * numel / world + 2 * padding
        unit = 4 * (numel / 8 + 64 * world)
        assert peak <= 6 * unit
        assert at_end == 0


def built(rank, world, layers, width):
    """MiB that building takes at its highest, beyond what the process had; and the MiB of shards and of a layer."""
    nn.Linear(width, width)  # what torch itself sets up once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with zero3.init(store=DistantStore()):
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return peak, sum(unit.shard_numel for unit in zero3.units(model)) * 4 / 2**20, width * width * 4 / 2**20


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_building_takes_the_shards_and_one_submodule(ranks, world):
    """Peak beyond the start at most shards + largest submodule + 64 MiB, whatever dp is."""
    for peak, shards, layer in ranks(built, world, 12, 2048, fresh=True):
        assert peak <= shards + layer + 64


def test_gathering_again_and_again_takes_no_more():
    model = zero3.shard(Wide(), store=DistantStore(), unit_size=1)
    pool = model._zero3_model.pool
    sizes = []
    for step in range(6):
        model.loss(model.data(step)).backward()
        sizes.append(pool.nbytes)
    assert len(set(sizes[1:])) == 1
    assert pool.in_use == 0
    assert pool.retired_nbytes <= max(unit.nbytes for unit in zero3.units(model))  # backward still used the last one
