"""Functions of torch on parameters in tiles: one after the other where they can be, on all rows at once else.

    linear, conv        each tile gives some of the output's features or channels, which are joined
    embedding, w[ids]   each tile gives the rows that it has, which are put in order
    addmm, matmul       x · W, as Hugging Face's Conv1D: each tile takes some of the input's features; outputs add up
    w[i], w[a:b]        the rows, out of the tiles that have them
    grouped_mm, bmm     experts (tiled_experts.py)
    in place            element-wise ones run on each tile; random ones draw as for the whole (tiled_draws.py)

The product that a tiled operator gives differs from the whole one by the rounding of a split sum at most, and so do
gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from . import parameter_forms, tiled_draws, tiled_experts
from .parameter_forms import without_noticing
from .tiles import Tiled, Tiles, is_detached, values_of


def call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, in which parameters in tiles occur."""
    wholes = list(dict.fromkeys(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tiled)))
    for whole in wholes:
        whole._zero3_tiles.keep_changes()
    if func is Tensor.detach:
        return values_of(args[0])
    if func in _RAW:  # makes a tensor, and asks the parameter for its looks only
        with without_noticing():
            return func(*args, **kwargs)
    if func in _IN_PLACE:
        target, *rest = args or [kwargs.pop("tensor")]  # as torch.nn.init names it
        if isinstance(target, Tiled):
            return _in_place(func, target, rest, kwargs)
    if len(wholes) == 1 and not is_detached(wholes[0]) and func in _OPERATORS:
        result = _OPERATORS[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    return _whole(func, args, kwargs)


def _whole(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    raw = func in parameter_forms.RAW_ACCESS

    def whole_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tiled):
            return leaf
        tiles = leaf._zero3_tiles
        if torch.is_grad_enabled() and leaf.requires_grad and not raw:
            return tiles.joined(name)
        return tiles.lend(name, raw)

    args, kwargs = tree_map(whole_of, (args, kwargs))
    return func(*args, **kwargs)


# -- operators: arguments as torch's; NotImplemented where a case has no tiled form ---------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, Tiled) or weight.dim() != 2:
        return NotImplemented
    biases = _split(bias, weight._zero3_tiles)
    plain = torch._C._functorch.peek_interpreter_stack() is None and not torch.is_autocast_enabled(x.device.type)
    chained = plain and torch.is_grad_enabled() and x.requires_grad and x.dtype == weight.dtype
    rest = [x]

    def of_tile(start: int, stop: int, tile: Tensor) -> Tensor:
        if not chained:
            return F.linear(x, tile, biases[start])
        out, rest[0] = _LinearTile.apply(rest[0], tile, biases[start])
        return out

    return torch.cat(weight._zero3_tiles.over(of_tile), dim=-1)


class _LinearTile(torch.autograd.Function):
    """(x · Wᵀ + b, x) of a tile; the second is the x of the next tile.

    So the gradient of x comes from tile to tile, and each adds its own to it in place. Left to autograd, each tile
    would make a gradient as large as x, in fresh memory, and all would be added up.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias), x.view_as(x)

    @staticmethod
    def backward(ctx, grad, of_x):
        if grad is None:
            return of_x, None, None
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        if of_x is None:
            of_x = torch.mm(rows, weight).view(x.shape)
        elif torch.is_grad_enabled():  # a graph of this backward is made
            of_x = of_x + torch.mm(rows, weight).view(x.shape)
        else:
            of_x.view(-1, x.shape[-1]).addmm_(rows, weight)
        of_weight = torch.mm(rows.t(), x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def _convolution(function: Callable, dimensions: int) -> Callable:
    def convolution(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Any:
        if not isinstance(weight, Tiled) or groups != 1:
            return NotImplemented
        biases = _split(bias, weight._zero3_tiles)
        outs = weight._zero3_tiles.over(
            lambda start, stop, tile: function(x, tile, biases[start], stride, padding, dilation)
        )
        return torch.cat(outs, dim=-1 - dimensions)

    return convolution


def _split(bias: Tensor | None, tiles: Tiles) -> dict[int, Tensor | None]:
    return dict.fromkeys(tiles.rows) if bias is None else {**tiles.split(bias)}


def _embedding(
    ids, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False
) -> Any:
    if not isinstance(weight, Tiled) or weight.dim() != 2:
        return NotImplemented
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)

    def rows(start: int, stop: int, tile: Tensor, own_ids: Tensor) -> Tensor:
        padding = padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None
        return F.embedding(own_ids, tile, padding, max_norm, norm_type, scale_grad_by_freq, sparse)

    return _rows(weight, ids, rows)


def _rows(weight: Tiled, ids: Tensor, rows: Callable[[int, int, Tensor, Tensor], Tensor]) -> Tensor:
    """(*ids.shape, ...) of `rows(start, stop, tile, ids within the tile)`. Every tile takes part, if with no id:
    its gradient is then zeros, as those rows' of the whole."""
    flat = ids.reshape(-1)
    places = []

    def of_tile(start: int, stop: int, tile: Tensor) -> Tensor:
        places.append(((flat >= start) & (flat < stop)).nonzero().view(-1))
        return rows(start, stop, tile, flat[places[-1]] - start)

    found = torch.cat(weight._zero3_tiles.over(of_tile))
    order = torch.cat(places)
    if len(order) != len(flat):
        raise IndexError(f"an index is out of range: {weight._zero3_tiles.name} has {len(weight)} rows")
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return found.index_select(0, back).view(*ids.shape, *weight.shape[1:])


def _addmm(bias, x, weight, *, beta=1, alpha=1) -> Any:
    if not isinstance(weight, Tiled) or beta != 1 or alpha != 1:
        return NotImplemented
    return _summed(x, weight, bias)


def _matmul(x: Any, weight: Any) -> Any:
    if not isinstance(weight, Tiled) or weight.dim() != 2 or not isinstance(x, Tensor):
        return tiled_experts.bmm(x, weight) if isinstance(x, Tensor) and x.dim() == 3 else NotImplemented
    return _summed(x.reshape(-1, x.shape[-1]), weight, None).view(*x.shape[:-1], weight.shape[1])


def _summed(x: Tensor, weight: Tiled, total: Tensor | None) -> Tensor:
    """total + x · W: (n, out), of x (n, in) and W (in, out)."""
    sums = [total]
    tiles = weight._zero3_tiles
    parts = tiles.split(x, dim=1)

    def add(start: int, stop: int, tile: Tensor) -> None:
        if sums[0] is None:
            sums[0] = torch.mm(parts[start], tile)
        elif sums[0] is total:
            sums[0] = torch.addmm(total, parts[start], tile)
        else:
            sums[0].addmm_(parts[start], tile)  # nobody saves a sum

    tiles.over(add)
    return sums[0]  # type: ignore[return-value]


def _item(weight: Any, index: Any) -> Any:
    """Rows by number, by slice, or by a tensor of numbers."""
    if not isinstance(weight, Tiled):
        return NotImplemented
    tiles = weight._zero3_tiles
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.dim():
        wrapped = torch.where(index < 0, index + len(weight), index)
        return _rows(weight, wrapped, lambda start, stop, tile, ids: tile[ids])
    if isinstance(index, Tensor) and index.dim() == 0 and index.dtype not in (torch.bool, torch.uint8):
        index = int(index)
    if isinstance(index, slice) and index.step in (None, 1):
        tiled_experts.refuse_one_by_one(tiles)
        first, last, _ = index.indices(len(weight))
        parts = [tile[max(first - a, 0) : min(last, b) - a] for a, b, tile in tiles if max(first, a) < min(last, b)]
        return NotImplemented if not parts else parts[0] if len(parts) == 1 else torch.cat(parts)
    if isinstance(index, bool | Tensor) or not hasattr(index, "__index__"):
        return NotImplemented
    tiled_experts.refuse_one_by_one(tiles)
    row = operator.index(index)
    row += len(weight) if row < 0 else 0
    for start, stop, tile in tiles:
        if start <= row < stop:
            return tile[row - start]  # touched, not held: it stays until others are
    raise IndexError(f"index {index} is out of range: {tiles.name} has {len(weight)} rows")


# -- in place -------------------------------------------------------------------------------------------------


def _in_place(func: Callable, whole: Tiled, args: list, kwargs: dict[str, Any]) -> Any:
    tiles = whole._zero3_tiles
    if torch.is_grad_enabled() and whole.requires_grad and func not in _INITIALISERS:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    with torch.no_grad():
        if func in tiled_draws.DRAWS:
            tiled_draws.DRAWS[func](tiles, *args, **kwargs)
        elif func is Tensor.copy_ and not isinstance(args[0], Tiled) and args[0].shape == whole.shape:
            for start, stop, tile in tiles:  # not gathered: the master takes more than gathered precision
                tile.copy_(args[0][start:stop])
        else:
            others = tree_map(_whole_values, (args, kwargs))

            def on_tile(start: int, stop: int, tile: Tensor) -> None:
                rest, options = tree_map(lambda leaf: _of_rows(leaf, whole, start, stop), others)
                func(tile, *rest, **options)

            tiles.over(on_tile)
    return whole


def _whole_values(leaf: Any) -> Any:
    return leaf._zero3_tiles.whole_tensor() if isinstance(leaf, Tiled) else leaf


def _of_rows(other: Any, whole: Tensor, start: int, stop: int) -> Any:
    """What of an operand belongs to rows [start, stop): those rows, or all of one that is broadcast over rows."""
    by_rows = isinstance(other, Tensor) and other.dim() == whole.dim() and other.shape[0] == whole.shape[0] > 1
    return other[start:stop] if by_rows else other


_OPERATORS: dict[Callable, Callable] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.conv1d: _convolution(F.conv1d, 1),
    F.conv2d: _convolution(F.conv2d, 2),
    F.conv3d: _convolution(F.conv3d, 3),
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__getitem__: _item,
    Tensor.transpose: tiled_experts.transpose,
    torch._grouped_mm: tiled_experts.grouped_mm,
    torch.bmm: tiled_experts.bmm,
}

_ELEMENT_WISE = [
    Tensor.zero_, Tensor.fill_, Tensor.copy_, Tensor.add_, Tensor.sub_, Tensor.mul_, Tensor.div_, Tensor.neg_,
    Tensor.abs_, Tensor.clamp_, Tensor.clamp_min_, Tensor.clamp_max_, Tensor.sqrt_, Tensor.rsqrt_, Tensor.exp_,
    Tensor.log_, Tensor.pow_, Tensor.sign_, Tensor.round_, Tensor.erfinv_, Tensor.nan_to_num_, Tensor.lerp_,
    Tensor.addcmul_, Tensor.addcdiv_, Tensor.__iadd__, Tensor.__isub__, Tensor.__imul__, Tensor.__itruediv__,
]  # fmt: skip
_INITIALISERS = frozenset(
    [nn.init.constant_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_]
)  # these need no torch.no_grad() around them
_IN_PLACE = frozenset([*_ELEMENT_WISE, *_INITIALISERS, *tiled_draws.DRAWS])

_RAW = frozenset(
    [Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor,
     torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like]
)  # fmt: skip
