"""init() and shard(): a model partitioned by zero3, with this package's store and scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero3 import parameter_forms
from zero3.collectives import Ranks
from zero3.partition_model import default_device, device_of, partition
from zero3.partitioned_init import constructing
from zero3.partitioned_model import Settings
from zero3.shard_store import ShardStore

from . import budgets
from .activation_offload import checkpoint_blocks
from .config import Config
from .errors import ConfigError
from .memory_centric_tiling import TileLimits, cut_operators
from .offload_engine import OffloadEngine
from .placement import Placement
from .prefetcher import Prefetcher
from .scarce_memory import spare_memory_if_scarce
from .tier_set import TierSet, check_directories, free_space, sharers
from .tiers.nvme import PIECE
from .unit_states import state_bytes

_TIMEOUT = 300.0  # seconds that a rank waits for the others


@contextmanager
def init(config: Config) -> Iterator[None]:
    """Modules built inside are partitioned and offloaded as they are built (paper, 7.2). Collective.

    No more than one submodule's full parameters is in memory at a time. ConfigError when a drive has too little
    room for the whole training state; then nothing is left behind. TypeError for what is no Config; ValueError as
    `shard`.
    """
    _check_config(config)
    settings = _settings(config)
    ranks = Ranks(config.group, _TIMEOUT)
    device = default_device()
    check_directories(config.nvme_dirs)
    spare_memory_if_scarce()
    tiers = TierSet(device, config.nvme_dirs, config.checksum)

    building = Placement.of(config.replace(resident=0), device, grad_bytes=0, state_bytes=0)
    limits = TileLimits.of(config, building.device_memory, ranks)

    def store_while_building(_: torch.device) -> ShardStore:
        return OffloadEngine(config, building, tiers)

    made: list[nn.Module] = []
    try:
        with constructing(ranks, settings, store_while_building, made.append, limits.count):
            yield
        for module in made:
            _partition(module, config, ranks, settings, tiers, device)
    except BaseException:
        tiers.close()
        raise


def shard(model: nn.Module, config: Config) -> nn.Module:
    """Partition and offload an existing model, in place; returns it. Collective. Errors as `init`.

    A model that got new modules since is sharded again as a whole: values stay, and a new optimizer begins. ValueError
    for one that shares parameters with another sharded model, a part of it or what it is a part of.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    _check_config(config)
    device = device_of(model)
    check_directories(config.nvme_dirs)
    spare_memory_if_scarce()
    tiers = TierSet(device, config.nvme_dirs, config.checksum)
    try:
        _partition(model, config, Ranks(config.group, _TIMEOUT), _settings(config), tiers, device)
    except BaseException:
        tiers.close()
        raise
    return model


def _check_config(config: Any) -> None:
    if not isinstance(config, Config):
        raise TypeError(
            f"expected a zinf.Config, got {config!r}: make one, as zinf.Config.preset('inf-nvme', nvme=['/path'])"
        )


def _refuse_shared(module: nn.Module) -> None:
    """Two models would each take charge of the same units."""
    own = getattr(module, "_zero3_model", None)
    for name, param in module.named_parameters():
        for slot in parameter_forms.slots_of(param):
            model = slot.unit.model
            if model is not own and not model.under_construction:
                raise ValueError(
                    f"parameter {name} is one of another model that is sharded already ({slot.name} there): shard the "
                    "whole, and its parts not by themselves"
                )


def _settings(config: Config) -> Settings:
    return Settings(config.dtype, config.unit_size, config.shard, config.reduce_dtype)


def _partition(
    module: nn.Module, config: Config, ranks: Ranks, settings: Settings, tiers: TierSet, device: torch.device
) -> None:
    _refuse_shared(module)
    shards = ranks.size if "optimizer" in config.shard else 1
    trained = sum(param.numel() for param in module.parameters() if param.requires_grad) // shards
    frozen = sum(param.numel() for param in module.parameters() if not param.requires_grad) // shards
    nbytes = state_bytes(config.dtype)
    states = trained * (nbytes["params"] + nbytes["optimizer"]) + frozen * nbytes["params"]
    # Tiles go by the fixed part of memory; that there is room to fetch the units ahead which they leave comes second.
    placement = Placement.of(config, device, trained * nbytes["grads"], states)
    restore = cut_operators(module, TileLimits.of(config, placement.device_memory, ranks))
    beside = sharers(ranks, config.nvme_dirs)
    try:
        if config.prefetch:
            largest = budgets.largest_unit(module, config, shards, OffloadEngine.shard_multiple)
            largest_states = largest // nbytes["params"] // shards * (nbytes["params"] + nbytes["optimizer"])
            placement = Placement.of(config, device, trained * nbytes["grads"], states, largest, largest_states, beside)
        _check_space(config, placement, trained, frozen, beside)
        budgets.check(module, config, shards, OffloadEngine.shard_multiple, PIECE, device.type == "cpu")
    except ConfigError:
        restore()
        raise
    engine = OffloadEngine(config, placement, tiers)
    settings = replace(settings, unit_size=budgets.unit_size(module, config))
    partition(module, ranks, settings, engine, Prefetcher(engine, config.prefetch), device)
    if config.activations is not None:
        checkpoint_blocks(module)
    tiers.serve(module, engine.numbers)


def _check_space(config: Config, placement: Placement, trained: int, frozen: int, on_drive: int) -> None:
    """Every byte that training will write must have room before it begins; `on_drive` ranks write as much."""
    nbytes = state_bytes(config.dtype)
    tiers = {"params": placement.params, "grads": placement.grads, "optimizer": placement.optimizer}
    needed = sum(trained * nbytes[kind] for kind, tier in tiers.items() if tier == "nvme")
    if placement.params == "nvme":
        needed += frozen * nbytes["params"]
    needed = (needed - placement.resident) * on_drive
    free = free_space(config.nvme_dirs) if config.nvme_dirs else 0
    if needed > 0 and needed > free:
        raise ConfigError(
            f"the training state needs {needed / 1e9:.2f} GB on nvme, but {', '.join(config.nvme_dirs)} "
            f"has {free / 1e9:.2f} GB free: free some, name another directory, or add a drive"
        )
