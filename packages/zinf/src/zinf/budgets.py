"""Budgets against the one thing that cannot be cut: a unit must be in memory whole. Found before a byte is moved."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zero3.bandwidth_centric import Partition, offsets_of
from zero3.parameter_forms import dtypes_of
from zero3.unit_grouping import Group, group

from .config import Config
from .errors import ConfigError

# Of an element of a unit's shard whose optimizer states are in memory: a float32 master or its two halves, two moments,
# and a float16 copy beside them.
_STATE_BYTES = 14


@dataclass(frozen=True)
class _Need:
    """Bytes that must be in memory at once."""

    device_memory: int
    host_memory: int
    name: str
    """The parameter that makes it so."""
    numel: int


def unit_size(module: nn.Module, config: Config) -> int | str:
    """`config.unit_size`; "auto" gives units of which two fit into device_memory, where parameters are that small."""
    device_memory = config.budget("device_memory")
    if config.unit_size != "auto" or device_memory is None:
        return config.unit_size
    groups = group(module, "auto", lambda param: dtypes_of(param, config.dtype))
    largest = max((_nbytes(one, config, 1, 1) for one in groups), default=0)
    return "auto" if 2 * largest <= device_memory else device_memory // 2


def largest_unit(module: nn.Module, config: Config, shards: int, shard_multiple: int) -> int:
    """Bytes of the largest gathered unit; the last two arguments as in `check`."""
    groups = group(module, unit_size(module, config), lambda param: dtypes_of(param, config.dtype))
    return max((_nbytes(one, config, shards, shard_multiple) for one in groups), default=0)


def check(module: nn.Module, config: Config, shards: int, shard_multiple: int, piece_numel: int, on_cpu: bool) -> None:
    """ConfigError naming parameter, need, setting and a value that works, where a budget that was given is too small.

    shards        ranks over which a unit is cut, each shard a multiple of `shard_multiple` elements
    piece_numel   elements of a shard that the optimizer streams at a time
    on_cpu        the device computes in host memory, so gathered units count there too
    """
    groups = group(module, unit_size(module, config), lambda param: dtypes_of(param, config.dtype))
    if not groups:
        return
    need = _need(groups, config, shards, shard_multiple, piece_numel, on_cpu)
    too_small = [
        f"{setting}={_kib(needed)!r} (now {_kib(given)!r})"
        for setting, needed, given in (
            ("device_memory", need.device_memory, config.budget("device_memory")),
            ("host_memory", need.host_memory, config.budget("host_memory")),
        )
        if given is not None and given < needed
    ]
    if too_small:
        raise ConfigError(
            f"parameter {need.name} ({need.numel} elements of {config.dtype}) must be in memory whole: the budgets "
            f"must be at least {' and '.join(too_small)}"
        )


def _need(
    groups: list[Group], config: Config, shards: int, shard_multiple: int, piece_numel: int, on_cpu: bool
) -> _Need:
    largest = max(groups, key=lambda one: _nbytes(one, config, shards, shard_multiple))
    nbytes = _nbytes(largest, config, shards, shard_multiple)
    param, names = max(largest.params, key=lambda entry: entry[0].numel())
    gathered = max(nbytes, config.budget("device_memory") or 0)
    state_bytes = _STATE_BYTES + (config.dtype.itemsize if config.grads == "nvme" else 0)
    streamed = min(nbytes // config.dtype.itemsize // shards, piece_numel) * state_bytes
    waiting = 3 * nbytes // shards if config.grads == "nvme" else 0  # two on their way out, one being read
    host = streamed + waiting + (gathered + nbytes if on_cpu else nbytes // shards)
    return _Need(nbytes, host, names[0], param.numel())


def _nbytes(one: Group, config: Config, shards: int, shard_multiple: int) -> int:
    """Bytes of a gathered unit, padding included."""
    params = [param for param, _ in one.params]
    numel = Partition.of(offsets_of(param.numel() for param in params)[1], shards, shard_multiple).padded_numel
    return numel * dtypes_of(params[0], config.dtype)[1].itemsize


def _kib(nbytes: int) -> str:
    return f"{-(-nbytes // 1024)}KiB"
