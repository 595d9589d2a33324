"""Cutting parameters into tiles: of a plain model, of one that is partitioned, or before their memory exists."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from . import full_state, parameter_forms
from .parameter_forms import raw_data, without_noticing
from .tiles import Tiles, boundaries, tiles_of
from .unit import ParamSlot, placeholder

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel

# (shape, dtype) of a parameter to come -> in how many tiles it shall be; 1: in one piece.
TileCount = Callable[[torch.Size, torch.dtype], int]


def cut(param: nn.Parameter, count: int) -> Callable[[], None]:
    """Put `param` into `count` tiles along its first dimension, in place; 1 leaves one in one piece as it is.

    It may be plain, partitioned, or in another number of tiles. Returns what makes a plain parameter the plain one it
    was again, as long as its tiles are not partitioned yet; for others that does nothing.
    """
    tiles = tiles_of(param)
    if count == (1 if tiles is None else len(tiles.params)):
        return lambda: None
    slots = parameter_forms.slots_of(param)
    if slots:
        _cut_partitioned(param, slots, count)
        return lambda: None
    values = param.detach()
    rows = boundaries(len(param), count)
    parts = [_part(values[start:stop], param.requires_grad) for start, stop in pairwise(rows)]
    Tiles(param, parts, rows)

    def restore() -> None:
        if not parameter_forms.slots_of(param):
            del param._zero3_tiles  # type: ignore[attr-defined]
            param.__class__ = nn.Parameter
            parameter_forms.set_raw_data(param, values)

    return restore


def _cut_partitioned(param: nn.Parameter, old: list[ParamSlot], count: int) -> None:
    """The rows move from unit to unit, one new tile at a time. Collective."""
    first = old[0].unit
    model, trainable = first.model, param.requires_grad
    model.border()
    for slot in old:
        model.release(slot.unit, force=True)
    rows, row_numel = boundaries(len(param), count), param.shape[1:].numel()
    parts = []
    for start, stop in pairwise(rows):
        values = torch.empty(stop - start, *param.shape[1:], dtype=first.master_dtype, device=first.device)
        _collect(old, start * row_numel, values.view(-1))
        part = _part(placeholder(values.dtype, first.device).expand(values.shape), trainable)
        _fill(model, old[0].name, part, values)
        parts.append(part)
    for attribute in ("_zero3", "_zero3_tiles"):
        if attribute in param.__dict__:
            delattr(param, attribute)
    for slot in old:
        slot.unit.model.retire(slot.unit)
    _present(param, parts, rows)


def _part(values: Tensor, requires_grad: bool) -> nn.Parameter:
    """A tile with these values, and a version counter of its own, which views of one tensor would share."""
    part = nn.Parameter(torch.empty(0, dtype=values.dtype, device=values.device), requires_grad)
    part.data = values
    return part


def _present(param: nn.Parameter, parts: list[nn.Parameter], rows: list[int]) -> None:
    tiles = Tiles(param, parts, rows)
    for part in parts:
        slot: ParamSlot = part._zero3  # type: ignore[attr-defined]
        slot.unit.model.tiled[tiles] = None
        tiles.adopted(slot)


def _collect(old: list[ParamSlot], first: int, out: Tensor) -> None:
    """Elements from `first` on of the parameter that lies in `old`, in row-major order, into `out`."""
    for slot in old:
        low, high = max(first, slot.first), min(first + out.numel(), slot.first + slot.numel)
        if low < high:
            with full_state.gathered_master(slot.unit) as flat:
                whole = slot.view_of(flat).view(-1)
                out[low - first : high - first] = whole[low - slot.first : high - slot.first]


def _fill(model: PartitionedModel, name: str, part: nn.Parameter, values: Tensor) -> None:
    unit = model.add_unit(name, [(part, [name])])
    model.fill(unit, [(unit.slots[0], values)])


# -- before the memory exists ---------------------------------------------------------------------------------


class Unborn(Tensor):
    """What torch.empty gives inside a constructor for memory that a parameter in tiles shall never have.

    Given to nn.Parameter, it becomes one. Any other use makes it the plain tensor that was asked for.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in parameter_forms.METADATA:
            for leaf in tree_leaves((args, kwargs)):
                if type(leaf) is Unborn:
                    real = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
                    parameter_forms.set_raw_data(leaf, real)
                    leaf.__class__ = Tensor  # type: ignore[assignment]
            return func(*args, **kwargs)
        with without_noticing():
            return func(*args, **kwargs)


class AllocatingTiles(TorchFunctionMode):
    """Inside, torch.empty gives an `Unborn` for what shall be in tiles. `constructing`: whether a constructor runs."""

    def __init__(self, tile_count: TileCount, constructing: Callable[[], bool]):
        super().__init__()
        self._tile_count, self._constructing = tile_count, constructing

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty and self._constructing() and not kwargs.keys() & {"out", "pin_memory", "layout"}:
            wanted = func(*args, **{**kwargs, "device": "meta"})
            device = torch.device(kwargs.get("device") or torch.get_default_device())
            if device.type != "meta" and self._tile_count(wanted.shape, wanted.dtype) > 1:
                nothing = placeholder(wanted.dtype, device).expand(wanted.shape)
                return Tensor._make_subclass(Unborn, nothing)
        return func(*args, **kwargs)


def born(model: PartitionedModel, unborn: Unborn, requires_grad: bool, count: int) -> nn.Parameter:
    """A new parameter in tiles that lie in units of `model`; zeros, until an initialiser fills them."""
    with without_noticing():
        nothing = raw_data(unborn)
    whole = nn.Parameter(nothing, requires_grad)
    rows = boundaries(len(whole), count)
    parts = []
    for start, stop in pairwise(rows):
        part = _part(nothing[start:stop], requires_grad)
        values = torch.zeros(stop - start, *whole.shape[1:], dtype=whole.dtype, device=whole.device)
        _fill(model, "a parameter in tiles", part, values)
        parts.append(part)
    _present(whole, parts, rows)
    return whole
