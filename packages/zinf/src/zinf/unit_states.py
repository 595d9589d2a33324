"""The states of a unit: which kinds there are, in which dtype, and how the master weight is split. Pure.

    gathered dtype   param      master weight                 moments
    bfloat16         bfloat16   param + remainder (int16)     exp_avg, exp_avg_sq (float32)
    float16          float16    master (float32)              exp_avg, exp_avg_sq (float32)
    float32          float32    param                         exp_avg, exp_avg_sq (float32)
    others           own        param                         none

The split is lossless (DESIGN.md, 6a), so the master is never stored twice: 14 bytes read and 12 written per
parameter and step. What is frozen has no moments; its remainder lies still.
"""

from __future__ import annotations

import torch
from torch import Tensor

import cpu_adam

MOMENTS = ("exp_avg", "exp_avg_sq")

UPDATED = (torch.bfloat16, torch.float16, torch.float32)  # gathered dtypes that an optimizer step takes


def value_kinds(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Kinds that hold the values of a unit gathered in `dtype` -> their own dtypes."""
    if dtype is torch.bfloat16:
        return {"param": torch.bfloat16, "remainder": torch.int16}
    if dtype is torch.float16:
        return {"param": torch.float16, "master": torch.float32}
    return {"param": dtype}


def update_kinds(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Kinds that an optimizer step reads and writes -> their own dtypes."""
    return {**value_kinds(dtype), **dict.fromkeys(MOMENTS, torch.float32)}


def read_kinds(dtype: torch.dtype) -> set[str]:
    """Kinds that an optimizer step must read; a float16 parameter is only written, from its master."""
    return set(update_kinds(dtype)) - ({"param"} if dtype is torch.float16 else set())


def grad_dtype(dtype: torch.dtype, accumulating: bool) -> torch.dtype:
    """A gradient waits as it arrived; sums of several are float32."""
    return torch.float32 if accumulating else dtype


def state_bytes(dtype: torch.dtype) -> dict[str, int]:
    """Bytes of one trained parameter: of its "params", of a "grads" that waits, of its "optimizer" states."""
    kinds = {kind: of_kind.itemsize for kind, of_kind in update_kinds(dtype).items()}
    return {"params": kinds.pop("param"), "grads": grad_dtype(dtype, False).itemsize, "optimizer": sum(kinds.values())}


def is_param(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether master values of dtype `stored` are the param itself of a unit gathered in `dtype`.

    What `split` makes of them beside is zeros then.
    """
    return stored is dtype and dtype is not torch.float16


def split(dtype: torch.dtype, values: Tensor) -> dict[str, Tensor]:
    """Master values (n,), of any dtype, as the kinds (n,) each of a unit gathered in `dtype`."""
    parts = {kind: torch.empty(values.shape, dtype=of_kind) for kind, of_kind in value_kinds(dtype).items()}
    split_into(parts, dtype, values)
    return parts


def split_into(parts: dict[str, Tensor], dtype: torch.dtype, values: Tensor) -> None:
    """As `split`, into the `parts` (n,) that are given: fresh memory takes longer than the split."""
    if dtype is torch.bfloat16:
        cpu_adam.split(values.to(torch.float32).contiguous(), out=(parts["param"], parts["remainder"]))
        return
    if dtype is torch.float16:
        values = parts["master"].copy_(values)
    parts["param"].copy_(values)


def join(dtype: torch.dtype, parts: dict[str, Tensor]) -> Tensor:
    """The inverse of `split`: values in float32, or in a dtype that is no float."""
    if dtype is torch.bfloat16:
        return cpu_adam.join(parts["param"].contiguous(), parts["remainder"].contiguous())
    if dtype is torch.float16:
        return parts["master"]
    return parts["param"]
