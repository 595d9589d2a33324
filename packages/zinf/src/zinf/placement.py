"""Which tier each kind of state gets, and how many bytes may be used: Config made concrete on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .config import Config

# Of the memory that is free when a budget is None, this part is ours; the rest is for activations and others.
_HOST_PART = 0.5

# Gathered units and units on their way, when device_memory is None and the device is the CPU.
_DEVICE_PART_OF_HOST = 0.25

# Where that part is smaller than this many of the largest unit, it grows to them as far as the rest of host_memory lets
# it: one in use, two ahead of it, and small ones that are held meanwhile. With less than two nothing comes ahead.
_UNITS_WANTED = 3.5

# Of host_memory at most, for optimizer states on their way in and out; and bytes that do where no unit is large.
_STREAM_PART = 0.2
_STREAM_BYTES = 256 << 20


@dataclass(frozen=True)
class Placement:
    """Tiers by kind of state, and budgets in bytes."""

    params: str
    grads: str
    optimizer: str
    device_memory: int
    host_memory: int
    resident: int
    stream_memory: int
    """Bytes of host_memory for optimizer states on their way in and out."""
    shards_stay_in_place: bool
    """The parameters' tier is the memory in which the device computes."""

    @classmethod
    def of(
        cls,
        config: Config,
        device: torch.device,
        grad_bytes: int,
        state_bytes: int,
        largest_unit: int = 0,
        largest_states: int = 0,
        ranks_on_host: int = 1,
    ) -> Placement:
        """Resolve `config` for a device and a rank's share of bytes.

        grad_bytes      of all gradients of this rank; state_bytes: of its parameters and optimizer states on nvme
        largest_unit    bytes of it when gathered; 0 where nothing is known of the units
        largest_states  bytes of this rank's part of its parameters and optimizer states
        ranks_on_host   that share its memory
        """
        given = {name: config.budget(name) for name in ("device_memory", "host_memory", "resident")}
        host = given["host_memory"]
        if host is None:
            host = int(available_memory() * _HOST_PART)
        grads = config.grads or _grads_tier(config, grad_bytes, host)
        waiting = grad_bytes if grads == "cpu" else 0
        stream = _stream_memory(host, largest_states, ranks_on_host)
        device_memory = given["device_memory"]
        if device_memory is None and device.type == "cpu":
            # Two gradients on their way to a drive, unless they are used up as they come; one that is made.
            gradients = 3 if grads == "nvme" and config.overlap_optimizer != "backward" else 1
            others = waiting + gradients * largest_unit + stream
            wanted = min(int(_UNITS_WANTED * largest_unit), host // ranks_on_host - others)
            device_memory = max(int(host * _DEVICE_PART_OF_HOST), wanted)
        elif device_memory is None:
            device_memory = int(torch.accelerator.get_memory_info(device)[0] * _HOST_PART)
        left_over = max(host - waiting - stream - (device_memory if device.type == "cpu" else 0), 0)
        resident = given["resident"]
        if resident is None:
            resident = min(left_over, state_bytes)
        in_place = config.params == "device" or (config.params == "cpu" and device.type == "cpu")
        return cls(config.params, grads, config.optimizer, device_memory, host, resident, stream, in_place)


def _stream_memory(host_memory: int, largest_states: int, ranks_on_host: int) -> int:
    """Where it can be, room for all states of the largest unit on their way in, and of another on their way out.

    The update of what backward comes to last, mostly a large embedding, has nothing else to hide behind.
    """
    enough = min(int(host_memory * _STREAM_PART), _STREAM_BYTES)
    return max(enough, min(int(host_memory // ranks_on_host * _STREAM_PART), 2 * largest_states))


def _grads_tier(config: Config, grad_bytes: int, host_memory: int) -> str:
    if config.params == config.optimizer == "device":
        return "device"
    if grad_bytes <= host_memory // 4 or not config.nvme:
        return "cpu"
    return "nvme"


def available_memory() -> int:
    """Bytes of memory that this process can still get: of the machine, and of its cgroups (v1 and v2)."""
    free = _meminfo("MemAvailable")
    for limit, used in _cgroup_limits():
        free = min(free, max(limit - used, 0))
    return free


def _meminfo(field: str) -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 1 << 30


def _cgroup_limits() -> list[tuple[int, int]]:
    """(limit, used) bytes of every memory cgroup above this process that sets a limit."""
    found = []
    for relative, root, limit_name, used_name in _memory_cgroups():
        parts = [part for part in relative.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = os.path.join(root, *parts[:depth])
            limit = _number(os.path.join(folder, limit_name))
            used = _number(os.path.join(folder, used_name))
            if limit is not None and used is not None and limit < 1 << 60:
                found.append((limit, max(used - _reclaimable(folder), 0)))
    return found


def _memory_cgroups() -> list[tuple[str, str, str, str]]:
    groups = []
    try:
        with open("/proc/self/cgroup") as file:
            for line in file:
                _, controllers, path = line.strip().split(":", 2)
                if not controllers:
                    groups.append((path, "/sys/fs/cgroup", "memory.max", "memory.current"))
                elif "memory" in controllers.split(","):
                    groups.append((path, "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    except OSError:
        pass
    return groups


def _reclaimable(folder: str) -> int:
    """Page cache of a cgroup: counted as used, given up when needed."""
    try:
        with open(os.path.join(folder, "memory.stat")) as file:
            for line in file:
                name, value = line.split()
                if name in ("inactive_file", "total_inactive_file"):
                    return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            text = file.read().strip()
        return int(text) if text.isdigit() else None
    except OSError:
        return None
