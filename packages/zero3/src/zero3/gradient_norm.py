"""Norms of gradients over all ranks: clip_grad_norm_, and torch's own helpers made global."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import parameter_forms
from .errors import UnsupportedError
from .parameter_forms import ShardGradient
from .partition_model import model_of


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients of `model` so that their global 2-norm is at most `max_norm`.

    Returns the norm before (0-dim, float32), the same on every rank. Sums of squares are in float64. Parameters
    without a gradient count as zero; a norm that is not finite scales as torch's does. Collective.
    """
    machinery = model_of(model)
    machinery.border()
    machinery.gradients.settle(reduce_all=True)
    parts = list(_local_gradients(model))
    squares = torch.zeros(2, dtype=torch.float64)
    for part, everywhere in parts:
        squares[int(everywhere)] += _double(part).abs().square().sum().cpu()
    if machinery.shard_ranks > 1:
        machinery.ranks.sum(squares[:1], "the gradient norm")
    norm = squares.sum().sqrt()
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0).item()
    if factor != 1.0:
        for part, _ in parts:
            part.mul_(factor)
    return norm.float()


def _local_gradients(model: nn.Module) -> Iterable[tuple[Tensor, bool]]:
    """(this rank's part of a gradient, whether every rank has all of it) of every parameter that has one."""
    for param in model.parameters():
        slots = parameter_forms.slots_of(param)
        if not slots or slots[0].unit.plain:
            if param.grad is not None:
                yield param.grad, True
            continue
        for slot in slots:
            if slot.param.grad is not None:
                shard: Any = slot.unit.model.store.gradient(slot.unit)
                yield shard[slot.start : slot.stop], slot.unit.model.shard_ranks == 1


def _double(part: Tensor) -> Tensor:
    return part.to(torch.complex128 if part.is_complex() else torch.float64)


_data: Any = Tensor.data
# What gives the same elements, in another type or place or scaled, of which a norm is still wanted of all.
_SAME_ELEMENTS = frozenset(
    [
        _data.__get__, Tensor.detach, Tensor.clone, torch.clone, Tensor.contiguous, Tensor.cpu, Tensor.to,
        Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.view, Tensor.reshape,
        Tensor.flatten, torch.flatten, Tensor.ravel, Tensor.mul, torch.mul, Tensor.div, torch.div, Tensor.__mul__,
        Tensor.__rmul__, Tensor.__truediv__, Tensor.neg, Tensor.__neg__, Tensor.abs, torch.abs,
    ]
)  # fmt: skip
_NORMS = frozenset([torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm])


def intercept(func: Any, args: tuple, kwargs: dict) -> Any:
    """Answer a torch function that was called on a rank's part of a gradient.

    Norms and overflow checks become global (they are collective then), also of what has the part's elements, as they
    are or scaled; all else works on the part.
    """
    if func == _data.__set__:
        return _overwrite(*args)
    if func in _NORMS:
        return _global_norm(func, args, kwargs)
    if func is torch._foreach_norm:
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
        return [_global_norm(torch.linalg.vector_norm, (part, order), {}) for part in args[0]]
    parts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    slots = [slot for leaf in parts if type(leaf) is ShardGradient and (slot := _slot_of(leaf)) is not None]
    _refuse_whole(slots, parts)
    result = func(*args, **kwargs)
    if func in _SAME_ELEMENTS and slots and type(result) is Tensor:
        result = result.as_subclass(ShardGradient)
        result._zero3 = slots[0]
    if func is torch._amp_foreach_non_finite_check_and_unscale_:
        found = args[1]
        for part in args[0]:
            if (slot := getattr(part, "_zero3", None)) is not None:
                slot.unit.model.ranks.maximum(found, "whether a scaled gradient overflowed")
                break
    return result


def _slot_of(part: Tensor) -> Any:
    return getattr(part, "_zero3", None)


def _overwrite(part: Tensor, values: Tensor) -> Tensor:
    """`grad.data = values`: the memory under it is where the gradient is kept."""
    if values.shape != part.shape or values.dtype != part.dtype:
        raise UnsupportedError(
            f"a partitioned gradient, {tuple(part.shape)} {part.dtype}, cannot become {tuple(values.shape)} "
            f"{values.dtype}: it is kept with those of other parameters"
        )
    with torch.no_grad():
        return part.copy_(values)


def _refuse_whole(slots: list[Any], operands: list[Tensor]) -> None:
    """As `_refuse_part` of parameter_forms.py, of gathered parameters and of what `param.data` gives."""
    for slot in slots:
        model = slot.unit.model
        if model.shard_ranks > 1 and any(_is_whole(operand, model) for operand in operands):
            parameter_forms.refuse_beside_whole(slot)


def _is_whole(operand: Tensor, model: Any) -> bool:
    if type(operand) is ShardGradient or operand.layout is not torch.strided:
        return False
    return parameter_forms.is_partitioned(operand) or model.gathered_memory.unit_at(operand.data_ptr()) is not None


def _global_norm(func: Any, args: tuple, kwargs: dict) -> Tensor:
    part = args[0]
    slot = getattr(part, "_zero3", None)
    if slot is None:
        return func(*args, **kwargs)
    plain = part.as_subclass(Tensor)
    ranks = slot.unit.model.ranks
    if slot.unit.model.shard_ranks == 1:
        return func(plain, *args[1:], **kwargs)
    order = _order(func, plain, *args[1:], **kwargs)
    if order == float("inf"):
        largest = plain.abs().max() if plain.numel() else plain.new_zeros((), dtype=plain.dtype.to_real())
        return ranks.maximum(largest, f"the gradient norm of {slot.name}")
    if order is not None and order > 0:
        powers = _double(plain).abs().pow(order).sum()
        ranks.sum(powers, f"the gradient norm of {slot.name}")
        return powers.pow(1.0 / order).to(plain.dtype.to_real())
    raise UnsupportedError(
        f"this norm of a partitioned gradient ({slot.name}) is not supported: only those of all elements together, of "
        "a positive order, are. Use zero3.clip_grad_norm_, or zinf.full_grad."
    )


def _order(func: Any, part: Tensor, *args: Any, **kwargs: Any) -> float | None:
    """Of the norm of all elements together that a function of torch was asked for; None for a norm of another kind."""
    asked = {**dict(zip(("order", "dim", "keepdim"), args, strict=False)), **kwargs}
    order = asked.pop("order", asked.pop("ord", asked.pop("p", None)))
    if any(value is not None and value is not False for value in asked.values()):
        return None
    if order is None or order == "fro":
        return 2.0
    of_a_matrix = func is torch.linalg.norm and part.dim() > 1
    return None if of_a_matrix or order == "nuc" else float(order)
