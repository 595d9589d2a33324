"""shard(): partition an existing model in place, unit by unit (plain, on meta, or partitioned already)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import full_state, hooks, parameter_forms
from .collectives import Ranks
from .errors import UnsupportedError
from .partitioned_model import PartitionedModel, Settings
from .scheduler import OnDemand, Scheduler
from .shard_store import InMemoryStore, ShardStore
from .shared_memory import refuse_shared_memory
from .unit import ParamSlot, Unit
from .unit_grouping import Group, group, parse_size

log = logging.getLogger(__name__)

_MODEL = "_zero3_model"

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)

_SHARD_CHOICES = (
    (),
    ("optimizer",),
    ("grads", "optimizer"),
    ("grads", "optimizer", "params"),
)


def shard(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    group: Any = None,
    unit_size: int | str = "auto",
    shard: tuple[str, ...] = ("params", "grads", "optimizer"),
    scheduler: Scheduler | None = None,
    store: ShardStore | None = None,
    reduce_dtype: torch.dtype | None = None,
    timeout: float = 300.0,
) -> nn.Module:
    """Partition the parameters of `model` over the ranks, in place; returns `model` (paper, 5 and 7.2).

    Parameters
    ----------
    dtype         of the gathered parameters; None: each one's own. Shards keep their own dtype.
    group         process group; None: the default one, or a single process without any
    unit_size     bytes of a gathered unit, or "auto"
    shard         what is partitioned: () plain data parallel, ("optimizer",) ZeRO-1, ("grads", "optimizer")
                  ZeRO-2, all three ZeRO-3. With "optimizer" gradients are always reduced to shards.
    scheduler     when units are gathered; None: on demand
    store         where shards lie; None: in memory
    reduce_dtype  dtype of gradients on the wire; None: that of the gathered parameter
    timeout       seconds that a rank waits for the others

    Values are rank 0's, buffers' too. Collective. ValueError for a wrong argument, TypeError for a model that is no
    module; UnsupportedError for a sparse buffer on several ranks, and for trainable parameters that share memory with
    others, or with buffers, without being the same Parameter.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, _WRAPPERS):
        raise TypeError(f"the model is wrapped in {type(model).__name__}: shard model.module, it needs no wrapper")
    settings, ranks = make_settings(dtype, unit_size, shard, reduce_dtype), Ranks(group, timeout)
    device = device_of(model)
    partition(model, ranks, settings, store or InMemoryStore(device), scheduler or OnDemand(), device)
    return model


def make_settings(
    dtype: torch.dtype | None, unit_size: int | str, shard: tuple[str, ...], reduce_dtype: torch.dtype | None
) -> Settings:
    """Checked settings. ValueError names what is wrong."""
    if tuple(sorted(shard)) not in _SHARD_CHOICES:
        choices = ", ".join(str(choice) for choice in _SHARD_CHOICES)
        raise ValueError(f"shard={shard!r} is not one of {choices} (in any order)")
    for name, value in (("dtype", dtype), ("reduce_dtype", reduce_dtype)):
        if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
            raise ValueError(f"{name}={value!r} is not a floating-point torch.dtype")
    if unit_size != "auto":
        try:
            parse_size(unit_size)
        except ValueError as error:
            raise ValueError(f"unit_size: {error}") from None
    return Settings(dtype, unit_size, tuple(shard), reduce_dtype)


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes: its parameters' device; the current accelerator, or the CPU, for meta ones."""
    for param in model.parameters():
        if param.device.type != "meta":
            return param.device
    return default_device()


def default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def model_of(module: nn.Module) -> PartitionedModel:
    """The machinery of a partitioned module. TypeError when it is not partitioned."""
    model = getattr(module, _MODEL, None)
    if model is None:
        name = type(module).__name__
        raise TypeError(f"{name} is not partitioned: call zero3.shard() or build it under zero3.init()")
    return model


def partition(
    module: nn.Module,
    ranks: Ranks,
    settings: Settings,
    store: ShardStore,
    scheduler: Scheduler,
    device: torch.device,
) -> PartitionedModel:
    """Group the parameters, fill the units one after the other, install hooks."""
    if getattr(module, _MODEL, None) is not None:
        _unhook(module)
    refuse_shared_memory(module)
    if any(param.device.type == "meta" for param in module.parameters()):
        from .partitioned_init import materialise_from_meta

        materialise_from_meta(module, ranks, settings, store, device)
    if ranks.size > 1:
        for name, buffer in module.named_buffers():
            _share_buffer(ranks, name, buffer.detach())
    model = PartitionedModel(module, ranks, settings, store, scheduler, device)
    hosts: dict[nn.Module, list[Unit]] = {}
    for one in group(module, settings.unit_size, model.dtypes_of):
        unit = _take_over(model, one)
        if one.host is not None:
            hosts.setdefault(one.host, []).append(unit)
    object.__setattr__(module, _MODEL, model)
    hooks.install(model, module, hosts)
    full_state.install(model, module)
    scheduler.attach(model)
    return model


def _share_buffer(ranks: Ranks, name: str, buffer: Tensor) -> None:
    """Rank 0's values for all, however they lie in memory."""
    if buffer.device.type == "meta":
        return
    if buffer.layout is not torch.strided:
        raise UnsupportedError(
            f"buffer {name} is {buffer.layout}: on several ranks its values must come from rank 0, and only a dense "
            "one can be sent. Make it dense, or keep it as a plain attribute."
        )
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim]:
            buffer = buffer.narrow(dim, 0, 1)  # expanded: the others are the same memory
    values = buffer.contiguous()
    ranks.broadcast(values, f"rank 0's values of buffer {name}")
    if values is not buffer:
        buffer.copy_(values)


def _take_over(model: PartitionedModel, one: Group) -> Unit:
    """Make a unit of `one`. Its parameters may be plain, or slots of other units; those end here."""
    old_slots = {p: parameter_forms.slot_of(p) for p, _ in one.params if parameter_forms.is_partitioned(p)}
    unit = model.add_unit(one.name, one.params)
    model.fill(unit, _values(unit, old_slots))
    return unit


def _values(unit: Unit, old_slots: dict[Tensor, ParamSlot]) -> Iterator[tuple[ParamSlot, Tensor]]:
    """Each slot with its whole parameter; at most one old unit is gathered at a time."""

    def old_unit(slot: ParamSlot) -> Unit | None:
        return old_slots[slot.param].unit if slot.param in old_slots else None

    for old, slots in itertools.groupby(unit.slots, old_unit):
        if old is None:
            yield from ((slot, slot.param.detach().contiguous()) for slot in slots)
            continue
        with full_state.gathered_master(old) as flat:
            yield from ((slot, old_slots[slot.param].view_of(flat)) for slot in slots)
        old.model.retire(old)


def _unhook(module: nn.Module) -> None:
    """The model is partitioned anew: its old machinery keeps the shards until they are taken over, no more."""
    old = model_of(module)
    old.border()
    for unit in old.units:
        old.release(unit, force=True)
    old.unhook()


def _refuse_wrapper(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    """A wrapper that handles gradients by itself would see placeholders."""
    if isinstance(wrapper, _WRAPPERS) and getattr(module, _MODEL, None) is not None:
        raise UnsupportedError(
            f"the model is partitioned by zero3, which does what {type(wrapper).__name__} does: use it "
            "without a wrapper"
        )


nn.modules.module.register_module_module_registration_hook(_refuse_wrapper)
