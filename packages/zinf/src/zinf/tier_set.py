"""The tiers of this process and the one pool of pinned buffers that all traffic passes through.

Shared by the engines of all models that are built in one init() and the one that served while they were built.
"""

from __future__ import annotations

import itertools
import os
import platform
import weakref
from collections.abc import Sequence, Set

import torch
from torch import Tensor, nn

import deepnvme
from zero3.buffer_pool import BufferPool, allocate_on
from zero3.collectives import Ranks

from .errors import ConfigError
from .spans import Spans
from .swap_filesystem import warn_unless_drives
from .tiers import Tier
from .tiers.memory import MemoryTier
from .tiers.nvme import NvmeTier


class TierSet:
    """Tiers by name; `nvme` is opened at first use.

    host_pool     reused, aligned host memory: everything that goes to or comes from a drive
    device_pool   reused memory of gathered units; on a CPU the same pool
    """

    def __init__(self, device: torch.device, nvme_dirs: Sequence[str], checksum: bool):
        self.device = device
        self.spans = Spans()
        self.host_pool = BufferPool(allocate_host)
        self.device_pool = self.host_pool if device.type == "cpu" else BufferPool(allocate_on(device))
        self._nvme_dirs = tuple(nvme_dirs)
        self._checksum = checksum
        self._tiers: dict[str, Tier] = {
            "cpu": MemoryTier("cpu", allocate_host),
            "device": MemoryTier("device", allocate_host if device.type == "cpu" else allocate_on(device)),
        }
        self._numbers = itertools.count()
        self._models = 0  # that are alive

    def number(self) -> int:
        """A number for a unit that no other unit on these tiers has."""
        return next(self._numbers)

    def of(self, name: str) -> Tier:
        if name == "nvme" and "nvme" not in self._tiers:
            check_directories(self._nvme_dirs)
            warn_unless_drives(self._nvme_dirs)
            self._tiers["nvme"] = NvmeTier(self._nvme_dirs, self._checksum, self.spans)
        return self._tiers[name]

    @property
    def nvme(self) -> NvmeTier | None:
        """The tier on drives, if anything was ever put there."""
        return self._tiers.get("nvme")  # type: ignore[return-value]

    @property
    def memory(self) -> list[MemoryTier]:
        return [tier for tier in self._tiers.values() if isinstance(tier, MemoryTier)]

    def serve(self, model: nn.Module, numbers: Set[int]) -> None:
        """Keep the states of `model`, whose units have these numbers when it goes; close with the last model."""
        self._models += 1
        weakref.finalize(model, self._model_is_gone, numbers)

    def _model_is_gone(self, numbers: Set[int]) -> None:
        self._models -= 1
        if not self._models:
            self.close()
            return
        for tier in self._tiers.values():
            tier.free_units(numbers)

    def close(self) -> None:
        if self.nvme is not None:
            self.nvme.close()


def allocate_host(nbytes: int) -> Tensor:
    """Aligned host memory on huge pages where allowed: (nbytes,) uint8. O_DIRECT reads fill it in place."""
    return deepnvme.empty(max(nbytes, 1)).torch()


def check_directories(dirs: Sequence[str]) -> None:
    """ConfigError for a directory that cannot take swap space."""
    for path in dirs:
        if not os.path.exists(path):
            raise ConfigError(f"nvme directory {path!r} does not exist: create it, or name another")
        if not os.path.isdir(path):
            raise ConfigError(f"nvme={path!r} is no directory: name one on the drive")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"nvme directory {path!r} cannot be written by this user")


def free_space(dirs: Sequence[str]) -> int:
    """Bytes that may be written into `dirs` evenly: the fullest one bounds all."""
    filesystems = [os.stat(path).st_dev for path in dirs]
    free = []
    for path, filesystem in zip(dirs, filesystems, strict=True):
        stat = os.statvfs(path)
        free.append(stat.f_bavail * stat.f_frsize // filesystems.count(filesystem))
    return min(free, default=0) * len(dirs)


def sharers(ranks: Ranks, dirs: Sequence[str]) -> int:
    """How many ranks, this one included, put their swap space on this host's filesystem of the first of `dirs`."""
    places = torch.zeros(ranks.size, dtype=torch.int64)
    if dirs:
        place = f"{platform.node()} {os.stat(dirs[0]).st_dev}".encode()
        places[ranks.rank] = 1 + deepnvme.crc32c(bytearray(place))
    ranks.sum(places, "who shares a drive")
    return max(int((places == places[ranks.rank]).sum()), 1)
