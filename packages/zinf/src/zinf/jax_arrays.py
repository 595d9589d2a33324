"""torch tensors as jax arrays and back, over DLPack: copied only where jax must. Loaded with zinf.jax only.

jax reads 64-byte aligned memory in place, which parameters in a unit and whole tensors of torch's are; a slice that
begins elsewhere, and what is not contiguous, is copied. Nothing is narrowed silently: without jax_enable_x64, jax
would make 64 bits 32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

_WIDE = {torch.float64: np.float64, torch.complex128: np.complex128, torch.uint64: np.uint64}
_INT32 = np.iinfo(np.int32)


def to_jax(tensor: Tensor) -> jax.Array:
    """The tensor's values; the memory is the tensor's own where that is aligned and contiguous.

    int64 becomes int32 where jax has no 64 bits: ValueError when a value does not fit. TypeError for float64 there.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype in _WIDE:
        _check_wide(_WIDE[tensor.dtype], f"a tensor of {tensor.dtype}")
    elif tensor.dtype is torch.int64 and not _keeps(np.int64):
        if tensor.numel():
            _check_range(*(int(end) for end in tensor.aminmax()))
        tensor = tensor.to(torch.int32)
    return jnp.from_dlpack(tensor)


def to_torch(array: Any) -> Any:
    """A tensor on the array's memory, which nobody else may have. Random keys have no torch form: they stay."""
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return torch.from_dlpack(array)


def other_to_jax(value: Any) -> Any:
    """An argument that is no tensor, as jax traces it. A numpy array is copied: it may be changed before backward."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype in (np.int64, np.uint64) and not _keeps(value.dtype):
        if value.size:
            _check_range(int(value.min()), int(value.max()))
    else:
        _check_wide(value.dtype, f"a numpy array of {value.dtype}")
    return jnp.array(value)


def parameter_from(leaf: Any, name: str) -> nn.Parameter | Tensor:
    """A Parameter with a copy of the leaf's values, since jax's own never change; a plain tensor of integers.

    A torch Parameter stays itself: modules that were given the same one share it.
    """
    if isinstance(leaf, nn.Parameter):
        return leaf
    if isinstance(leaf, Tensor):
        tensor = leaf.detach().clone()
    elif not isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int):
        raise TypeError(f"parameter {name!r} is a {type(leaf).__name__}, neither an array nor a number")
    else:
        array = jnp.asarray(other_to_jax(leaf))
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise TypeError(f"parameter {name!r} holds random keys ({array.dtype}): pass them as arguments")
        tensor = torch.from_dlpack(array).clone()
    return nn.Parameter(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor


def is_differentiable(value: Any) -> bool:
    """Whether a jax array, or a tracer of one, has a gradient."""
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _keeps(dtype: Any) -> bool:
    """Whether jax has this dtype at all, as it is set up now."""
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


def _check_wide(dtype: Any, what: str) -> None:
    if not _keeps(dtype):
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        raise TypeError(
            f"{what} would silently become {narrow} in jax: convert it yourself, or set "
            'jax.config.update("jax_enable_x64", True)'
        )


def _check_range(least: int, largest: int) -> None:
    if least < _INT32.min or largest > _INT32.max:
        raise ValueError(
            f"integers from {least} to {largest} do not fit into jax's int32: convert them yourself, or set "
            'jax.config.update("jax_enable_x64", True)'
        )
