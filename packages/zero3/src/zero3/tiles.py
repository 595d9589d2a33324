"""A parameter in tiles (paper, 5.1.3: memory-centric tiling): one to its owner, several units to us.

The model's own Parameter keeps its name, its shape and its place in modules and optimizers, and never has values of
its own. They lie in tiles: parameters of rows [start, stop) of its first dimension, each alone in its unit, which no
module holds. A function of torch that gets the whole runs tile by tile, each gathered for its turn alone
(tiled_operators.py); one that cannot gets all rows in one tensor, and says so. Rows, because they are a contiguous
stretch of the whole: in a file, in a draw of random numbers, and for the next number of tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import parameter_forms
from .bandwidth_centric import piece_shape
from .errors import UnsupportedError
from .own_hook import OwnHook
from .parameter_forms import Released, ShardGradient, raw_data, raw_grad, set_raw_data, set_raw_grad, without_noticing
from .unit import ParamSlot, placeholder
from .untraced import untraced

log = logging.getLogger(__name__)

_requires_grad_slot: Any = torch._C.TensorBase.requires_grad


def boundaries(rows: int, count: int) -> list[int]:
    """Where each of `count` tiles of `rows` rows begins, and the end; the longer ones first."""
    size, longer = divmod(rows, count)
    return [index * size + min(index, longer) for index in range(count + 1)]


class TilePlace(NamedTuple):
    """Which tile of which parameter a tile is."""

    tiles: Tiles
    number: int


class Tiles:
    """The tiles of one parameter.

    whole    the model's own Parameter
    params   the tiles, in order
    rows     (len(params) + 1,) tile i is rows [rows[i], rows[i + 1])
    """

    def __init__(self, whole: nn.Parameter, params: list[nn.Parameter], rows: list[int]):
        self.whole: Any = whole
        self.params = params
        self.rows = rows
        self.shape = whole.shape
        self.row_numel = prod(whole.shape[1:])
        self.name = "(a parameter)"
        self._lent: tuple[Tensor, int] | None = None  # all rows in one tensor, and its version when it was made
        self._grad: tuple[Tensor, int] | None = None  # what user code has of the gradient, and its version
        self._told = False
        trainable = whole.requires_grad
        for index, param in enumerate(params):
            param._zero3_tile = TilePlace(self, index)  # type: ignore[attr-defined]
        whole._zero3_tiles = self  # type: ignore[attr-defined]
        whole.__class__ = Tiled
        set_raw_grad(whole, None)
        self.show(params[0].dtype, params[0].device)
        if trainable:
            self._refuse_gradients()

    # -- the object that the model has -----------------------------------------------------------------------

    def show(self, dtype: torch.dtype, device: torch.device) -> None:
        """The whole looks as a parameter of `dtype` on `device` that is released."""
        self.whole.__class__ = Tiled
        if raw_data(self.whole).dtype != dtype or raw_data(self.whole).is_contiguous():
            set_raw_data(self.whole, placeholder(dtype, device).expand(self.shape))

    def adopted(self, slot: ParamSlot) -> None:
        """A tile lies in a unit now."""
        self.name = slot.name
        self.show(slot.unit.dtype, slot.unit.device)

    def _refuse_gradients(self) -> None:
        """Autograd must reach the tiles; a function that saw only the whole has computed with nothing."""

        def refuse(_: Any) -> None:
            set_raw_grad(self.whole, None)
            raise UnsupportedError(
                f"parameter {self.name} is in tiles, and was used by a function that knows nothing of them (an "
                "autograd.Function of your own, perhaps): let it work on zero3.tiles.over_tiles(param, ...), or do "
                "not tile this parameter."
            )

        with without_noticing():
            Tensor.register_post_accumulate_grad_hook(self.whole, OwnHook(refuse))

    def require_grad(self, value: bool) -> None:
        """Freeze or thaw all tiles."""
        known = self.whole._post_accumulate_grad_hooks
        for param in (self.whole, *self.params):
            with without_noticing():
                _requires_grad_slot.__set__(param, value)
        if value and not known:
            self._refuse_gradients()

    # -- values ----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[ParamSlot]:
        """Of the tiles that are partitioned already."""
        return [param._zero3 for param in self.params if parameter_forms.is_partitioned(param)]  # type: ignore

    def __iter__(self) -> Iterator[tuple[int, int, nn.Parameter]]:
        """(start, stop, tile) of every tile."""
        return ((start, stop, param) for (start, stop), param in zip(pairwise(self.rows), self.params, strict=True))

    def split(self, beside: Tensor, dim: int = 0) -> dict[int, Tensor]:
        """First row of a tile -> the tile's part of `beside`, whose dimension `dim` is as long as there are rows.

        Cut at once: a slice for each tile would in backward be zeros of the size of `beside` for each, added up.
        """
        sizes = [stop - start for start, stop, _ in self]
        return dict(zip(self.rows[:-1], torch.split(beside, sizes, dim), strict=True))

    def whole_tensor(self) -> Tensor:
        """All rows in one tensor of the whole's dtype; a copy."""
        self.keep_changes()
        out = torch.empty(self.shape, dtype=self.whole.dtype, device=self.whole.device)
        with torch.no_grad():
            self.over(lambda start, stop, tile: out[start:stop].copy_(tile))
        return out

    def over(self, fn: Callable[[int, int, Tensor], Any]) -> list[Any]:
        """[fn(start, stop, tile), ...], each tile gathered for its call alone."""
        self.keep_changes()
        return [_gathered_for(fn, start, stop, tile) for start, stop, tile in self]

    def put(self, first: int, values: Tensor) -> None:
        """Elements from `first` on, in row-major order, become the flat `values`; rank 0's count. No gather."""
        slots = self.slots
        if slots:
            slots[0].unit.model.ranks.broadcast(values, f"rank 0's values of {self.name}")
        last = first + values.numel()
        for start, stop, tile in self:
            begin, end = start * self.row_numel, stop * self.row_numel
            low, high = max(first, begin), min(last, end)
            if low < high:
                _assign(tile, low - begin, values[low - first : high - first])

    def lend(self, function: str, raw: bool) -> Tensor:
        """All rows in one tensor, for a function without a tiled form.

        What is written into it reaches the tiles at the next look at the parameter, and at the next border.
        `raw`: the function hands out the memory itself, where writing shows in no version.
        """
        self._tell(function)
        whole = self.whole_tensor()
        self._lent = whole, -1 if raw else whole._version
        return whole

    def joined(self, function: str) -> Tensor:
        """All rows in one tensor that autograd knows to come from the tiles."""
        self._tell(function)
        return torch.cat(self.over(lambda start, stop, tile: tile.clone()))

    def _tell(self, function: str) -> None:
        if not self._told:
            self._told = True
            log.warning("parameter %s is in tiles, but %s has no tiled form and gets it whole", self.name, function)

    def keep_changes(self) -> None:
        """What user code wrote into a copy that it got of the values, or of the gradient, reaches the tiles."""
        lent, self._lent = self._lent, None
        if lent is not None and lent[0]._version != lent[1]:
            self.put(0, lent[0].view(-1))
        grad, self._grad = self._grad, None
        if grad is not None and grad[0]._version != grad[1]:
            self._write_gradient(grad[0])

    # -- gradients -------------------------------------------------------------------------------------------

    def gradient(self) -> Tensor | None:
        """This rank's part of the reduced gradient, a copy; changes of it reach the tiles' at the next border."""
        self.keep_changes()
        parts = [param.grad for param in self.params]
        if any(part is None for part in parts):
            return None
        flat = torch.cat([part.as_subclass(Tensor).reshape(-1) for part in parts])  # type: ignore[union-attr]
        grad = flat.view(piece_shape(self.shape, flat.numel()))
        self._grad = grad, grad._version
        seen = grad.as_subclass(ShardGradient)
        seen._zero3 = self.slots[0]
        return seen

    def assign_gradient(self, value: Tensor | None) -> None:
        """`param.grad = value`."""
        self._grad = None
        if value is None:
            for param in self.params:
                param.grad = None
            return
        numel = sum(slot.stop - slot.start for slot in self.slots)
        if value.numel() != numel:
            raise UnsupportedError(
                f"the gradient of {self.name} cannot become {tuple(value.shape)}: this rank's part of it has "
                f"{numel} elements"
            )
        for part, param in zip(self._parts(value), self.params, strict=True):
            param.grad = part.view(piece_shape(param._zero3.shape, part.numel()))  # type: ignore[attr-defined]

    def _write_gradient(self, value: Tensor) -> None:
        for part, param in zip(self._parts(value), self.params, strict=True):
            if (stored := param.grad) is not None:
                stored.as_subclass(Tensor).copy_(part.view(stored.shape))

    def _parts(self, own: Tensor) -> tuple[Tensor, ...]:
        """The tiles' parts of this rank's part of something of the whole's shape."""
        return own.as_subclass(Tensor).reshape(-1).split([slot.stop - slot.start for slot in self.slots])

    # -- inside an optimizer of torch's ----------------------------------------------------------------------

    def present_piece(self) -> None:
        """The tiles are this rank's pieces: let the whole be all of them, in one tensor."""
        pieces = torch.cat([raw_data(param).reshape(-1) for param in self.params])
        grads = [raw_grad(param) for param in self.params]
        shape = piece_shape(self.shape, pieces.numel())
        self.whole.__class__ = nn.Parameter
        set_raw_data(self.whole, pieces.view(shape))
        if all(grad is not None for grad in grads):
            set_raw_grad(self.whole, torch.cat([grad.reshape(-1) for grad in grads]).view(shape))  # type: ignore

    def withdraw_piece(self) -> None:
        """What the optimizer made of the whole goes to the pieces; the whole is released again. May come twice."""
        if type(self.whole) is not nn.Parameter:
            return
        with torch.no_grad():
            for part, param in zip(self._parts(raw_data(self.whole)), self.params, strict=True):
                raw_data(param).view(-1).copy_(part)
        if raw_grad(self.whole) is None:  # by a zero_grad() within the step
            for param in self.params:
                set_raw_grad(param, None)
        set_raw_grad(self.whole, None)
        unit = self.slots[0].unit
        self.show(unit.dtype, unit.device)

    # -- inside gathered() -----------------------------------------------------------------------------------

    def assemble(self) -> None:
        """The tiles are gathered: let the whole have all rows."""
        whole = self.whole_tensor()
        self.whole.__class__ = _Assembled
        set_raw_data(self.whole, whole)

    def take_apart(self) -> None:
        """What was changed in the whole is changed in the tiles, which are still gathered."""
        whole = raw_data(self.whole)
        for start, stop, param in self:
            rows, tile = whole[start:stop], raw_data(param)
            if not torch.equal(rows.reshape(-1).view(torch.uint8), tile.reshape(-1).view(torch.uint8)):
                with torch.no_grad():
                    param.copy_(rows)
        unit = self.slots[0].unit
        self.show(unit.dtype, unit.device)


class Tiled(Released):
    """The form of a whole. Its tiles have the usual forms."""

    _zero3_tiles: Tiles

    @classmethod
    @untraced
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        from . import tiled_operators  # which needs this class

        kwargs = kwargs or {}
        if func in parameter_forms.METADATA or (func is Tensor.detach and not Released.detach_gathers):
            with without_noticing():
                return func(*args, **kwargs)
        return tiled_operators.call(func, args, kwargs)

    @property
    def requires_grad(self) -> bool:
        with without_noticing():
            return _requires_grad_slot.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._zero3_tiles.require_grad(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tiled:
        self._zero3_tiles.require_grad(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the reduced gradient, with the parameter's ndim; None when there is none."""
        return self._zero3_tiles.gradient()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._zero3_tiles.assign_gradient(value)

    @grad.deleter
    def grad(self) -> None:
        self._zero3_tiles.assign_gradient(None)

    @property
    def data(self) -> Tensor:
        """The values, for reading and writing past autograd: in tiles too."""
        return values_of(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UnsupportedError(
                f"parameter {self._zero3_tiles.name} is in tiles: its data cannot become {tuple(value.shape)} "
                f"{value.dtype}"
            )
        values_of(self).copy_(value)

    def register_hook(self, hook: Any) -> Any:
        """Refused: no gradient of the whole ever exists."""
        raise UnsupportedError(f"parameter {self._zero3_tiles.name} is in tiles: it has no gradient as a whole to hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Refused, for the same reason."""
        return self.register_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A deep copy is a plain, whole parameter."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self._zero3_tiles.whole_tensor(), self.requires_grad)
        return memo[id(self)]

    def __repr__(self) -> str:  # type: ignore[override]
        tiles = self._zero3_tiles
        return f"{tiles.name}: {tuple(self.shape)} {self.dtype} in {len(tiles.params)} tiles"


class _Assembled(Tiled):
    """Inside gathered(): all rows are there, and functions go straight to torch."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        return raw_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        with torch.no_grad():
            raw_data(self).copy_(value)


class _Values(Tiled):
    """`param.data` and `param.detach()`: the same tiles, without a gradient."""


def values_of(param: Tiled) -> Tensor:
    """The values of a parameter in tiles past autograd; functions on it work tile by tile too."""
    with without_noticing():
        values: Any = Tensor._make_subclass(_Values, raw_data(param), False)
    values._zero3_tiles = param._zero3_tiles
    return values


def is_detached(param: Tiled) -> bool:
    """Whether it was made by `values_of`."""
    return type(param) is _Values


def tiles_of(param: Any) -> Tiles | None:
    """The tiles of a parameter that is in tiles; None for any other."""
    return getattr(param, "_zero3_tiles", None)


def over_tiles(param: Tensor, fn: Callable[[int, int, Tensor], Any]) -> list[Any]:
    """[fn(start, stop, tile), ...]: each tile of rows [start, stop) is gathered for its call alone.

    A parameter that is in one piece counts as one tile.
    """
    tiles = tiles_of(param)
    return [fn(0, len(param), param)] if tiles is None else tiles.over(fn)


def _gathered_for(fn: Callable[[int, int, Tensor], Any], start: int, stop: int, tile: nn.Parameter) -> Any:
    if not parameter_forms.is_partitioned(tile):  # between cutting and partitioning
        return fn(start, stop, tile)
    unit = tile._zero3.unit  # type: ignore[attr-defined]
    with unit.model.in_use(unit):
        return fn(start, stop, tile)


def _assign(tile: nn.Parameter, first: int, values: Tensor) -> None:
    """Elements from `first` on become `values`."""
    if not parameter_forms.is_partitioned(tile):
        tile.data.view(-1)[first : first + values.numel()] = values
        return
    slot: ParamSlot = tile._zero3  # type: ignore[attr-defined]
    last = first + values.numel()
    slot.unit.model.assign(slot, lambda start, stop: values[start - first : stop - first], first, last)
