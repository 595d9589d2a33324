"""The states of one unit: which kinds there are, in which dtype, and how the master weight is split.

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
from zero3.unit import Unit

MOMENTS = ("exp_avg", "exp_avg_sq")


def value_kinds(unit: Unit) -> dict[str, torch.dtype]:
    """Kinds that hold the unit's values -> dtype."""
    if unit.dtype is torch.bfloat16:
        return {"param": torch.bfloat16, "remainder": torch.int16}
    if unit.dtype is torch.float16:
        return {"param": torch.float16, "master": torch.float32}
    return {"param": unit.dtype}


def update_kinds(unit: Unit) -> dict[str, torch.dtype]:
    """Kinds that an optimizer step reads and writes -> dtype."""
    return {**value_kinds(unit), **dict.fromkeys(MOMENTS, torch.float32)}


def read_kinds(unit: Unit) -> set[str]:
    """Kinds that an optimizer step must read; a float16 parameter is only written, from its master."""
    return set(update_kinds(unit)) - ({"param"} if unit.dtype is torch.float16 else set())


def grad_dtype(unit: Unit, accumulating: bool) -> torch.dtype:
    """A gradient waits as it arrived; sums of several are float32."""
    return torch.float32 if accumulating else unit.dtype


def bytes_per_parameter(unit: Unit, trained: bool) -> int:
    kinds = update_kinds(unit) if trained else value_kinds(unit)
    return sum(dtype.itemsize for dtype in kinds.values())


def split(unit: Unit, values: Tensor) -> dict[str, Tensor]:
    """Master values (n,), of any dtype, as the unit's kinds (n,) each."""
    if unit.dtype is torch.bfloat16:
        high, low = cpu_adam.split(values.to(torch.float32).contiguous())
        return {"param": high, "remainder": low}
    if unit.dtype is torch.float16:
        master = values.to(torch.float32)
        return {"param": master.to(torch.float16), "master": master}
    return {"param": values.to(unit.dtype)}


def join(unit: Unit, parts: dict[str, Tensor]) -> Tensor:
    """The inverse of `split`: values in float32, or in the unit's own dtype."""
    if unit.dtype is torch.bfloat16:
        return cpu_adam.join(parts["param"].contiguous(), parts["remainder"].contiguous())
    if unit.dtype is torch.float16:
        return parts["master"]
    return parts["param"]
