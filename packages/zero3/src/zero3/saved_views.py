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

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import StaleViewError, UnsupportedError
from .parameter_forms import changes_of

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel
    from .unit import Unit

_autograd = torch._C._autograd
Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class SavedView:
    """A view of a unit, without its memory. Lives as long as the graph node that saved it."""

    __slots__ = ("changes", "offset", "size", "slot", "stride", "unit")

    def __init__(self, unit: Unit, view: Tensor):
        self.unit = unit
        self.offset = view.storage_offset() - unit.flat.storage_offset()
        self.size = view.shape
        self.stride = view.stride()
        self.slot = slot = unit.slot_at(self.offset)
        if slot.touched is not None:
            unit.model.collect_changes(unit, watch=True)
        self.changes = changes_of(slot)
        unit.saved_views += 1

    def __del__(self):
        self.unit.saved_views -= 1

    def rebuild(self) -> Tensor:
        """The view, on the buffer that the unit has now (gathered for it if need be)."""
        unit = self.unit
        if changes_of(self.slot) != self.changes:
            raise StaleViewError(
                f"parameter {self.slot.name} was changed (by an optimizer step or in place) after this forward "
                "saved it for backward; the gradient would be wrong. Run backward before the change."
            )
        unit.model.needed_by_backward(unit)
        flat: Tensor = unit.flat
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


class _HookPair:
    """Our pack and unpack, above the pair that was topmost when a forward began."""

    def __init__(self, model: PartitionedModel, below: Pair | None):
        self.model = model
        self.below = below

    def pack(self, tensor: Tensor) -> Any:
        unit = self.model.unit_of_memory(tensor)
        if unit is not None:
            return SavedView(unit, tensor)
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
    """Pushes the pair while a model's modules run forward."""

    def __init__(self, model: PartitionedModel):
        self._model = model
        self._bare = _HookPair(model, None)

    def push(self) -> bool:
        """Put our pair on top unless it is there already. True when it was put: `pop` must follow."""
        below = _autograd._top_saved_tensors_default_hooks(True)
        if self._is_ours(below):
            return False
        pair = self._bare if below is None else _HookPair(self._model, below)
        _autograd._push_saved_tensors_default_hooks(pair.pack, pair.unpack)
        return True

    def pop(self) -> None:
        """Take our pair off. After a forward that was interrupted others may have been put above it: they stay."""
        above = []
        while not self._is_ours(top := _autograd._top_saved_tensors_default_hooks(True)):
            above.append(top)
            _autograd._pop_saved_tensors_default_hooks()
        _autograd._pop_saved_tensors_default_hooks()
        for pair in reversed(above):
            _autograd._push_saved_tensors_default_hooks(*pair)

    def _is_ours(self, pair: Pair | None) -> bool:
        owner = getattr(pair[0], "__self__", None) if pair is not None else None
        return type(owner) is _HookPair and owner.model is self._model
