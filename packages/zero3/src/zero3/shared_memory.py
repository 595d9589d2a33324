"""Parameters that lie in the memory of another parameter or buffer, without being the same Parameter.

A parameter's values move to its unit, so what shared its memory would be a copy from then on that no step changes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from . import parameter_forms
from .errors import UnsupportedError


class _Extent:
    """The bytes that a tensor lies in, for NumPy, which computes with the addresses and reads nothing."""

    def __init__(self, tensor: Tensor):
        nbytes = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * nbytes for step in tensor.stride()),
            "typestr": f"|V{nbytes}",
        }
        rows = zip(tensor.shape, tensor.stride(), strict=True)
        self.stop = tensor.data_ptr() + nbytes * (1 + sum((extent - 1) * step for extent, step in rows))

    def overlaps(self, other: _Extent) -> bool:
        """Whether any element is in both; parts of one tensor may lie between one another."""
        return np.shares_memory(np.asarray(self), np.asarray(other))


def refuse_shared_memory(module: nn.Module) -> None:
    """UnsupportedError where a trainable parameter of `module` has elements in common with anything else of it."""
    tensors = [
        (name, tensor) for name, tensor in module.named_parameters() if not parameter_forms.is_partitioned(tensor)
    ]
    lying = [(name, tensor) for name, tensor in [*tensors, *module.named_buffers()] if _lies_somewhere(tensor)]
    lying.sort(key=lambda named: (str(named[1].device), named[1].data_ptr()))
    open_ones: list[tuple[str, Tensor, _Extent]] = []  # those that reach as far as the next begins
    for name, tensor in lying:
        own, start = _Extent(tensor), tensor.data_ptr()
        open_ones = [one for one in open_ones if one[2].stop > start and one[1].device == tensor.device]
        for other_name, other, extent in open_ones:
            if (tensor.requires_grad or other.requires_grad) and own.overlaps(extent):
                raise UnsupportedError(
                    f"{other_name} and {name} share memory, which partitioning would cut apart. Tie parameters by "
                    "giving one Parameter both names; let a buffer that follows a parameter be made in forward."
                )
        open_ones.append((name, tensor, own))


def _lies_somewhere(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0
