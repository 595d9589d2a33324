"""Initial values of a parameter in tiles: the numbers that the whole would have drawn, in pieces.

torch draws normal values sixteen at a time, the last sixteen anew where their count is no multiple; so a piece is a
multiple of sixteen long, and the last takes what is left and is never shorter. What does not draw element after
element (orthogonal_, or trunc_normal_, which draws again for all while one is refused) is drawn whole, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from .tiles import Tiles

# Elements of a piece at most: a few MiB of scratch. Nor is a piece larger than a tile, since tiles may be as small as
# they are because there is no room for more.
_PIECE = 1 << 20
_SHORTEST = 16


def _pieces(tiles: Tiles) -> Iterator[tuple[int, int]]:
    """(first, last) of each piece."""
    numel = tiles.shape.numel()
    of_tile = tiles.rows[1] * tiles.row_numel // _SHORTEST * _SHORTEST
    piece = min(_PIECE, max(of_tile, _SHORTEST))
    first = 0
    while numel - first >= piece + _SHORTEST:
        yield first, first + piece
        first += piece
    yield first, numel


def _drawn(function: Callable) -> Callable:
    """`function(whole, ...)` for a function that fills a tensor in place, element after element."""

    def draw(tiles: Tiles, *args: Any, **kwargs: Any) -> None:
        whole = tiles.whole
        for first, last in _pieces(tiles):
            scratch = torch.empty(last - first, dtype=whole.dtype, device=whole.device)
            function(scratch, *args, **kwargs)
            tiles.put(first, scratch)

    return draw


def _kaiming_uniform(
    tiles: Tiles,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: torch.Generator | None = None,
) -> None:
    """The bound depends on the shape of the whole; computed in torch's own order of operations."""
    fan = nn.init._calculate_correct_fan(tiles.whole, mode)  # type: ignore[arg-type]
    std = nn.init.calculate_gain(nonlinearity, a) / sqrt(fan)  # type: ignore[arg-type]
    bound = sqrt(3.0) * std
    _drawn(Tensor.uniform_)(tiles, -bound, bound, generator=generator)


# Called with the tiles in place of the tensor.
DRAWS: dict[Callable, Callable] = {
    Tensor.normal_: _drawn(Tensor.normal_),
    Tensor.uniform_: _drawn(Tensor.uniform_),
    nn.init.normal_: _drawn(nn.init.normal_),
    nn.init.uniform_: _drawn(nn.init.uniform_),
    nn.init.kaiming_uniform_: _kaiming_uniform,
}
