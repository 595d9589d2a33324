"""Memory-centric tiling (paper, 5.1.3): which operators are cut into tiles, and into how many.

By hand with `tiled`, or by itself where a parameter with its gradient exceeds the device's budget. How a parameter in
tiles behaves is zero3's matter (tiles.py, tiled_operators.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from zero3.collectives import Ranks
from zero3.parameter_forms import dtypes_of, slots_of
from zero3.tile_cutting import cut
from zero3.tiles import tiles_of

from .config import Config

_MARK = "_zinf_tiles"

# A tile is one of four parts of device_memory: one in use, one ahead of it, a gradient, and the rest for others.
_PARTS = 4

# Their functions take the whole weight, or mix its rows: by themselves they stay in one piece.
_WHOLE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear, nn.modules.conv._ConvTransposeNd)


def tiled(module: nn.Module, tiles: int) -> nn.Module:
    """Run the operator `module` in `tiles` parts, one after the other; in place, returns `module`.

    For linear layers, embeddings, output heads, convolutions, Hugging Face's Conv1D, and modules whose experts are a
    parameter of three dimensions: every parameter of `module` itself with two or more dimensions is cut along the
    first. On several ranks experts in tiles must be used all in one function (grouped_mm, bmm, a tensor of numbers as
    index): picked one by one, they would differ between the ranks. Before zinf.shard, or inside zinf.init. 1 keeps it
    in one piece where it would be cut by itself.

    ValueError for a number that does not fit, or where there is nothing to cut.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")
    params = _own(module)
    name = type(module).__name__
    if not params or isinstance(module, _WHOLE):
        raise ValueError(f"{name} has no parameter that can be cut: tile the linear layer, embedding or convolution")
    most = min(len(param) for param in params)
    if not isinstance(tiles, int) or isinstance(tiles, bool) or not 1 <= tiles <= most:
        raise ValueError(f"tiles={tiles!r}: {name} can be cut into 1 to {most} tiles")
    if any(not slot.unit.model.under_construction for param in params for slot in slots_of(param)):
        raise ValueError(f"{name} is partitioned already: call zinf.tiled before zinf.shard")
    setattr(module, _MARK, tiles)
    return module


def _own(module: nn.Module) -> list[nn.Parameter]:
    """Parameters of `module` itself that have rows."""
    return [p for p in module.parameters(recurse=False) if p.ndim >= 2 and p.is_floating_point()]


@dataclass(frozen=True)
class TileLimits:
    """A parameter of more than `whole_bytes` when gathered is cut into tiles of at most `tile_bytes`, or one row.

    dtype    of gathered parameters
    shards   ranks over which a unit is cut
    """

    whole_bytes: int
    tile_bytes: int
    dtype: torch.dtype
    shards: int

    @classmethod
    def of(cls, config: Config, device_memory: int, ranks: Ranks) -> TileLimits:
        """Of `config`, with `device_memory` bytes for gathered units and their gradients; rank 0's count."""
        given = config.budget("tile_bytes")
        limits = torch.tensor([device_memory // 2, max(device_memory // _PARTS, 1)] if given is None else [given] * 2)
        ranks.broadcast(limits, "the size of tiles")
        shards = ranks.size if "optimizer" in config.shard else 1
        return cls(int(limits[0]), int(limits[1]), config.dtype, shards)

    def count(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """How many tiles a parameter of `shape` gets by itself: experts none on several ranks, who may pick them."""
        if len(shape) < 2 or not dtype.is_floating_point or (len(shape) == 3 and self.shards > 1):
            return 1
        row_bytes = prod(shape[1:]) * self.dtype.itemsize
        if shape[0] * row_bytes <= self.whole_bytes:
            return 1
        return -(-shape[0] // max(self.tile_bytes // max(row_bytes, 1), 1))


def cut_operators(module: nn.Module, limits: TileLimits) -> Callable[[], None]:
    """Cut what was marked by `tiled`, and what exceeds the limits.

    Returns what undoes it while nothing is partitioned.
    """
    undo = [cut(param, count) for param, count in _counts(module, limits)]

    def restore() -> None:
        for one in undo:
            one()

    return restore


def _counts(module: nn.Module, limits: TileLimits) -> Iterator[tuple[nn.Parameter, int]]:
    counts: dict[nn.Parameter, int] = {}
    for child in module.modules():
        mark = getattr(child, _MARK, None)
        for param in _own(child):
            if mark is not None:
                counts[param] = mark
            elif tiles_of(param) is None and param not in counts and not isinstance(child, _WHOLE):
                counts[param] = limits.count(param.shape, dtypes_of(param, limits.dtype)[1])
    yield from counts.items()
