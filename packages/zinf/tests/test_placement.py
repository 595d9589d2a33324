"""Budgets made concrete: what is free, what a cgroup allows, what is left over."""

from __future__ import annotations

import torch

import zinf
from zinf import placement
from zinf.placement import Placement, available_memory

CPU = torch.device("cpu")
GIB = 1 << 30


def of(grad_bytes=0, state_bytes=0, **settings):
    cfg = zinf.Config.preset("inf-nvme", nvme=["/tmp"], **settings)
    return Placement.of(cfg, CPU, grad_bytes, state_bytes)


def test_gradients_wait_in_memory_up_to_a_quarter_of_it():
    assert of(grad_bytes=GIB, host_memory=4 * GIB).grads == "cpu"
    assert of(grad_bytes=GIB + 1, host_memory=4 * GIB).grads == "nvme"
    assert of(grad_bytes=3 * GIB, host_memory=4 * GIB, grads="cpu").grads == "cpu"
    everything_there = Placement.of(zinf.Config.preset("zero3", host_memory=1), CPU, GIB, GIB)
    assert everything_there.grads == "device"


def test_what_is_left_over_keeps_units_resident():
    left = of(grad_bytes=GIB, state_bytes=100 * GIB, host_memory=8 * GIB, device_memory=2 * GIB)
    assert left.resident == (8 - 1 - 2) * GIB
    assert of(state_bytes=GIB, host_memory=8 * GIB, device_memory=GIB).resident == GIB
    assert of(state_bytes=GIB, host_memory=8 * GIB, resident=0).resident == 0
    assert of(grad_bytes=9 * GIB, state_bytes=GIB, host_memory=8 * GIB, grads="cpu").resident == 0


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
