"""Unit: the parameters that are gathered and released together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .bandwidth_centric import Partition, offsets_of, piece_shape
from .buffer_pool import Layout, Place
from .unit_state import GradState, ParamState

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel
    from .saved_views import SavedView
    from .tiles import TilePlace


# Up to this size one pass over a whole buffer costs less than several calls for its gaps.
_CHEAP_TO_CLEAR_NBYTES = 1 << 20


def _counts(held: dict[Any, Any]) -> list[int]:
    """References to each value of a dict."""
    return [sys.getrefcount(value) for value in held.values()]


# With those of the loop and the call, of which Python's versions do not count the same.
_HELD_BY_DICT = _counts({0: object()})[0]


class ParamSlot:
    """A parameter's place in its unit.

    param         the model's own Parameter object, or a tile of it (tiles.py); its form changes
                  (parameter_forms.py), its identity never
    names         every name under which the model has it (several when it is tied)
    offset        where it starts in the unit's flat buffer, in elements
    start, stop   the part of it that lies in this rank's shard, within the shard (may be empty)
    place         the same of the gathered parameter, in the unit's layout
    changes       how often its values were changed, as far as that was collected
    unswappable   for torch.utils.swap_tensors, which refuses to exchange what has a weak reference: the identity of
                  `param` would be another's
    """

    __slots__ = (
        "_accumulator", "changes", "index", "names", "numel", "offset", "param", "place",
        "placeholder", "shape", "start", "stop", "strides", "touched", "unit", "unswappable", "version",
    )  # fmt: skip

    def __init__(self, unit: Unit, index: int, param: Tensor, names: Sequence[str], offset: int):
        self.unit = unit
        self.index = index
        self.param: Any = param  # a Tensor of changing class
        self.names = tuple(names)
        self.shape = param.shape
        self.numel = param.numel()
        self.strides = torch.empty(self.shape, device="meta").stride()
        self.offset = offset
        self.start, self.stop = unit.partition.piece(unit.rank, offset, self.numel)
        self.place: Any = None  # a Place, once the unit has a layout
        self.placeholder = unit.model.placeholder(unit.dtype, self.shape)
        self.changes = 0
        self.touched: Tensor | None = None  # the values when somebody took a raw handle on them (`.data`)
        self.version = 0  # the Parameter's own version counter when `changes` was last brought up to date
        self.unswappable: Any = None
        self._accumulator: Any = None

    def __reduce__(self) -> tuple:
        return type(None), ()  # the ordinary parameter of a model on one rank is pickled without its place in a unit

    def accumulator(self) -> Any:
        """The graph node that adds up this parameter's gradient.

        Kept, since finding it costs microseconds; `forget_accumulator` breaks the cycle that keeping it makes.
        """
        if self._accumulator is None:
            with torch._C.DisableTorchFunctionSubclass():
                self._accumulator = torch.autograd.graph.get_gradient_edge(self.param).node
        return self._accumulator

    def forget_accumulator(self) -> None:
        """torch makes a new node when a parameter's dtype has changed; and a model that is dropped must die."""
        self._accumulator = self.unit.accumulators = None

    @property
    def has_grad(self) -> bool:
        """Whether the reduced gradient holds something for it."""
        return self.index in self.unit.with_grad

    @has_grad.setter
    def has_grad(self, value: bool) -> None:
        (self.unit.with_grad.add if value else self.unit.with_grad.discard)(self.index)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def tile(self) -> TilePlace | None:
        """Which tile it is, of a parameter in tiles."""
        return getattr(self.param, "_zero3_tile", None)

    @property
    def owner(self) -> Any:
        """The model's own Parameter: `param`, or the whole of which it is a tile."""
        return self.param if self.tile is None else self.tile.tiles.whole

    @property
    def first(self) -> int:
        """The element of the owner, in row-major order, with which this begins."""
        return 0 if self.tile is None else self.tile.tiles.rows[self.tile.number] * self.tile.tiles.row_numel

    def own_range(self) -> tuple[int, int]:
        """(start, stop) of this rank's part within the whole parameter, in row-major order."""
        start = self.unit.rank * self.unit.shard_numel + self.start - self.offset
        return start, start + self.stop - self.start

    def piece_of(self, shard: Tensor) -> Tensor:
        """View of this parameter's part of `shard` (shard_numel,), with the parameter's ndim."""
        return shard[self.start : self.stop].view(piece_shape(self.shape, self.stop - self.start))

    def view_of(self, flat: Tensor) -> Tensor:
        """View of the whole parameter in `flat` (padded_numel,)."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)


class Unit:
    """A flat buffer, the parameters that view it, and this rank's shard of it.

    dtype         of the gathered parameters
    wire_dtype    of its gradient while it is reduced
    params, placeholders   of all slots
    accumulators  of all slots, where all are known
    with_grad     numbers of the slots for which the reduced gradient holds something
    layout, wire_layout   of the parameters in a flat buffer, in these two dtypes
    master_dtype  of the shard that the optimizer updates, and of its gradient
    numel         elements of all parameters together, without padding
    shard_numel, padded_numel   elements of this rank's shard, and of the flat buffer
    nbytes        bytes of the unit when gathered
    flat          (padded_numel,) dtype, while gathered or on the way there; else None
    shown         whether the parameters have the form gathered (False: released); None: filled, or interrupted between
    used          whether anybody but autograd may have got at them since, and may have changed them
    kept          whether somebody has ever kept the parameters themselves beyond a forward, past our saved-tensor hooks
    state, grad_state   see unit_state.py
    holds         how many running forwards use it now
    saved_mark    what every SavedView of it holds
    shared_views  the last SavedView of a place, which all share that save the place with the same values
    replays       forwards without gradient in this step that a checkpoint will run again
    generation    counts changes of all values at once (a state that was loaded); each slot counts its own beside
    """

    def __init__(
        self,
        model: PartitionedModel,
        index: int,
        name: str,
        params: Sequence[tuple[Tensor, Sequence[str]]],
        master_dtype: torch.dtype,
        dtype: torch.dtype,
        shard_multiple: int,
    ):
        self.model = model
        self.index = index
        self.name = name
        self.dtype = dtype
        self.master_dtype = master_dtype
        self.permanent = False  # always gathered: its one shard is the whole, and lies in reachable memory
        self.plain = False  # permanent, and its parameters are ordinary ones, gradient included
        self.device = model.device
        self.rank = model.shard_rank
        self._offsets, self.flat_numel = offsets_of(param.numel() for param, _ in params)
        self.partition = Partition.of(self.flat_numel, model.shard_ranks, shard_multiple)
        self.shard_numel, self.padded_numel = self.partition.shard_numel, self.partition.padded_numel
        self.nbytes = self.padded_numel * dtype.itemsize
        self.slots = [
            ParamSlot(self, i, param, names, offset)
            for i, ((param, names), offset) in enumerate(zip(params, self._offsets, strict=True))
        ]
        self.wire_dtype = model.settings.reduce_dtype or dtype
        self.layout, self.wire_layout = self._layout_in(dtype), self._layout_in(self.wire_dtype)
        for slot in self.slots:
            slot.place = self.layout.place(slot.offset, slot.shape, slot.strides)
        self.params = [slot.param for slot in self.slots]
        self.placeholders = [slot.placeholder for slot in self.slots]
        self.accumulators: list[Any] | None = None
        self.with_grad: set[int] = set()
        self.unwatched = list(self.slots)  # those whose gradient nobody has asked to be told of
        self._gaps = list(self._find_gaps())
        self.numel = sum(slot.numel for slot in self.slots)
        self.flat: Any = None  # a Tensor while gathered
        self.buffer: Any = None  # the pool's buffer under `flat`; None when the store's own memory serves
        self.shown: bool | None = False
        self.used = False
        self.kept = False
        self.state = ParamState.SHARDED
        self.grad_state = GradState.NONE
        self.holds = 0
        self.shared_views: dict[Place, SavedView] = {}
        self.saved_mark = object()
        self._own_marks = sys.getrefcount(self.saved_mark)
        self.replays = 0
        self.generation = 0
        self.pending: Any = None  # what the present state waits for: a read, then a collective
        self.awaited: dict[int, set[int]] = {}  # backward's id -> slots whose gradient will still come
        self.fresh_grads: dict[int, Tensor] = {}  # slot -> full gradient, not yet reduced
        self.unsynced: Tensor | None = None  # no_sync: the full gradient (padded_numel,), while it is in hand
        self.unsynced_slots: set[int] = set()  # which parts of it, in hand or with the store, count
        self.reducing: Any = None

    def accumulators_of(self, trained: Sequence[ParamSlot]) -> list[Any]:
        """Those of its slots that require a gradient."""
        if len(trained) < len(self.slots):
            return [slot.accumulator() for slot in trained]
        if self.accumulators is None:
            self.accumulators = [slot.accumulator() for slot in trained]
        return self.accumulators

    def references(self) -> list[int]:
        """How often each of its parameters, which are gathered, is held: by its accumulator too, from the first on."""
        if self.accumulators is None:
            self.accumulators_of([slot for slot in self.slots if slot.param.requires_grad])
        return [sys.getrefcount(param) for param in self.params]

    @property
    def has_saved_views(self) -> bool:
        """Whether autograd keeps views of it for a backward to come."""
        if sys.getrefcount(self.saved_mark) > self._own_marks + len(self.shared_views):
            return True
        return any(count > _HELD_BY_DICT for count in _counts(self.shared_views))

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, numel={self.numel}, state={self.state}, grad={self.grad_state})"

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(slot.param.requires_grad for slot in self.slots)

    def own_slice(self, flat: Tensor) -> Tensor:
        """This rank's shard within `flat`."""
        if self.shard_numel == self.padded_numel:
            return flat
        start, stop = self.partition.bounds(self.rank)
        return flat[start:stop]

    def clear_gaps(self, flat: Tensor) -> None:
        """Zero what belongs to no parameter in `flat` (padded_numel,)."""
        if len(self._gaps) > 1 and flat.nbytes <= _CHEAP_TO_CLEAR_NBYTES:
            flat.zero_()
            return
        for start, stop in self._gaps:
            flat[start:stop].zero_()

    def _layout_in(self, dtype: torch.dtype) -> Layout:
        return Layout.of(dtype, self.padded_numel, tuple((slot.shape, slot.offset) for slot in self.slots))

    def _find_gaps(self) -> Iterator[tuple[int, int]]:
        for offset, slot in zip([*self._offsets[1:], self.padded_numel], self.slots, strict=True):
            end = slot.offset + slot.numel
            if offset > end:
                yield end, offset


def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that shows a missed access: NaN, or the largest integer, never a plausible number.

    Whoever asks for its memory to write there, or without saying for what, gets an error of torch's: collectives,
    DLPack, and most extensions in C++.
    """
    if dtype.is_floating_point or dtype.is_complex:
        value: float | int = float("nan")
    else:
        value = torch.iinfo(dtype).max if dtype != torch.bool else 1
    element = torch.full((), value, dtype=dtype, device=device)
    torch._C._set_throw_on_mutable_data_ptr(element)
    return element
