"""A linear map that computes in more bits than its weight is kept in.

A CPU without wide bf16 instructions multiplies bf16 matrices a hundred times slower than fp32 ones (measured on
AVX2: 1-4 against 100-150 GFLOP/s). There the activations stay in fp32, and each weight is widened just for the
product that needs it. Saved for backward is the narrow weight: the widened one would be a second copy of the whole
model, alive from forward to backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


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
    product = _WidenedProduct.apply(x, weight)
    return product if bias is None else product + bias.to(x.dtype)


class _WidenedProduct(torch.autograd.Function):
    """x · weightᵀ, with a weight narrower than `x`; its gradient is as narrow as the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        x_needs_grad, weight_needs_grad = ctx.needs_input_grad
        x_grad = grad @ weight.to(grad.dtype) if x_needs_grad else None
        weight_grad = None
        if weight_needs_grad:
            weight_grad = (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(weight.dtype)
        return x_grad, weight_grad
