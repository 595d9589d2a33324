"""The global norm of gradients that wait on their tiers, the same bits whichever tiers they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

import cpu_adam
from zero3.unit import ParamSlot, Unit

from .offload_engine import OffloadEngine, pieces


def norm(engine: OffloadEngine, units: Iterable[Unit], counts: Callable[[ParamSlot], bool]) -> float:
    """2-norm over all ranks of the waiting gradients of those slots of `units` that count, before any scaling.

    Collective.
    Sums of squares are in float64, over stretches that do not depend on the tier. inf or nan where a gradient
    holds one.
    """
    units = list(units)
    total = sum((_norm2(engine, unit, counts) for unit in units), 0.0)
    if units and units[0].model.shard_ranks > 1:
        total = float(units[0].model.ranks.sum(torch.tensor([total], dtype=torch.float64), "the gradient norm"))
    return math.sqrt(total) if total >= 0 else math.nan


def _norm2(engine: OffloadEngine, unit: Unit, counts: Callable[[ParamSlot], bool]) -> float:
    if not engine.waits(unit) or not any(map(counts, unit.slots)):
        return 0.0
    total = 0.0
    for start, stop in pieces(unit.shard_numel):
        part = _part(engine, unit, start, stop)
        for slot in unit.slots:
            low, high = max(slot.start, start), min(slot.stop, stop)
            if low < high and counts(slot):
                total += cpu_adam.norm2(part[low - start : high - start])
    return total


def _part(engine: OffloadEngine, unit: Unit, start: int, stop: int) -> Tensor:
    kept = engine.in_place(unit, "grad")
    if kept is not None:
        return kept[start:stop]
    engine.settle_gradients()
    return engine.read(unit, "grad", engine.waiting_dtype(unit), start, stop)
