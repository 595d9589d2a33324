"""gathered(): full parameters inside a with block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from . import parameter_forms
from .errors import UnsupportedError
from .tiles import tiles_of
from .unit import ParamSlot, Unit


@contextmanager
def gathered(model_or_params: nn.Module | Tensor | Iterable[Tensor], modify: bool = False) -> Iterator[None]:
    """Full parameters inside the block. Collective.

    model_or_params   a module, a parameter, or any of several (plain tensors and repetitions do no harm)
    modify            True: rank 0's changes are kept, on every rank, when the block ends without an exception.
                      False: a change raises UnsupportedError on every rank, and is dropped.
    """
    params = _params(model_or_params)
    ordinary, slots = _slots(params)
    tiled = list(dict.fromkeys(tiles for param in params if (tiles := tiles_of(param)) is not None))
    units = list(dict.fromkeys(slot.unit for slot in slots))
    for unit in units:
        unit.model.border()
        unit.holds += 1
        unit.model.access(unit)
    before = {unit: _snapshot(unit) for unit in units}
    before_ordinary = {slot: slot.param.detach().clone() for slot in ordinary}
    for slot in slots:
        parameter_forms.changed(slot)  # count from here
    for tiles in tiled:
        tiles.assemble()
    finished = False
    try:
        yield
        finished = True
    finally:
        for tiles in tiled:
            tiles.take_apart()
        changes = [slot for unit in units for slot in unit.slots if parameter_forms.changed(slot)]
        if not finished or not modify:
            changes += _restore_ordinary(before_ordinary)
        try:
            if finished and modify:
                _keep(slots)
            elif finished:
                _refuse(units, changes)
        finally:
            for unit in units:
                if not finished or not modify:
                    _restore(unit, before[unit])
                unit.holds -= 1
                if not unit.holds:
                    _forbid_saved(unit)
                    unit.model.scheduler.done_with(unit, "access")


def _params(model_or_params: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    if isinstance(model_or_params, nn.Module):
        return list(model_or_params.parameters())
    return [model_or_params] if isinstance(model_or_params, Tensor) else list(model_or_params)


def _slots(params: list[Tensor]) -> tuple[list[ParamSlot], list[ParamSlot]]:
    """Those whose parameters are ordinary ones, which one rank has; and those that are gathered."""
    slots = dict.fromkeys(slot for param in params for slot in parameter_forms.slots_of(param))
    return [slot for slot in slots if slot.unit.plain], [slot for slot in slots if not slot.unit.plain]


def _snapshot(unit: Unit) -> Tensor | None:
    """Memory that is the shard itself cannot be dropped after an unwanted change: keep a copy."""
    return unit.flat.clone() if unit.permanent else None


def _restore(unit: Unit, before: Tensor | None) -> None:
    if before is not None and not torch.equal(unit.flat, before):
        unit.flat.copy_(before)


def _restore_ordinary(before: dict[ParamSlot, Tensor]) -> list[ParamSlot]:
    """The same for ordinary parameters; those that were changed."""
    changed = [slot for slot, was in before.items() if not parameter_forms.same_bits(was, slot.param.detach())]
    with torch.no_grad():
        for slot in changed:
            slot.param.copy_(before[slot])
    return changed


def _forbid_saved(unit: Unit) -> None:
    """What autograd has saved inside is the parameters themselves: torch's own error, if a backward still needs it."""
    if not unit.permanent:
        for slot in unit.slots:
            parameter_forms.mark_changed(slot)


def _keep(slots: list[ParamSlot]) -> None:
    """Rank 0's values become everybody's. All of them: a change through a raw handle shows nowhere."""
    for slot in slots:
        unit = slot.unit
        unit.model.ranks.broadcast(slot.view_of(unit.flat), f"rank 0's values of {slot.name}")
        unit.model.write_back(slot)
        slot.changes += 1


def _refuse(units: list[Unit], changes: list[ParamSlot]) -> None:
    """UnsupportedError on every rank when any rank has changed something."""
    for unit in dict.fromkeys([*units, *(slot.unit for slot in changes)]):
        flags = torch.tensor([slot in changes for slot in unit.slots], dtype=torch.uint8, device=unit.device)
        unit.model.ranks.maximum(flags, f"whether parameters of unit {unit.name} were changed")
        if flags.any():
            raise UnsupportedError(
                f"parameter {unit.slots[int(flags.argmax())].name} was changed inside zero3.gathered(...): the change "
                "is dropped. To keep rank 0's changes, use gathered(..., modify=True)."
            )
