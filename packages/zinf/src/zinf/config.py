"""Config: which state lives where, and the presets of the paper's Table 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from zero3.unit_grouping import parse_size

from .errors import ConfigError

Tier = Literal["device", "cpu", "nvme"]
TIERS = ("device", "cpu", "nvme")
OVERLAPS = ("next-forward", "backward", False)
_ALL = ("params", "grads", "optimizer")
_SHARD_CHOICES = ((), ("optimizer",), ("grads", "optimizer"), ("grads", "optimizer", "params"))
_LARGEST_SIZE = 2**63 - 1
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)

# Rows of Table 2: devices of parameters, of gradients, of optimizer states; and what is partitioned.
PRESETS: dict[str, dict[str, Any]] = {
    "ddp": {"params": "device", "grads": "device", "optimizer": "device", "shard": ()},
    "zero1": {"params": "device", "grads": "device", "optimizer": "device", "shard": ("optimizer",)},
    "zero2": {"params": "device", "grads": "device", "optimizer": "device", "shard": ("grads", "optimizer")},
    "zero-offload": {"params": "device", "grads": "cpu", "optimizer": "cpu", "shard": ("grads", "optimizer")},
    "zero3": {"params": "device", "grads": "device", "optimizer": "device", "shard": _ALL},
    "inf-cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu", "shard": _ALL},
    "inf-nvme": {"params": "nvme", "grads": None, "optimizer": "nvme", "shard": _ALL},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Placement of a model's states, and budgets.

    Sizes are bytes, or strings such as "8GiB". ConfigError (a ValueError) names the field that cannot work.
    """

    params: Tier = "device"
    """Tier of the parameters' shards."""
    grads: Tier | None = None
    """Tier of gradients that wait. None: `cpu` if they take at most a quarter of host_memory, else `nvme`."""
    optimizer: Tier = "device"
    """Tier of the optimizer's states: remainder of the master weight, and moments."""
    activations: Tier | None = None
    """Tier of checkpointed activations: blocks of a ModuleList of equal blocks are checkpointed by themselves, and
    their inputs wait there. None: no automatic checkpointing."""
    shard: tuple[str, ...] = _ALL
    """What is partitioned over the ranks; () is plain data parallel."""
    nvme: Sequence[str | os.PathLike] | str | os.PathLike = ()
    """Directories for the tier `nvme`, one a drive."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of gathered parameters and of their gradients. The master is float32."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of gradients on the wire. None: that of the parameters."""
    loss_scale: float | str | None = None
    """"dynamic" or a number: scales the loss of float16 runs (`optimizer.scale`)."""
    device_memory: int | str | None = None
    """Bytes of gathered parameters at a time. None: what is free."""
    host_memory: int | str | None = None
    """Bytes of host memory for all of ours: pool, resident units, waiting gradients. None: what is free."""
    resident: int | str | None = None
    """Bytes of units kept in host memory though placed on nvme. None: what is left over. 0: none."""
    unit_size: int | str = "auto"
    """Bytes of a gathered unit."""
    prefetch: bool = True
    """Read ahead what comes next: units, and the optimizer's states. False: each is read when it is needed."""
    tile_bytes: int | str | None = None
    """Bytes of a gathered parameter above which it is cut into tiles of at most so many. None: where a parameter with
    its gradient exceeds device_memory, tiles of a quarter of that."""
    checksum: bool = True
    """Check that what is read back from a drive is what was written."""
    group: Any = None
    """Process group. None: the default one, or a single process."""
    overlap_optimizer: str | bool = "next-forward"
    """When the update really runs: "next-forward", ahead of each unit's next use; "backward", right behind each
    gradient; False, inside step(). The numbers are the same."""

    def __post_init__(self) -> None:
        set_field = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        set_field("nvme", self.nvme_dirs)
        set_field("shard", self._shard_choice())
        for name in ("device_memory", "host_memory", "resident", "tile_bytes"):
            set_field(name, self.budget(name))
        if not _is_one_of(("auto",), self.unit_size):
            set_field("unit_size", _size("unit_size", self.unit_size))
        self._check()

    def _check(self) -> None:
        for name in ("params", "grads", "optimizer", "activations"):
            value = getattr(self, name)
            if not _is_one_of(TIERS, value) and not (value is None and name in ("grads", "activations")):
                raise ConfigError(f"{name}={value!r} is no tier: choose one of {', '.join(TIERS)}")
        for name in ("prefetch", "checksum"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} is neither True nor False")
        if not _is_one_of(_DTYPES, self.dtype):
            raise ConfigError(f"dtype={self.dtype!r} is not one of {', '.join(map(str, _DTYPES))}")
        if self.reduce_dtype is not None and not _is_floating_point(self.reduce_dtype):
            raise ConfigError(f"reduce_dtype={self.reduce_dtype!r} is not a floating-point torch.dtype")
        if "nvme" in (self.params, self.grads, self.optimizer, self.activations) and not self.nvme:
            raise ConfigError("a state is placed on nvme, but no directory is given: nvme=['/path/on/the/drive']")
        if self.params != "device" and "params" not in self.shard:
            raise ConfigError(
                f"params={self.params!r} needs 'params' in shard: parameters that every rank keeps whole stay on device"
            )
        if not _is_one_of(OVERLAPS, self.overlap_optimizer):
            raise ConfigError(
                f"overlap_optimizer={self.overlap_optimizer!r} is not one of {', '.join(map(repr, OVERLAPS))}"
            )
        if self.overlap_optimizer == "backward" and self.loss_scale is not None:
            raise ConfigError(
                "overlap_optimizer='backward' updates before an overflow can be seen: loss_scale needs 'next-forward' "
                "or False"
            )
        if not (self.loss_scale is None or _is_one_of(("dynamic",), self.loss_scale) or _positive(self.loss_scale)):
            raise ConfigError(f"loss_scale={self.loss_scale!r} is neither 'dynamic' nor a positive number")
        if self.tile_bytes == 0:
            raise ConfigError("tile_bytes=0 leaves no room for a tile: give the bytes of one, or None")
        if self.group is not None and not (dist.is_available() and isinstance(self.group, dist.ProcessGroup)):
            raise ConfigError(
                f"group={self.group!r} is no torch.distributed.ProcessGroup that this process is in: give what "
                "torch.distributed.new_group returned to one of its ranks, or None"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Config:
        """A row of the paper's Table 2, with `changes`.

        ddp           everything on the device, nothing partitioned
        zero1, zero2  optimizer states, and gradients, partitioned
        zero-offload  gradients and optimizer states partitioned, on the CPU
        zero3         everything partitioned, on the device
        inf-cpu       everything partitioned, on the CPU
        inf-nvme      everything partitioned, parameters and optimizer states on NVMe

        ConfigError for an unknown name or field.
        """
        if not _is_one_of(PRESETS, name):
            raise ConfigError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
        known = {field.name for field in fields(cls)}
        for change in changes:
            if change not in known:
                raise ConfigError(f"unknown setting {change!r}: choose from {', '.join(sorted(known))}")
        return cls(**{**PRESETS[name], **changes})

    def budget(self, name: str) -> int | None:
        """`device_memory`, `host_memory`, `resident` or `tile_bytes` in bytes; None: to be found out."""
        value = getattr(self, name)
        return None if value is None else _size(name, value)

    @property
    def nvme_dirs(self) -> tuple[str, ...]:
        """Directories for the tier `nvme`."""
        given = [self.nvme] if isinstance(self.nvme, str | bytes | os.PathLike) else self.nvme
        try:
            paths = tuple(os.fsdecode(path) for path in given)
        except TypeError:
            raise ConfigError(f"nvme={self.nvme!r} is neither a directory nor a sequence of them") from None
        if "" in paths:  # an unset variable of a shell, most likely; the working directory is "."
            raise ConfigError(f"nvme={self.nvme!r}: an empty path names no directory")
        return paths

    def _shard_choice(self) -> tuple[str, ...]:
        try:
            chosen = tuple(self.shard)
            if isinstance(self.shard, str) or tuple(sorted(chosen)) not in _SHARD_CHOICES:
                raise TypeError
        except TypeError:
            choices = ", ".join(str(choice) for choice in _SHARD_CHOICES)
            raise ConfigError(f"shard={self.shard!r} is not one of {choices}") from None
        return chosen

    def replace(self, **changes: Any) -> Config:
        """A copy with `changes`."""
        return replace(self, **changes)


def _size(name: str, value: int | str) -> int:
    try:
        nbytes = parse_size(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    except OverflowError:  # of a string with hundreds of digits
        nbytes = _LARGEST_SIZE + 1
    if nbytes > _LARGEST_SIZE:
        raise ConfigError(f"{name}={value!r} is more than the {_LARGEST_SIZE} bytes that can be addressed")
    return nbytes


def _is_one_of(choices: Iterable[Any], value: Any) -> bool:
    """Of a choice's type too: 0 is not False, and arrays are not asked whether they are equal to it."""
    return any(isinstance(value, type(choice)) and value == choice for choice in choices)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_floating_point(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value.is_floating_point
