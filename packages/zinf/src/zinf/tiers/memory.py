"""Tiers `device` and `cpu`: tensors in memory, used in place."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch import Tensor

from . import NO_WAIT, Key, Wait


class MemoryTier:
    """Tensors in one kind of memory.

    allocate   nbytes -> (nbytes,) uint8 tensor
    """

    def __init__(self, name: str, allocate: Callable[[int], Tensor]):
        self.name = name
        self._allocate = allocate
        self._kept: dict[Key, Tensor] = {}
        self.nbytes = 0
        self.peak_nbytes = 0

    def create(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        if key in self._kept and self._kept[key].numel() == numel and self._kept[key].dtype == dtype:
            return
        self.free(key)
        self._kept[key] = self._allocate(numel * dtype.itemsize).view(dtype).zero_()
        self.nbytes += numel * dtype.itemsize
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def resident(self, key: Key) -> Tensor | None:
        return self._kept[key]

    def start_read(self, key: Key, out: Tensor, first: int = 0) -> Wait:
        out.copy_(self._kept[key][first : first + out.numel()])
        return NO_WAIT

    def start_write(self, key: Key, values: Tensor, first: int = 0, crc32c: int | None = None) -> Wait:
        target = self._kept[key][first : first + values.numel()]
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)
        return NO_WAIT

    def start_clear(self, key: Key, first: int, count: int) -> Wait:
        self._kept[key][first : first + count].zero_()
        return NO_WAIT

    def free(self, key: Key) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.nbytes -= kept.nbytes

    def free_units(self, numbers: Set[int]) -> None:
        for key in [key for key in self._kept if key.unit in numbers]:
            self.free(key)

    def start_put(self, key: Key, values: Tensor) -> Wait:
        self.create(key, values.numel(), values.dtype)
        return self.start_write(key, values)

    def start_get(self, key: Key, out: Tensor) -> Wait:
        return self.start_read(key, out)

    def drop(self, key: Key) -> None:
        self.free(key)
