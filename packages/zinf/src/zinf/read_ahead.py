"""Stretches of files, read a few ahead in the order in which they will be asked for, into buffers used again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import deepnvme

# Bytes on their way at once: as many requests as keep a drive busy.
_AHEAD_BYTES = 32 << 20
_MOST_AHEAD = 16

# Stretches that stay after they were asked for: several parameters may lie in one.
_KEPT = 4


@dataclass(frozen=True)
class Stretch:
    """Bytes of a file."""

    file: deepnvme.File
    file_offset: int
    nbytes: int


class ReadAhead:
    """Reads stretches.

    order      those that will be asked for (see `expect`)
    checksum   whether checksums are taken on the way

    A context manager. OSError from the drive surfaces in `get`.
    """

    def __init__(self, order: Iterable[Stretch] = (), checksum: bool = False):
        self._order = iter(order)
        self._checksum = checksum
        self._io = deepnvme.Engine()
        self._coming: dict[Stretch, tuple[deepnvme.Request, Tensor]] = {}
        self._kept: dict[Stretch, Tensor] = {}
        self._free: list[Tensor] = []

    def expect(self, order: Iterable[Stretch]) -> None:
        """What will be asked for, in this order; anything else may be too, and waits longer."""
        self._order = iter(order)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what nobody has asked for may fail
            self._io.close()  # waits for what is on its way: then nobody writes into the buffers
        self._coming.clear()
        self._kept.clear()
        self._free.clear()

    def get(self, stretch: Stretch) -> tuple[Tensor, int | None]:
        """(nbytes,) uint8, valid until some others were asked for; and its crc32c, if it was taken just now."""
        if stretch in self._kept:
            return self._kept[stretch][: stretch.nbytes], None
        if stretch not in self._coming:
            self._start(stretch)
        self._look_ahead()
        request, buffer = self._coming.pop(stretch)
        request.wait()
        while len(self._kept) >= _KEPT:
            self._free.append(self._kept.pop(next(iter(self._kept))))
        self._kept[stretch] = buffer
        return buffer[: stretch.nbytes], request.crc32c

    def start_read(self, stretch: Stretch, out: Tensor) -> deepnvme.Request:
        """Fill `out` (nbytes,) uint8, beside all that is read ahead."""
        return self._io.read(stretch.file, out, stretch.file_offset, checksum=self._checksum)

    def _look_ahead(self) -> None:
        while len(self._coming) < _MOST_AHEAD and sum(coming.nbytes for coming in self._coming) < _AHEAD_BYTES:
            stretch = next(self._order, None)
            if stretch is None:
                return
            if stretch not in self._coming and stretch not in self._kept:
                self._start(stretch)

    def _start(self, stretch: Stretch) -> None:
        fitting = [buffer for buffer in self._free if buffer.numel() >= stretch.nbytes]
        if fitting:
            buffer = min(fitting, key=Tensor.numel)
            self._free = [free for free in self._free if free is not buffer]
        else:
            buffer = deepnvme.empty(max(stretch.nbytes, 1)).torch()
            self._free = self._free[-_KEPT:]  # too small ones do not pile up
        self._coming[stretch] = self.start_read(stretch, buffer[: stretch.nbytes]), buffer


def as_elements(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements, wherever they begin in memory."""
    return content.view(dtype) if content.data_ptr() % dtype.itemsize == 0 else content.clone().view(dtype)
