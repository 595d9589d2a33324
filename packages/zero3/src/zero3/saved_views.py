"""Views of a unit's buffer that autograd keeps for backward, after the unit was released.

A unit is gathered into a reused buffer, so a saved view of it would show another unit's numbers later. While a
forward runs we therefore answer `saved_tensors_hooks`: a view of a gathered unit is recorded as (unit, offset,
shape, stride) and rebuilt on the unit's next buffer. The same door tells when backward needs a unit.

Three rules that made this hold:

- Only the topmost pair of hooks is called, so ours takes the unit's views and hands all else to the pair below
  it (an activation checkpoint's, `save_on_cpu`, the user's own).
- Hooks of any kind switch off torch's own check for in-place changes; so the version is recorded and compared.
- What is handed back must be a detached tensor: the tensor itself keeps the graph alive until garbage collection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import StaleViewError, UnsupportedError
from .parameter_forms import Gathered, changes_of
from .untraced import untraced

if TYPE_CHECKING:
    from .buffer_pool import Place
    from .partitioned_model import PartitionedModel
    from .unit import ParamSlot, Unit

_autograd = torch._C._autograd
_grad_enabled = torch.is_grad_enabled
Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedView:
    """A view of a unit, without its memory. Lives as long as a graph node that saved it.

    What saves the same place of a unit again gets the same object, as long as the values are the same.

    It is counted by the mark that it holds, not in a destructor: an interrupt that meets one is lost, since Python can
    raise nothing out of there.
    """

    __slots__ = ("changes", "mark", "place", "slot", "unit")

    @classmethod
    def of(cls, tensor: Tensor, model: PartitionedModel) -> SavedView | None:
        """Of a view of one of the model's gathered units; None of any other tensor."""
        if type(tensor) is Gathered:  # a whole parameter; to ask a tensor of this class anything takes long
            slot: ParamSlot = tensor._zero3
            unit, place = slot.unit, slot.place
            if unit.buffer is None or unit.model is not model:
                return None
        else:
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # a sparse tensor, or a wrapper around others: no view of anything
                return None
            found = model.gathered_memory.unit_at(address)
            if found is None or tensor.dtype != found.dtype:
                return None
            unit = found
            offset, rest = divmod(address - unit.buffer.start, unit.dtype.itemsize)
            if rest:
                return None
            place = unit.layout.place(offset, tensor.shape, tensor.stride())
            slot = unit.slots[place.index]
        if slot.touched is not None:
            model.collect_changes(unit, watch=True)
        changes = changes_of(slot)
        view = unit.shared_views.get(place)
        if view is None or view.changes != changes:
            view = cls(unit, slot, place, changes)
            if place.kept:
                unit.shared_views[place] = view
        return view

    def __init__(self, unit: Unit, slot: ParamSlot, place: Place, changes: int):
        self.unit = unit
        self.slot = slot
        self.place = place
        self.changes = changes
        self.mark = unit.saved_mark

    def rebuild(self) -> Tensor:
        """The view, on the buffer that the unit has now (gathered for it if need be)."""
        unit, slot = self.unit, self.slot
        model = unit.model
        if unit not in model.in_backward:
            model.needed_by_backward(unit)  # first: an update that was owed to the unit runs here, and is a change
        # What nobody has got at can have been changed by the whole unit only.
        changes = changes_of(slot) if unit.used else unit.generation + slot.changes
        if changes != self.changes:
            raise StaleViewError(
                f"parameter {slot.name} was changed (by an optimizer step or in place) after this forward "
                "saved it for backward; the gradient would be wrong. Run backward before the change."
            )
        return unit.buffer.at(self.place, unit.layout)


class HookPair:
    """Our pack and unpack, above the pair that was topmost when a forward began.

    Both are called for every tensor that autograd saves, two dozen a block, most of which are none of ours.
    """

    def __init__(self, model: PartitionedModel, below: Pair | None):
        self.model = model
        self.below = below
        self._bounds = model.gathered_memory.bounds

    def put_on_top(self) -> None:
        _autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    @untraced
    def pack(self, tensor: Tensor) -> Any:
        try:  # before anything else: does it lie in a unit (as GatheredMemory.unit_at)?
            ours = type(tensor) is Gathered or bisect_right(self._bounds, tensor.data_ptr()) & 1
        except RuntimeError:
            ours = False
        if ours and (view := SavedView.of(tensor, self.model)) is not None:
            return view
        if self.below is not None:
            return _Below(self.below[0](tensor))
        # What requires no gradient has no node that could own this; all else would keep the graph alive.
        return (tensor.detach() if tensor.requires_grad else tensor), tensor._version

    @untraced
    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{tensor.dtype} {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
                )
            return tensor
        if type(packed) is _Below:
            return self.below[1](packed.value)  # type: ignore[index]
        if _grad_enabled() and not packed.unit.holds:
            raise UnsupportedError(
                f"double backward (create_graph=True) through the partitioned unit {packed.unit.name} is not "
                "supported: the graph of its gathers does not exist. Compute it on a model that is not "
                "partitioned, or inside zero3.gathered(model)."
            )
        return packed.rebuild()


class _Below:
    """What the pair below ours made of a tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class SavedViews:
    """The pairs that lie on top while a model's modules run forward."""

    def __init__(self, model: PartitionedModel):
        self._model = model
        self._bare = HookPair(model, None)

    def pair(self) -> HookPair | None:
        """Our pair, to be put on top and taken off again (`take_off`); None where one of ours is on top already."""
        below = _top()
        owner = _owner(below)
        if owner is not None and owner.model is self._model:
            return None
        return self._bare if below is None else HookPair(self._model, below)

    def pair_outside(self) -> HookPair | None:
        """The same outside of any forward; None also below hooks of somebody else's.

        They have the parameter itself then: a checkpoint's must see as many tensors now as when it runs again.
        """
        below = _top()
        return self.pair() if below is None or _owner(below) is not None else None


def take_off(pairs: Sequence[HookPair]) -> None:
    """Take off what was put on top, given from the lowest on; what was put above them from outside stays.

    Several are left together by an interrupt. Whoever's hooks lay between them has taken off the topmost pair, as if
    it were its own: one of ours is gone then, and theirs is left in its place. So many must go as we have put, from
    our lowest on.
    """
    lowest = pairs[0]
    if len(pairs) == 1 and _owner(_top()) is lowest:
        _autograd._pop_saved_tensors_default_hooks()
        return
    stack: list[Pair] = []
    while (top := _top()) is not None:
        stack.insert(0, top)
        _autograd._pop_saved_tensors_default_hooks()
    owners = [_owner(pair) for pair in stack]
    if lowest in owners:
        first = owners.index(lowest)
    elif lowest.below is None:
        first = 0
    else:
        first = stack.index(lowest.below) + 1 if lowest.below in stack else len(stack)
    for pack, unpack in stack[:first] + stack[first + len(pairs) :]:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)


def _top() -> Pair | None:
    return _autograd._top_saved_tensors_default_hooks(True)


def _owner(pair: Pair | None) -> HookPair | None:
    owner = getattr(pair[0], "__self__", None) if pair is not None else None
    return owner if type(owner) is HookPair else None
