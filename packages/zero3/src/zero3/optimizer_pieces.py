"""torch's optimizers on partitioned parameters: inside `step()` each parameter is this rank's piece.

torch's global step hooks fire for every subclass of Optimizer. Before a step each partitioned parameter becomes
its piece of the shard, with its piece of the gradient; after it, the placeholder again. The hook after a step does
not fire when the step raises, so the model's next border looks for pieces that were left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import parameter_forms
from .errors import UnsupportedError
from .tiles import Tiles
from .unit import ParamSlot, Unit

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel

# Their update looks at a whole matrix, or at all parameters together: on a piece it would be another optimizer.
_NOT_ELEMENT_WISE = {"Adafactor", "LBFGS", "LAMB", "Lamb", "LARS", "Muon", "Shampoo", "SOAP", "SM3", "SparseAdam"}


def handles_partitioned(optimizer: Optimizer) -> bool:
    """Whether the optimizer deals with units by itself (an offload engine's own)."""
    return getattr(optimizer, "handles_partitioned_parameters", False)


def _units(optimizer: Optimizer) -> dict[Unit, list[ParamSlot]]:
    units: dict[Unit, list[ParamSlot]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            for slot in parameter_forms.slots_of(param):
                if not slot.unit.plain:
                    units.setdefault(slot.unit, []).append(slot)
    return units


def before_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Every partitioned parameter of `optimizer` becomes this rank's piece."""
    if handles_partitioned(optimizer):
        return None
    units = _units(optimizer)
    if not units:
        return None
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    if any(unit.model.shard_ranks > 1 for unit in units) and not names.isdisjoint(_NOT_ELEMENT_WISE):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not element-wise: on partitioned parameters it would compute something "
            "else. Use an element-wise optimizer (SGD, Adam, AdamW, ...)."
        )
    _refuse_ordinary(optimizer, units)
    _present(units)
    return _with_whole_parameters(optimizer, args, kwargs)


def after_step(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Back to the forms that the model knows; the shards have new values."""
    if handles_partitioned(optimizer):
        return
    units = _units(optimizer)
    for slot in (slot for slots in units.values() for slot in slots):
        slot.changes += slot.has_grad
    _withdraw_all(units)
    for model in {unit.model for unit in units}:
        model.scheduler.optimizer_stepped()


def recover(model: PartitionedModel) -> None:
    """A step has raised and left pieces behind: back to the forms that the model knows."""
    left = dict(model.pieces)
    for tiles in dict.fromkeys(slot.tile.tiles for slot in left if slot.tile is not None):
        tiles.withdraw_piece()
    for unit in dict.fromkeys(slot.unit for slot in left):
        slots = [slot for slot in unit.slots if slot in left]
        zeroed = [slot for slot in slots if left[slot] and parameter_forms.raw_grad(slot.param) is None]
        _withdraw(unit, slots)
        for slot in zeroed:  # by a zero_grad() since
            slot.param.grad = None


def _refuse_ordinary(optimizer: Optimizer, units: dict[Unit, list[ParamSlot]]) -> None:
    """Put into a model after it was partitioned: on several ranks each would train its own."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    ordinary = {id(param) for param in params if not parameter_forms.is_partitioned(param) and param.grad is not None}
    if not ordinary:
        return
    for model in {unit.model for unit in units if unit.model.ranks.size > 1}:
        for name, param in model.named_parameters():
            if id(param) in ordinary:
                raise UnsupportedError(
                    f"parameter {name} came into the model after it was partitioned: its gradient is this rank's own, "
                    "and the ranks would come to different values. Call zero3.shard(model) again, and make the "
                    "optimizer then."
                )


def _present(units: dict[Unit, list[ParamSlot]]) -> None:
    for model in {unit.model for unit in units}:
        model.border()
        model.gradients.settle(reduce_all=True)
    for unit, slots in units.items():
        stored = unit.model.store.gradient(unit)
        if not unit.permanent:
            unit.model.release(unit, force=True)
        shard = unit.model.store.optimizer_shards(unit)
        for slot in slots:
            grad = slot.piece_of(stored).to(shard.dtype) if stored is not None and slot.has_grad else None
            parameter_forms.present_piece(slot, slot.piece_of(shard), grad)
            unit.model.pieces[slot] = grad is not None
    for tiles in _tiled(units):
        tiles.present_piece()


def _withdraw_all(units: dict[Unit, list[ParamSlot]]) -> None:
    for tiles in _tiled(units):
        tiles.withdraw_piece()
    for unit, slots in units.items():
        _withdraw(unit, slots)


def _tiled(units: dict[Unit, list[ParamSlot]]) -> list[Tiles]:
    """Of parameters in tiles that lie in `units`."""
    places = (slot.tile for slots in units.values() for slot in slots)
    return list(dict.fromkeys(place.tiles for place in places if place is not None))


def _withdraw(unit: Unit, slots: list[ParamSlot]) -> None:
    for slot in slots:
        parameter_forms.withdraw_piece(slot)
        unit.model.pieces.pop(slot, None)
    unit.model.store.optimizer_done(unit)
    if unit.permanent:
        unit.flat = unit.model.store.resident(unit)
        parameter_forms.gather([slot.param for slot in slots], [slot.view_of(unit.flat) for slot in slots])


def _with_whole_parameters(optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The step's arguments; a closure among them sees the model as it is outside of steps."""

    def around(closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            units = _units(optimizer)
            _withdraw_all(units)
            loss = closure()
            _present(units)
            return loss

        return evaluate

    args = tuple(around(value) if position and callable(value) else value for position, value in enumerate(args))
    return args, {name: around(value) if callable(value) else value for name, value in kwargs.items()}


register_optimizer_step_pre_hook(before_step)
register_optimizer_step_post_hook(after_step)
