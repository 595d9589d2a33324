"""Machines as the paper describes them (Figure 2b, Table 3). The one that this runs on: measurement.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zinf.planner.bandwidth import V100_PEAK


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node. Memories in bytes a node; bandwidths in bytes a second and device, all devices active at once."""

    name: str
    devices: int
    device_memory: int
    host_memory: int
    nvme_memory: int
    host_bandwidth: float
    nvme_bandwidth: float
    device_bandwidth: float  # between devices
    peak: float  # floating-point operations a second and device, as matrix products reach them
    source: str
    device_is_host: bool = False  # the CPU computes: device and host memory are one


DGX2 = Machine(
    name="dgx2",
    devices=16,
    device_memory=500_000_000_000,
    host_memory=1_500_000_000_000,
    nvme_memory=28_000_000_000_000,
    host_bandwidth=3.0e9,
    nvme_bandwidth=1.6e9,
    device_bandwidth=70e9,
    peak=V100_PEAK,
    source="paper, Figure 2b: 16 V100 with 32 GB",
)


def _faster(factor: int) -> Machine:
    # Table 3 asks what devices of 10 and 100 times the speed need of their links, memory as before.
    return replace(
        DGX2,
        name=f"dgx2-{factor}x",
        host_bandwidth=factor * 3.0e9,
        nvme_bandwidth=factor * 3.0e9,
        device_bandwidth=factor * DGX2.device_bandwidth,
        peak=factor * DGX2.peak,
        source=f"paper, Table 3: devices {factor} times as fast, slow memory at {3 * factor} GB/s a device",
    )


MACHINES = {machine.name: machine for machine in (DGX2, _faster(10), _faster(100))}
