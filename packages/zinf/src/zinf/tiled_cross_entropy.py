"""The loss of an output head, tiled over the vocabulary: logits of batch × sequence × vocabulary never exist whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero3.tiles import over_tiles
from zero3.untraced import untraced

# Bytes of one tile of float32 logits.
_TILE_BYTES = 32 << 20

IGNORED_TARGET = -100  # as torch.nn.functional.cross_entropy's ignore_index


@untraced
def cross_entropy(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    """Mean cross entropy of `head(hidden)` against `targets`; 0-dim float32.

    hidden    (..., width)
    head      a module with `weight` (vocabulary, width) and perhaps `bias` (vocabulary,), such as nn.Linear
    targets   (...) int64; those equal to -100 do not count

    Loss and gradients are those of torch.nn.functional.cross_entropy on the whole logits in float32, to rounding:
    the log-sum-exp is added up over tiles of the vocabulary, and backward computes each tile's logits again. A weight
    that is itself in tiles (`zinf.tiled`) is gathered one tile at a time. Under autocast the logits are multiplied in
    its dtype, as a linear layer's.
    TypeError for what is no tensor, or no head; ValueError for shapes that do not fit; IndexError, as torch's, for a
    target that is no row of `head`.
    """
    for name, given in (("hidden", hidden), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} is a {type(given).__name__}, a tensor is needed")
    weight: Any = getattr(head, "weight", None)
    if not isinstance(head, nn.Module) or not isinstance(weight, Tensor):
        raise TypeError(f"head is a {type(head).__name__}: a module with a `weight` is needed, as torch.nn.Linear")
    bias: Tensor | None = getattr(head, "bias", None)
    if (
        weight.dim() != 2
        or not hidden.dim()
        or hidden.shape[-1] != weight.shape[1]
        or hidden.shape[:-1] != targets.shape
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, head weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do "
            "not fit: expected (..., width), (vocabulary, width) and (...)"
        )
    _check_targets(targets, len(weight))
    rows = _as_autocast_has_it(hidden.reshape(-1, hidden.shape[-1]))
    return _mean_loss(rows, weight, bias, targets.reshape(-1))


def _as_autocast_has_it(hidden: Tensor) -> Tensor:
    """In the dtype in which a linear layer would multiply it: backward, which runs outside of autocast, must too."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype is not torch.float64:
        return hidden.to(torch.get_autocast_dtype(device))
    return hidden


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    """What is no row would lie in no tile, and its logit count as 0."""
    if targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype is torch.bool:
        raise ValueError(f"targets are {targets.dtype}: numbers of rows of the head are needed, int64")
    known = (targets >= 0) & (targets < vocabulary) | (targets == IGNORED_TARGET)
    if targets.device.type != "cpu":  # without waiting for the device
        torch._assert_async(known.all())
    elif not known.all():
        raise IndexError(f"target {int(targets[~known][0])} is none of the head's {vocabulary} rows")


def _mean_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Of hidden (tokens, width) and targets (tokens,). A weight in tiles gives its sums tile by tile."""

    def sums(start: int, stop: int, tile: Tensor) -> tuple[Tensor, Tensor]:
        part = None if bias is None else bias[start:stop]
        return _SumsOverVocabulary.apply(hidden, tile, part, targets - start)

    log_sums, chosen = zip(*over_tiles(weight, sums), strict=True)
    log_sum = log_sums[0] if len(log_sums) == 1 else torch.stack(log_sums).logsumexp(dim=0)
    counted = targets != IGNORED_TARGET
    return (log_sum - sum(chosen))[counted].sum() / counted.sum()


class _SumsOverVocabulary(torch.autograd.Function):
    """(tokens,) log-sum-exp of the logits, and (tokens,) the target's logit, 0 where the target is another tile's."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_sum = torch.full((len(hidden),), float("-inf"), device=hidden.device)
        chosen = torch.zeros(len(hidden), device=hidden.device)
        for start, stop in _tiles(len(hidden), len(weight)):
            logits = _logits(hidden, weight, bias, start, stop)
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(dim=1))
            inside = (targets >= start) & (targets < stop)
            chosen[inside] = logits[inside, targets[inside] - start]
        ctx.save_for_backward(hidden, weight, bias, targets, log_sum)
        return log_sum, chosen

    @staticmethod
    def backward(ctx, grad_log_sum: Tensor, grad_chosen: Tensor):
        hidden, weight, bias, targets, log_sum = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        grad_bias = torch.empty_like(bias) if wants_bias and bias is not None else None
        for start, stop in _tiles(len(hidden), len(weight)):
            grad_logits = (_logits(hidden, weight, bias, start, stop) - log_sum.unsqueeze(1)).exp_()
            grad_logits.mul_(grad_log_sum.unsqueeze(1))
            inside = (targets >= start) & (targets < stop)
            grad_logits[inside, targets[inside] - start] += grad_chosen[inside]
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden.addmm_(grad_logits, weight[start:stop].to(hidden.dtype))
            if grad_weight is not None:
                grad_weight[start:stop] = grad_logits.t() @ hidden
            if grad_bias is not None:
                grad_bias[start:stop] = grad_logits.sum(dim=0)
        return grad_hidden, grad_weight, grad_bias, None


def _tiles(tokens: int, vocabulary: int) -> Iterator[tuple[int, int]]:
    rows = max(_TILE_BYTES // (4 * max(tokens, 1)), 1)
    for start in range(0, vocabulary, rows):
        yield start, min(start + rows, vocabulary)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
    """(tokens, stop - start) float32."""
    rows = weight[start:stop].to(hidden.dtype)
    return F.linear(hidden, rows, None if bias is None else bias[start:stop].to(hidden.dtype)).float()
