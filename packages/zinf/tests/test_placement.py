"""Budgets made concrete: what is free, what a cgroup allows, what is left over."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import offloaded, train

import zinf
from zinf import placement
from zinf.placement import Placement, available_memory

CPU = torch.device("cpu")
MIB, GIB = 1 << 20, 1 << 30


def of(grad_bytes=0, state_bytes=0, largest_unit=0, largest_states=0, ranks_on_host=1, **settings):
    cfg = zinf.Config.preset("inf-nvme", nvme=["/tmp"], **settings)
    return Placement.of(cfg, CPU, grad_bytes, state_bytes, largest_unit, largest_states, ranks_on_host)


def test_gradients_wait_in_memory_up_to_a_quarter_of_it():
    assert of(grad_bytes=GIB, host_memory=4 * GIB).grads == "cpu"
    assert of(grad_bytes=GIB + 1, host_memory=4 * GIB).grads == "nvme"
    assert of(grad_bytes=3 * GIB, host_memory=4 * GIB, grads="cpu").grads == "cpu"
    everything_there = Placement.of(zinf.Config.preset("zero3", host_memory=1), CPU, GIB, GIB)
    assert everything_there.grads == "device"


def test_what_is_left_over_keeps_units_resident():
    left = of(grad_bytes=GIB, state_bytes=100 * GIB, host_memory=8 * GIB, device_memory=2 * GIB)
    assert left.resident == (8 - 1 - 2) * GIB - 256 * MIB  # those of the others pass through the stream
    assert of(state_bytes=GIB, host_memory=8 * GIB, device_memory=GIB).resident == GIB
    assert of(state_bytes=GIB, host_memory=8 * GIB, resident=0).resident == 0
    assert of(grad_bytes=9 * GIB, state_bytes=GIB, host_memory=8 * GIB, grads="cpu").resident == 0


STREAM = int(0.2 * GIB)


@pytest.mark.parametrize(
    ("unit", "settings", "wanted"),
    [
        (50 * MIB, {}, GIB // 4),  # a quarter holds more than 3.5 of them
        (100 * MIB, {}, 350 * MIB),
        (200 * MIB, {}, GIB - STREAM - 200 * MIB),  # what the stream and a gradient leave
        (100 * MIB, {"overlap_optimizer": "next-forward"}, 350 * MIB),
        (150 * MIB, {"overlap_optimizer": "next-forward"}, GIB - STREAM - 3 * 150 * MIB),  # two that are written, too
        (900 * MIB, {}, GIB // 4),  # there is no room for it: budgets.check says whether that can work
        (100 * MIB, {"grads": "cpu", "grad_bytes": 400 * MIB}, GIB - STREAM - 500 * MIB),
        (100 * MIB, {"device_memory": 64 * MIB}, 64 * MIB),
        (100 * MIB, {"ranks_on_host": 2}, GIB // 4),
    ],
)
def test_where_memory_is_scarce_units_that_come_ahead_get_room(unit, settings, wanted):
    settings = {"host_memory": GIB, "grads": "nvme", "overlap_optimizer": "backward", **settings}
    found = of(largest_unit=unit, state_bytes=100 * GIB, **settings)
    assert found.device_memory == wanted
    assert found.device_memory + found.resident <= GIB


@pytest.mark.parametrize(
    ("host", "states", "ranks", "wanted"),
    [
        (8 * GIB, 10 * MIB, 1, 256 * MIB),
        (8 * GIB, 300 * MIB, 1, 600 * MIB),
        (2 * GIB, 300 * MIB, 1, int(0.2 * 2 * GIB)),
        (8 * GIB, 3 * GIB, 1, int(0.2 * 8 * GIB)),
        (8 * GIB, 3 * GIB, 4, int(0.2 * 2 * GIB)),
        (GIB, 300 * MIB, 2, STREAM),
    ],
)
def test_the_largest_unit_comes_in_while_another_goes_out_where_a_fifth_of_memory_allows_it(
    host, states, ranks, wanted
):
    found = of(state_bytes=100 * GIB, host_memory=host, largest_states=states, ranks_on_host=ranks)
    assert found.stream_memory == wanted
    assert found.stream_memory + found.device_memory + found.resident <= host


def test_blocks_of_which_the_fixed_part_holds_only_one_come_ahead_all_the_same(nvme, monkeypatch, small_pieces):
    block = 4 * (2 * 64 * 128 + 128 + 64 + 2 * 64)
    host = 6 * block
    monkeypatch.setattr(placement, "available_memory", lambda: 2 * host)
    hits = {}
    for device_memory in (host // 4, None):
        cfg = zinf.Config.preset(
            "inf-nvme", nvme=[nvme], resident=0, grads="nvme", overlap_optimizer="backward", dtype=torch.float32,
            unit_size=2 * block, device_memory=device_memory,
        )  # fmt: skip
        model, optimizer = offloaded(cfg, width=64, layers=8)
        train(model, optimizer, 3)
        report = zinf.report(model)
        assert report["peak"]["device"] <= model._zero3_model.store.placement.device_memory < host - block
        hits[device_memory] = report["prefetch"]["hits"] / sum(report["prefetch"].values())
    assert hits[host // 4] < 0.5
    assert hits[None] >= 0.9


def test_free_memory_is_what_machine_and_cgroups_leave(tmp_path, monkeypatch):
    """cgroup v2: the tightest limit above this process counts, page cache that can go does not."""
    group = tmp_path / "slice" / "job"
    group.mkdir(parents=True)
    for folder, limit, used, cache in ((group.parent, "3000000", "1000000", "500000"), (group, "max", "900000", "0")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(used)
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    names = [("/slice/job", str(tmp_path), "memory.max", "memory.current")]
    monkeypatch.setattr(placement, "_memory_cgroups", lambda: names)
    assert available_memory() == 3_000_000 - (1_000_000 - 500_000)
    monkeypatch.setattr(placement, "_memory_cgroups", lambda: [])
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert 0 < available_memory() <= total
