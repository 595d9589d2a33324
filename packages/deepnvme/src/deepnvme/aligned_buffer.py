"""Aligned host memory and its protocols: what a drive reaches without a copy."""

from __future__ import annotations

import errno
import math
import operator
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from . import _core
from .dtypes import DType, dtype_named, torch_dtype
from .errors import ClosedError
from .sizes import MOST_BYTES


class Buffer(_core.TypedMemory):
    """A typed array in aligned host memory, zeroed when new.

    NumPy, torch and jax view it without a copy: through the buffer protocol, `__array_interface__`, `__dlpack__`,
    `.numpy()` and `.torch()`. Views keep it alive.
    """

    shape: tuple[int, ...]
    nbytes: int
    itemsize: int
    huge_pages: bool  # whether huge pages were asked for and are allowed
    released: bool  # given back to its Pool: the memory may be someone else's by now

    def __init__(self, memory: _core.AlignedMemory, start: int, shape: tuple[int, ...], dtype: DType) -> None:
        super().__init__(memory, start, shape, dtype.itemsize, dtype.format, dtype.dlpack_code)
        self._dtype = dtype

    @property
    def dtype(self) -> str:
        """As torch names it: "bfloat16"."""
        return self._dtype.name

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-dim Buffer")
        return self.shape[0]

    def numpy(self) -> np.ndarray:
        """A view as numpy.ndarray. bfloat16 comes as its bits in uint16, the float8 types in uint8."""
        self._check_released()
        if not self.nbytes:
            return np.empty(self.shape, self._dtype.numpy)
        return np.frombuffer(memoryview(self), dtype=np.dtype(self._dtype.numpy)).reshape(self.shape)

    def torch(self) -> Any:
        """A view as torch.Tensor of the same dtype and shape."""
        import torch

        self._check_released()
        dtype = torch_dtype(self._dtype.name)
        if not self.nbytes:  # torch.frombuffer refuses nothing at all
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self, dtype=torch.uint8).view(dtype).reshape(self.shape)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"a Buffer is in host memory and cannot be exported to DLPack device {dl_device}")
        self._check_released()
        if copy:
            raise BufferError("a Buffer exports itself without a copy only")
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # the CPU

    @property
    def __array_interface__(self) -> dict[str, Any]:
        self._check_released()
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": np.dtype(self._dtype.numpy).str,
            "data": (self.address, False),
        }

    def _check_released(self) -> None:
        if self.released:
            raise ClosedError("the Buffer was given back to its Pool")

    def __repr__(self) -> str:
        return f"deepnvme.Buffer(shape={self.shape}, dtype={self.dtype!r}, address={self.address:#x})"


def empty(shape: int | Iterable[int], dtype: Any = "uint8") -> Buffer:
    """A Buffer of its own memory: page-aligned, and on huge pages from 2 MiB on where the system has them.

    shape: an int or ints; dtype: a name ("bfloat16"), or NumPy's, torch's or jax's object. The first use of fresh
    memory is slower than a drive, so keep a Buffer and use it again, or take them from a Pool. OSError(ENOMEM).
    """
    described = dtype_named(dtype)
    extents = _extents(shape)
    nbytes = math.prod(extents) * described.itemsize
    if nbytes > MOST_BYTES:
        raise OSError(errno.ENOMEM, f"cannot map {nbytes} bytes of host memory: {os.strerror(errno.ENOMEM)}")
    memory = _core.AlignedMemory(nbytes)
    return Buffer(memory, 0, extents, described)


def _extents(shape: int | Iterable[int]) -> tuple[int, ...]:
    extents = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(map(operator.index, shape))  # type: ignore[arg-type]
    if any(not 0 <= extent <= MOST_BYTES for extent in extents):
        raise ValueError(f"shape must be of numbers from 0 to 2**63 - 1, found {extents}")
    return extents
