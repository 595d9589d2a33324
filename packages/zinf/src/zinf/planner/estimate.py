"""A model on a cluster under a preset: what lies where, whether it fits, and how fast a step can be.

The paper trains with fp16 in use and fp32 in Adam; a preset of Table 2 says which part lies in which memory, and
whether it is partitioned over the devices. Reads and all-gathers are bandwidth-centric (section 6.1): every device
reads its own 1/N of a parameter over its own link, so slow memory serves parameters with the bandwidth of all links
together, up to that between the devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zinf.config import PRESETS
from zinf.planner import bandwidth, memory
from zinf.planner.cluster import Machine

_TIER_MEMORY = {"device": "device_memory", "cpu": "host_memory", "nvme": "nvme_memory"}
_PART_BYTES = {  # of a parameter
    "params": memory.PARAMETER_BYTES,
    "grads": memory.GRADIENT_BYTES,
    "optimizer": memory.OPTIMIZER_BYTES,
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A Transformer and the batch of one device."""

    layers: int
    hidden: int
    heads: int
    batch: int  # sequences a device
    seq: int  # tokens a sequence
    blocks_per_checkpoint: int = 1
    tiles: int = 1  # that the largest operator is cut into (memory-centric tiling, section 5.1)

    @property
    def parameters(self) -> int:
        return memory.parameters(layers=self.layers, hidden=self.hidden)


def estimate(workload: Workload, machine: Machine, *, nodes: int, preset: str) -> dict[str, Any]:
    """Every quantity of the paper's equations for this model, and what follows on this cluster.

    Bytes and operations are exact ints; efficiencies, bandwidths (bytes a second) and seconds are floats. Raises
    ValueError for an unknown preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}: choose one of {', '.join(PRESETS)}")
    return {
        "model": {
            "layers": workload.layers,
            "hidden": workload.hidden,
            "heads": workload.heads,
            "batch_per_device": workload.batch,
            "seq": workload.seq,
            "blocks_per_checkpoint": workload.blocks_per_checkpoint,
            "tiles": workload.tiles,
            "parameters": workload.parameters,
        },
        "memory": memory_needs(workload),
        "compute": compute_needs(workload),
        "cluster": _cluster(machine, nodes),
        "placement": placement(workload, machine, nodes=nodes, preset=preset),
        "speed": speed(workload, machine, nodes=nodes, preset=preset),
    }


def memory_needs(workload: Workload) -> dict[str, int]:
    """Section 3, in bytes. Activations are those of the batch of one device."""
    numel = workload.parameters
    sizes = {"hidden": workload.hidden, "batch": workload.batch, "seq": workload.seq}
    return {
        "parameters": memory.PARAMETER_BYTES * numel,
        "gradients": memory.GRADIENT_BYTES * numel,
        "optimizer_states": memory.OPTIMIZER_BYTES * numel,
        "model_states": memory.model_states(layers=workload.layers, hidden=workload.hidden),
        "activations": memory.activations(**sizes, heads=workload.heads, layers=workload.layers),
        "activation_checkpoints": memory.activation_checkpoints(
            **sizes, layers=workload.layers, blocks_per_checkpoint=workload.blocks_per_checkpoint
        ),
        "model_state_working_memory": memory.model_state_working_memory(hidden=workload.hidden),
        "activation_working_memory": memory.activation_working_memory(
            **sizes, heads=workload.heads, blocks_per_checkpoint=workload.blocks_per_checkpoint
        ),
    }


def compute_needs(workload: Workload) -> dict[str, Any]:
    """Section 4: operations of a device's iteration, and operations a byte of each kind of data."""
    return {
        "flops_per_iteration": bandwidth.flops_per_iteration(
            batch=workload.batch, seq=workload.seq, parameters=workload.parameters
        ),
        "arithmetic_intensity": {
            "parameters_and_gradients": float(
                bandwidth.ait_parameters_and_gradients(batch=workload.batch, seq=workload.seq)
            ),
            "optimizer_states": float(bandwidth.ait_optimizer_states(batch=workload.batch, seq=workload.seq)),
            "activation_checkpoints": float(
                bandwidth.ait_activation_checkpoints(
                    hidden=workload.hidden, blocks_per_checkpoint=workload.blocks_per_checkpoint
                )
            ),
        },
    }


def placement(workload: Workload, machine: Machine, *, nodes: int, preset: str) -> dict[str, Any]:
    """Bytes that each memory of one node must hold, against what it has.

    A part that is not partitioned is held by every device whole. The devices hold the working memories too. Activation
    checkpoints stay on the device, or go to host memory where the preset offloads parameters (section 5.1).
    """
    rows = PRESETS[preset]
    ranks = nodes * machine.devices
    needs = memory_needs(workload)
    held = dict.fromkeys(_TIER_MEMORY, 0)
    for part, nbytes in _PART_BYTES.items():
        tier = rows[part] or _grads_tier(workload, machine, ranks)
        share = ranks if part in rows["shard"] else 1
        held[tier] += machine.devices * -(-nbytes * workload.parameters // share)
    held["device"] += machine.devices * needs["activation_working_memory"]
    if "params" in rows["shard"]:
        held["device"] += machine.devices * -(-needs["model_state_working_memory"] // workload.tiles)
    offloads = rows["params"] != "device"
    held["cpu" if offloads else "device"] += machine.devices * needs["activation_checkpoints"]
    if machine.device_is_host:
        held["cpu"] += held.pop("device")
    tiers = {tier: {"needed": held[tier], "available": getattr(machine, _TIER_MEMORY[tier])} for tier in held}
    return {
        "preset": preset,
        "bytes_per_node": tiers,
        "fits": all(tier["needed"] <= tier["available"] for tier in tiers.values()),
    }


def _grads_tier(workload: Workload, machine: Machine, ranks: int) -> str:
    """Where gradients wait when the preset leaves it open: zinf.Config's rule, cpu up to a quarter of host memory."""
    waiting = machine.devices * -(-memory.GRADIENT_BYTES * workload.parameters // ranks)
    return "cpu" if waiting <= machine.host_memory // 4 else "nvme"


def speed(workload: Workload, machine: Machine, *, nodes: int, preset: str) -> dict[str, Any]:
    """Bandwidth that a device has for each kind of data, the efficiency it allows, and seconds of an iteration.

    Beside it the bandwidth that would allow an efficiency of a half.

    `one_after_another` adds all times up (the paper's efficiency model); `overlapped` is the longest of them, which
    no schedule can beat.
    """
    rows = PRESETS[preset]
    ranks = nodes * machine.devices
    needs = compute_needs(workload)
    intensity = needs["arithmetic_intensity"]
    links = {"device": float("inf"), "cpu": machine.host_bandwidth, "nvme": machine.nvme_bandwidth}
    # Parameters come over all links at once and are gathered between the devices; one device gathers nothing.
    between = machine.device_bandwidth if ranks > 1 else float("inf")
    bandwidths = {
        "parameters_and_gradients": min(ranks * links[rows["params"]], between),
        # Each device updates its own share, so the links of all devices add up.
        "optimizer_states": ranks * links[rows["optimizer"]],
        "activation_checkpoints": links["cpu" if rows["params"] != "device" else "device"],
    }
    compute_seconds = needs["flops_per_iteration"] / machine.peak
    seconds = {"compute": compute_seconds}
    efficiencies = {}
    for kind, rate in bandwidths.items():
        seconds[kind] = needs["flops_per_iteration"] / intensity[kind] / rate
        efficiencies[kind] = compute_seconds / (compute_seconds + seconds[kind])
    in_turn, overlapped = sum(seconds.values()), max(seconds.values())
    return {
        "bandwidth_per_device": {kind: _finite(rate) for kind, rate in bandwidths.items()},
        "efficiency": efficiencies,
        "bandwidth_for_half_efficiency": {
            kind: bandwidth.bandwidth_for(efficiency=0.5, ait=intensity[kind], peak=machine.peak) for kind in bandwidths
        },
        "seconds": {**seconds, "one_after_another": in_turn, "overlapped": overlapped},
        "flops_per_second_per_device": {
            "one_after_another": needs["flops_per_iteration"] / in_turn,
            "overlapped": needs["flops_per_iteration"] / overlapped,
        },
        "tokens_per_second": {
            "one_after_another": ranks * workload.batch * workload.seq / in_turn,
            "overlapped": ranks * workload.batch * workload.seq / overlapped,
        },
    }


def _cluster(machine: Machine, nodes: int) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "source": machine.source,
        "nodes": nodes,
        "devices": nodes * machine.devices,
        "memory": {tier: nodes * getattr(machine, name) for tier, name in _TIER_MEMORY.items()},
        "peak_flops_per_second_per_device": machine.peak,
        "bandwidth_per_device": {
            "host": machine.host_bandwidth,
            "nvme": machine.nvme_bandwidth,
            "between_devices": machine.device_bandwidth,
        },
    }


def _finite(rate: float) -> float | None:
    # Data that is where it is used travels over no link: JSON has no word for infinity.
    return rate if rate != float("inf") else None
