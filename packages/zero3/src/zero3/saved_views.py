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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import StaleViewError, UnsupportedError
from .parameter_forms import Gathered, changes_of

if TYPE_CHECKING:
    from .buffer_pool import Place
    from .partitioned_model import PartitionedModel
    from .unit import ParamSlot, Unit

_autograd = torch._C._autograd
Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedView:
    """A view of a unit, without its memory. Lives as long as the graph node that saved it.

    It is counted by the mark that it holds, not in a destructor: an interrupt that meets one is lost, since Python can
    raise nothing out of there, and a backward destroys two dozen of these a block.
    """

    __slots__ = ("changes", "mark", "place", "slot", "unit")

    @classmethod
    def of(cls, tensor: Tensor, model: PartitionedModel) -> SavedView | None:
        """Of a view of one of the model's gathered units; None of any other tensor."""
        if type(tensor) is Gathered:  # a whole parameter; to ask a tensor of this class anything takes long
            slot: ParamSlot = tensor._zero3
            ours = slot.unit.buffer is not None and slot.unit.model is model
            return cls(slot.unit, slot.place) if ours else None
        try:
            unit = model.gathered_at.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # a sparse tensor, or a wrapper around others: no view of anything
            return None
        if unit is None or tensor.dtype != unit.dtype:
            return None
        offset = tensor.storage_offset() - unit.flat.storage_offset()
        return cls(unit, unit.layout.place(offset, tensor.shape, tensor.stride()))

    def __init__(self, unit: Unit, place: Place):
        self.unit = unit
        self.place = place
        self.slot = slot = unit.slots[place.index]
        if slot.touched is not None:
            unit.model.collect_changes(unit, watch=True)
        self.changes = changes_of(slot)
        self.mark = unit.saved_mark

    def rebuild(self) -> Tensor:
        """The view, on the buffer that the unit has now (gathered for it if need be)."""
        unit = self.unit
        if changes_of(self.slot) != self.changes:
            raise StaleViewError(
                f"parameter {self.slot.name} was changed (by an optimizer step or in place) after this forward "
                "saved it for backward; the gradient would be wrong. Run backward before the change."
            )
        unit.model.needed_by_backward(unit)
        return unit.buffer.at(self.place, unit.layout)


class HookPair:
    """Our pack and unpack, above the pair that was topmost when a forward began."""

    def __init__(self, model: PartitionedModel, below: Pair | None):
        self.model = model
        self.below = below

    def put_on_top(self) -> None:
        _autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Any:
        view = SavedView.of(tensor, self.model)
        if view is not None:
            return view
        if self.below is not None:
            return _Below(self.below[0](tensor))
        return tensor.detach(), tensor._version

    def unpack(self, packed: Any) -> Tensor:
        if type(packed) is SavedView:
            if torch.is_grad_enabled() and not packed.unit.holds:
                raise UnsupportedError(
                    f"double backward (create_graph=True) through the partitioned unit {packed.unit.name} is not "
                    "supported: the graph of its gathers does not exist. Compute it on a model that is not "
                    "partitioned, or inside zero3.gathered(model)."
                )
            return packed.rebuild()
        if type(packed) is _Below:
            return self.below[1](packed.value)  # type: ignore[index]
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.dtype} {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
            )
        return tensor


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
