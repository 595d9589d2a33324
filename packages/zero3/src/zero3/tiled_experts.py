"""Experts in tiles: a weight (experts, ., .), whose tiles are groups of experts.

    grouped_mm, bmm     each tile multiplies the rows of its own experts; every tile takes part, on every rank alike
    w.transpose(1, 2)   is remembered until grouped_mm takes it: each tile is then turned in its turn
    w[i]                on one rank only: which experts are picked differs between ranks, and to gather takes all

A tile that no row needs takes part too, so that its gradient is zeros, as those experts' of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from . import hooks, parameter_forms
from .errors import UnsupportedError
from .parameter_forms import raw_data, without_noticing
from .tiles import Tiled, Tiles


class Turned(Tensor):
    """Experts with their last two dimensions exchanged, which no memory holds. Any function but grouped_mm gets all."""

    _zero3_weight: Tiled

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in parameter_forms.METADATA:
            with without_noticing():
                return func(*args, **kwargs)
        if func is torch._grouped_mm:
            result = grouped_mm(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map(_all_turned, (args, kwargs))
        return func(*args, **kwargs)


def _all_turned(leaf: Any) -> Any:
    return leaf._zero3_weight.permute(0, 2, 1) if isinstance(leaf, Turned) else leaf


def transpose(weight: Tensor, dim0: int, dim1: int) -> Any:
    """Arguments as torch's, here and below; NotImplemented where a case has no tiled form."""
    if not isinstance(weight, Tiled) or weight.dim() != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
        return NotImplemented
    with without_noticing():
        turned: Any = Tensor._make_subclass(Turned, raw_data(weight).transpose(1, 2), weight.requires_grad)
    turned._zero3_weight = weight
    return turned


def grouped_mm(x: Tensor, weight: Tensor, *, offs: Tensor | None = None, bias=None, out_dtype=None) -> Any:
    """(n, out) of x (n, in), whose rows lie in the order of their experts; expert i's end before row offs[i].

    Rows behind the last expert's give zeros, where torch leaves them open.
    """
    whole = weight._zero3_weight if isinstance(weight, Turned) else weight
    if not isinstance(whole, Tiled) or whole.dim() != 3 or offs is None or not (bias is out_dtype is None):
        return NotImplemented
    ends = [0, *offs.tolist()]
    tiles = whole._zero3_tiles
    sizes = [ends[stop] - ends[start] for start, stop, _ in tiles]
    *parts, behind = x.split([*sizes, len(x) - ends[-1]])
    part_of = dict(zip(tiles.rows[:-1], parts, strict=True))

    def of_tile(start: int, stop: int, tile: Tensor) -> Tensor:
        experts = tile if whole is weight else tile.transpose(1, 2)
        own = part_of[start]
        if not len(own):  # torch's function fails in backward without a row
            return torch.mm(own, experts[0])
        return torch._grouped_mm(own, experts, offs=offs[start:stop] - ends[start])

    outs = tiles.over(of_tile)
    return torch.cat([*outs, outs[0].new_zeros(len(behind), weight.shape[2])])


def bmm(x: Any, weight: Any) -> Any:
    """(experts, n, out) of x (experts, n, in)."""
    if not isinstance(weight, Tiled) or weight.dim() != 3 or not isinstance(x, Tensor) or len(x) != len(weight):
        return NotImplemented
    tiles = weight._zero3_tiles
    parts = tiles.split(x)
    return torch.cat(tiles.over(lambda start, _, tile: torch.bmm(parts[start], tile)))


def refuse_one_by_one(tiles: Tiles) -> None:
    """UnsupportedError where experts are picked out of tiles that several ranks must gather together."""
    if len(tiles.shape) != 3 or not tiles.slots:
        return
    model = tiles.slots[0].unit.model
    if model.shard_ranks > 1 and hooks.runs(model):
        raise UnsupportedError(
            f"{tiles.name} is in tiles, and its experts are picked one by one, which may differ between the "
            f"{model.shard_ranks} ranks: let the model use all of them in one function "
            "(experts_implementation='grouped_mm' or 'batched_mm' in Hugging Face's models), or do not tile it"
        )
