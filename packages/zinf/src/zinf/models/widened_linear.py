"""A linear map that computes in more bits than its weight is kept in.

A CPU without wide bf16 instructions multiplies bf16 matrices a hundred times slower than fp32 ones (measured on
AVX2: 1-4 against 100-150 GFLOP/s). There the activations stay in fp32, and each weight is widened just for the
product that needs it, a block of rows at a time into the same scratch memory: a whole widened weight would be twice as
large as what the optimizer's and the parameters' buffers take together, and fresh each time. Saved for backward is
the narrow weight.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zero3.tiles import over_tiles

_BLOCK = 1 << 20  # elements that are widened at a time: large enough for a product at full speed, and small for a cache

_of_thread = threading.local()


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype to multiply in, for parameters of `dtype` on `device`.

    Decided by what the processor is, not by timing it: the same machine must give the same numbers every time.
    """
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    if dtype == torch.bfloat16 and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return dtype
    return torch.float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias in the dtype of `x`: (..., in) -> (..., out), with weight (out, in) and bias (out,)."""
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    products = over_tiles(weight, lambda start, stop, tile: _WidenedProduct.apply(x, tile))
    product = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    return product if bias is None else product + bias.to(x.dtype)


def widen_linear_layers(module: nn.Module) -> None:
    """Every `nn.Linear` in `module` multiplies in `compute_dtype`; its output is rounded to the dtype of its input.

    That is what bf16 hardware does, which adds up in fp32 too.
    """
    for child in module.modules():
        if type(child) is nn.Linear:
            child.forward = functools.partial(_layer_forward, child)  # type: ignore[method-assign]


def _layer_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    dtype = compute_dtype(x.device, layer.weight.dtype)
    if dtype == layer.weight.dtype:
        return F.linear(x, layer.weight, layer.bias)
    return linear(x.to(dtype), layer.weight, layer.bias).to(x.dtype)


class _WidenedProduct(torch.autograd.Function):
    """x · weightᵀ, with a weight narrower than `x`; its gradient is as narrow as the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        product = x.new_empty(len(rows), len(weight))
        for start, stop, wide in _widened(weight, x.dtype):
            torch.mm(rows, wide.t(), out=product[:, start:stop])
        return product.view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_needs_grad, weight_needs_grad = ctx.needs_input_grad
        grad_rows = grad.reshape(-1, grad.shape[-1])
        x_grad = weight_grad = None
        if x_needs_grad:
            x_grad = torch.zeros_like(x)
            for start, stop, wide in _widened(weight, x.dtype):
                x_grad.view(-1, x.shape[-1]).addmm_(grad_rows[:, start:stop], wide)
        if weight_needs_grad:
            rows = x.reshape(-1, x.shape[-1])
            weight_grad = torch.empty_like(weight)
            for start, stop, wide in _blocks(weight, x.dtype):
                torch.mm(grad_rows[:, start:stop].t(), rows, out=wide)
                weight_grad[start:stop] = wide
        return x_grad, weight_grad


def _widened(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks of rows of `weight` (out, in): (start, stop, (stop - start, in) in `dtype`), each good until the next."""
    for start, stop, scratch in _blocks(weight, dtype):
        yield start, stop, scratch.copy_(weight[start:stop])


def _blocks(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, scratch memory of that shape) for all rows of `weight`."""
    width = weight.shape[1]
    height = max(_BLOCK // max(width, 1), 1)
    for start in range(0, len(weight), height):
        stop = min(start + height, len(weight))
        yield start, stop, _scratch((stop - start) * width, dtype).view(stop - start, width)


def _scratch(numel: int, dtype: torch.dtype) -> Tensor:
    """(numel,) of this thread's scratch memory, kept: touching fresh memory costs as much as a product."""
    kept: Tensor | None = getattr(_of_thread, "scratch", None)
    if kept is None or kept.dtype != dtype or kept.numel() < numel:
        kept = _of_thread.scratch = torch.empty(max(numel, _BLOCK), dtype=dtype)
    return kept[:numel]
