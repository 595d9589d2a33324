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
    before = _Before(units, ordinary)
    _open.append(before)
    for slot in slots:
        parameter_forms.changed(slot)  # count from here
    for tiles in tiled:
        tiles.assemble()
    finished = False
    try:
        yield
        finished = True
    finally:
        _open.remove(before)
        for tiles in tiled:
            tiles.take_apart()
        changes = [slot for unit in units for slot in unit.slots if parameter_forms.changed(slot)]
        try:
            if finished and modify:
                _keep(slots)
                for outer in _open:
                    outer.keep([*ordinary, *slots])
            elif finished:
                _refuse(units, [*changes, *before.ordinary_changes()])
        finally:
            if not finished or not modify:
                before.restore()
            for unit in units:
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


class _Before:
    """What was there when a block began, where an unwanted change cannot be dropped with a buffer: shards that are the
    gathered memory itself, and ordinary parameters."""

    def __init__(self, units: Iterable[Unit], ordinary: Iterable[ParamSlot]):
        self._flats = {unit: unit.flat.clone() for unit in units if unit.permanent}
        self._ordinary = {slot: slot.param.detach().clone() for slot in ordinary}

    def ordinary_changes(self) -> list[ParamSlot]:
        """The ordinary parameters that are not as they were."""
        return [
            slot for slot, was in self._ordinary.items() if not parameter_forms.same_bits(was, slot.param.detach())
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for slot in self.ordinary_changes():
                slot.param.copy_(self._ordinary[slot])
        for unit, was in self._flats.items():
            if not torch.equal(unit.flat, was):
                unit.flat.copy_(was)

    def keep(self, slots: Iterable[ParamSlot]) -> None:
        """A block inside this one has kept its changes of `slots`: they count as what was there."""
        for slot in slots:
            if slot in self._ordinary:
                self._ordinary[slot].copy_(slot.param.detach())
            elif slot.unit in self._flats:
                slot.view_of(self._flats[slot.unit]).copy_(slot.view_of(slot.unit.flat))


_open: list[_Before] = []  # of the blocks that are open, the outermost first


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
