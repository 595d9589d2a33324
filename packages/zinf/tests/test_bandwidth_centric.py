"""Bandwidth-centric partitioning (paper, 6.1): all links carry all units, all the time."""

from __future__ import annotations

import itertools

from zinf_testing import SETTINGS, config, make, train

import zinf

TENTHS = 10


def bytes_by_tenth(rank, world, nvme):
    """What this rank moves between its drive and its memory in each tenth of a step, by the units that it has used."""
    model = zinf.shard(make(layers=10), config(nvme, grads="nvme", overlap_optimizer="backward", device_memory="24KiB"))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 2, rank, world)  # the order of the units is known then
    scheduler, traffic = model._zero3_model.scheduler, []
    needs = scheduler.needs

    def moved():
        counted = model._zero3_model.store.tiers.nvme.traffic
        return sum(counted.read.values()) + sum(counted.written.values())

    def noting(unit, phase):
        traffic.append(moved())
        needs(unit, phase)

    scheduler.needs = noting
    loss = model.loss(model.data(2).chunk(world)[rank])
    loss.backward()
    traffic.append(moved())
    optimizer.step()
    edges = [traffic[round(tenth * (len(traffic) - 1) / TENTHS)] for tenth in range(TENTHS + 1)]
    assert zinf.report(model)["bytes"]["nvme_read"] > 0
    return [after - before for before, after in itertools.pairwise(edges)]


def test_each_of_two_ranks_moves_half_of_the_bytes_in_every_tenth_of_a_step(ranks, nvme):
    one, other = ranks(bytes_by_tenth, 2, nvme)
    for tenth, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        assert ours > 0, tenth
        assert 0.45 <= ours / (ours + theirs) <= 0.55, (tenth, ours, theirs)
