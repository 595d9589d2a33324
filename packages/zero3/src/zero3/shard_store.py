"""Where a shard lives: the ShardStore protocol, and the store that keeps all in memory.

This is one half of the seam to an offload engine (the other is scheduler.py). zero3 calls a store; the store
knows tiers, files and optimizers, and nothing of modules, hooks or autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .buffer_pool import BufferPool, Layout, PooledBuffer, allocate_on
from .unit import Unit


class ShardStore(Protocol):
    """What zero3 asks of the place where shards lie. All shards are (shard_numel,) on the unit's device.

    shard_multiple   a shard's length is a multiple of this many elements
    pool             reused memory for gathered units, which `start_read` can fill
    """

    shard_multiple: int
    pool: BufferPool

    def adopt(self, unit: Unit, shard: Tensor) -> None:
        """Take over initial values, in the unit's master dtype. `shard` is the store's from now on."""

    def forget(self, unit: Unit) -> None:
        """The unit is gone: its room is free."""

    def resident(self, unit: Unit) -> Tensor | None:
        """The shard in the gathered dtype, where gathered parameters may view it in place; else None."""

    def start_read(self, unit: Unit, out: Tensor) -> Callable[[], None]:
        """Begin to fill `out` with the shard in the gathered dtype; returns the wait.

        The values must be up to date: an update that waits for this unit runs first.
        """

    def before_use(self, unit: Unit) -> None:
        """A resident unit is about to be used in place: an update that waits for it runs now."""

    def write_back(self, unit: Unit, values: Tensor, start: int, stop: int) -> None:
        """[start, stop) of the shard was changed from outside to `values` (gathered or master dtype).

        The master takes exactly these values. `values` may be the resident shard itself.
        """

    def master(self, unit: Unit) -> Tensor:
        """The shard in the master dtype, up to date; perhaps a copy."""

    def gradient_arrived(self, unit: Unit, shard: Tensor) -> None:
        """The mean gradient of this rank's shard, over all ranks; added to what is there since the last drop.

        Only parameters whose slot says `has_grad` count. `shard` belongs to the caller again on return.
        """

    def gradient(self, unit: Unit) -> Tensor | None:
        """The gradient that has arrived, to read or change in place; None when there is none."""

    def check_gradient(self, unit: Unit) -> None:
        """Somebody asks for a gradient that is not there: raise where it was there, and has been used up."""

    def drop_gradient(self, unit: Unit) -> None:
        """zero_grad(): nothing has arrived."""

    def keep_full_gradient(self, unit: Unit, flat: Tensor) -> None:
        """no_sync: this rank's own gradient of the whole unit, (padded_numel,), waits until it is taken or dropped.

        `flat` is the store's from now on.
        """

    def take_full_gradient(self, unit: Unit) -> Tensor:
        """What was kept, in its dtype; the caller's from now on, on the unit's device."""

    def drop_full_gradient(self, unit: Unit) -> None:
        """What was kept is not wanted."""

    def optimizer_shards(self, unit: Unit) -> Tensor:
        """The master shard for an optimizer of torch's to change in place, until `optimizer_done`."""

    def optimizer_done(self, unit: Unit) -> None:
        """The shard given out by `optimizer_shards` has its new values."""


class NoStore:
    """Of a model that is gone: whatever is asked of it ends in a RuntimeError that says so."""

    def drop_gradient(self, unit: Unit) -> None:
        """None is left: an optimizer's last zero_grad() does no harm."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "the partitioned model is gone, and with it its parameters: keep the module that was partitioned as long "
            "as parts of it, or its optimizer, are used"
        )


class InMemoryStore:
    """All shards, and their gradients, in the memory of the unit's device."""

    shard_multiple = 1
    plain_gradients = True  # one rank, nothing converted: parameters and gradients may stay torch's own

    def __init__(self, device: torch.device):
        self._device = device
        self.pool = BufferPool(allocate_on(device))
        self._gradient_pool = BufferPool(allocate_on(device))  # a step's gradients lie where the last one's lay
        self._shards: dict[Unit, Tensor] = {}  # master dtype
        self._gradients: dict[Unit, tuple[Tensor, PooledBuffer]] = {}  # master dtype
        self._full_gradients: dict[Unit, Tensor] = {}

    def adopt(self, unit: Unit, shard: Tensor) -> None:
        self._shards[unit] = shard.to(self._device, unit.master_dtype)

    def forget(self, unit: Unit) -> None:
        self._shards.pop(unit, None)
        self.drop_gradient(unit)
        self._full_gradients.pop(unit, None)

    def resident(self, unit: Unit) -> Tensor | None:
        shard = self._shards[unit]
        return shard if unit.dtype == unit.master_dtype else None

    def start_read(self, unit: Unit, out: Tensor) -> Callable[[], None]:
        out.copy_(self._shards[unit])
        return lambda: None

    def before_use(self, unit: Unit) -> None:
        """Nothing waits: torch's optimizers update within their step."""

    def write_back(self, unit: Unit, values: Tensor, start: int, stop: int) -> None:
        target = self._shards[unit][start:stop]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)

    def master(self, unit: Unit) -> Tensor:
        return self._shards[unit]

    def gradient_arrived(self, unit: Unit, shard: Tensor) -> None:
        present = self.gradient(unit)
        if present is not None:
            present.add_(shard)
            return
        buffer = self._gradient_pool.take(shard.numel() * unit.master_dtype.itemsize, unit.name)
        flat, _ = buffer.laid_out(Layout.of(unit.master_dtype, shard.numel(), ()))
        self._gradients[unit] = flat.copy_(shard), buffer

    def gradient(self, unit: Unit) -> Tensor | None:
        return self._gradients[unit][0] if unit in self._gradients else None

    def check_gradient(self, unit: Unit) -> None:
        """Nothing is used up."""

    def drop_gradient(self, unit: Unit) -> None:
        if unit in self._gradients:
            # Whoever holds a view of it keeps it: the pool asks for that.
            self._gradient_pool.give_back(self._gradients.pop(unit)[1])

    def keep_full_gradient(self, unit: Unit, flat: Tensor) -> None:
        self._full_gradients[unit] = flat

    def take_full_gradient(self, unit: Unit) -> Tensor:
        return self._full_gradients.pop(unit)

    def drop_full_gradient(self, unit: Unit) -> None:
        del self._full_gradients[unit]

    def optimizer_shards(self, unit: Unit) -> Tensor:
        return self._shards[unit]

    def optimizer_done(self, unit: Unit) -> None:
        """The shard was changed in place: nothing to carry."""
