"""torch's optimizers on partitioned parameters: inside `step()` each parameter is this rank's piece.

torch's global step hooks fire for every subclass of Optimizer. Before a step each partitioned parameter becomes
its piece of the shard, with its piece of the gradient; after it, the placeholder again. The hook after a step does
not fire when the step raises, so the one before is made to find pieces that were left behind.
"""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import parameter_forms
from .errors import UnsupportedError
from .unit import ParamSlot, Unit

# Their update looks at a whole matrix, or at all parameters together: on a piece it would be another optimizer.
_NOT_ELEMENT_WISE = {"Adafactor", "LBFGS", "LAMB", "Lamb", "LARS", "Muon", "Shampoo", "SOAP", "SM3", "SparseAdam"}


def handles_partitioned(optimizer: Optimizer) -> bool:
    """Whether the optimizer deals with units by itself (an offload engine's own)."""
    return getattr(optimizer, "handles_partitioned_parameters", False)


def _units(optimizer: Optimizer) -> dict[Unit, list[ParamSlot]]:
    units: dict[Unit, list[ParamSlot]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            slot = getattr(param, "_zero3", None)
            if slot is not None and not slot.unit.plain:
                units.setdefault(slot.unit, []).append(slot)
    return units


def before_step(optimizer: Optimizer, args, kwargs) -> None:
    """Every partitioned parameter of `optimizer` becomes this rank's piece."""
    if handles_partitioned(optimizer):
        return
    units = _units(optimizer)
    if not units:
        return
    if any(unit.model.shard_ranks > 1 for unit in units) and type(optimizer).__name__ in _NOT_ELEMENT_WISE:
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not element-wise: on partitioned parameters it would compute something "
            "else. Use an element-wise optimizer (SGD, Adam, AdamW, ...)."
        )
    for model in {unit.model for unit in units}:
        model.border()
    for unit, slots in units.items():
        stored = unit.model.store.gradient(unit)
        if not unit.permanent:
            unit.model.release(unit, force=True)
        shard = unit.model.store.optimizer_shards(unit)
        for slot in slots:
            grad = slot.piece_of(stored) if stored is not None and slot.has_grad else None
            parameter_forms.present_piece(slot, slot.piece_of(shard), grad)


def after_step(optimizer: Optimizer, args, kwargs) -> None:
    """Back to the forms that the model knows; the shards have new values."""
    if handles_partitioned(optimizer):
        return
    units = _units(optimizer)
    for unit, slots in units.items():
        for slot in slots:
            parameter_forms.withdraw_piece(slot)
            slot.changes += slot.has_grad
        unit.model.store.optimizer_done(unit)
        if unit.permanent:
            unit.flat = unit.model.store.resident(unit)
            for slot in slots:
                parameter_forms.gather(slot, slot.view_of(unit.flat))
    for model in {unit.model for unit in units}:
        model.scheduler.optimizer_stepped()


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
