"""Reused flat buffers. First touch of fresh memory is slower than the drive, so nothing large is allocated in
the steady state: a unit is gathered into memory that an earlier unit has left.

A view that somebody still holds must not see the next unit's numbers. At give-back the pool asks how many
tensors share the storage; a buffer with an unknown user is retired until that user is gone.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .first_rank_log import first_rank_logger

log = first_rank_logger(__name__)

# Warn when memory of retired buffers passes this.
_RETIRED_WARNING_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Layout:
    """How tensors lie in one flat buffer of `numel` elements.

    tensors   (shape, offset in elements) of each, in the order of their offsets
    places    those that were asked for, as far as they are kept
    """

    dtype: torch.dtype
    numel: int
    tensors: tuple[tuple[torch.Size, int], ...]
    places: dict[tuple, Place] = field(default_factory=dict)

    @staticmethod
    @functools.cache
    def of(dtype: torch.dtype, numel: int, tensors: tuple[tuple[torch.Size, int], ...]) -> Layout:
        """Equal arguments give the same object: equal units share what a buffer keeps for a layout."""
        return Layout(dtype, numel, tensors)

    def place(self, offset: int, size: torch.Size, stride: tuple[int, ...]) -> Place:
        """The place of a view that begins at element `offset`."""
        key = offset, size, stride
        place = self.places.get(key)
        if place is None:
            index = bisect_right(self.tensors, offset, key=lambda tensor: tensor[1]) - 1
            # Of a part there may be ever new ones (the first T rows, for many T): only whole tensors are kept.
            whole = size.numel() == self.tensors[index][0].numel()
            place = Place(index, offset, size, stride, whole)
            if whole:
                self.places[key] = place
        return place


class Place:
    """Where a view lies in any buffer of a layout.

    index   of the tensor that it begins in
    kept    whether this object stands for all equal ones
    """

    __slots__ = ("index", "kept", "offset", "size", "stride")

    def __init__(self, index: int, offset: int, size: torch.Size, stride: tuple[int, ...], kept: bool):
        self.index, self.offset, self.size, self.stride, self.kept = index, offset, size, stride, kept


class PooledBuffer:
    """A stretch of memory and the tensors that the pool itself has on it.

    storage   (nbytes,) uint8, the whole buffer
    start     address of its first byte
    """

    __slots__ = ("_laid_out", "_own_uses", "_placed", "_storage", "nbytes", "start", "storage", "users")

    def __init__(self, storage: Tensor):
        self.storage = storage
        self.nbytes = storage.numel()
        self.start = storage.data_ptr()
        self._storage = storage.untyped_storage()
        self._laid_out: dict[Layout, tuple[Tensor, list[Tensor]]] = {}
        self._placed: dict[Place, Tensor] = {}
        self._own_uses = self._uses()
        self.users = ""  # who took it last, for messages

    def _uses(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def viewed_elsewhere(self) -> bool:
        """Whether anybody but the pool holds a tensor on this memory."""
        return self._uses() > self._own_uses

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first `numel` elements, as `dtype`."""
        return self.storage[: numel * dtype.itemsize].view(dtype)

    def laid_out(self, layout: Layout) -> tuple[Tensor, list[Tensor]]:
        """The flat tensor (layout.numel,) and the tensors in it.

        They stay with the buffer: to make them anew at every gather would take longer than all else in it.
        """
        known = self._laid_out.get(layout)
        if known is None:
            with torch.inference_mode(False):
                flat = self.flat(layout.numel, layout.dtype)
                views = [flat[start : start + shape.numel()].view(shape) for shape, start in layout.tensors]
            known = self._laid_out[layout] = flat, views
            self._own_uses += 1 + len(views)
        return known

    def at(self, place: Place, layout: Layout) -> Tensor:
        """The view at a place of `layout`. Those of whole tensors stay with the buffer too."""
        view = self._placed.get(place)
        if view is None:
            flat, _ = self.laid_out(layout)
            with torch.inference_mode(False):
                view = flat.as_strided(place.size, place.stride, flat.storage_offset() + place.offset)
            if place.kept:
                self._placed[place] = view
                self._own_uses += 1
        return view


class BufferPool:
    """Flat buffers of any size, kept for reuse.

    allocate   nbytes -> uint8 tensor (nbytes,); a package that does I/O gives aligned, pinned memory
    limit      bytes above which unused buffers of unfit sizes are given back to the system
    """

    def __init__(self, allocate: Callable[[int], Tensor], limit: int | None = None):
        self._allocate = allocate
        self.limit = limit
        self._free: list[PooledBuffer] = []
        self._retired: list[PooledBuffer] = []
        self.nbytes = 0  # all that the pool holds: in use, free and retired
        self.in_use = 0
        self.peak_in_use = 0
        self._warned = False

    def take(self, nbytes: int, user: str = "") -> PooledBuffer:
        """A buffer of at least `nbytes` bytes with arbitrary contents."""
        if self._retired:
            self._reclaim()
        if self._free and self._free[-1].nbytes == nbytes:  # mostly so, and this memory was used last
            buffer: PooledBuffer | None = self._free.pop()
        else:
            buffer = self._take_free(nbytes)
        if buffer is None:
            self._make_room(nbytes)
            buffer = PooledBuffer(self._allocate(max(nbytes, 64)))
            self.nbytes += buffer.nbytes
        buffer.users = user
        self.in_use += buffer.nbytes
        if self.in_use > self.peak_in_use:
            self.peak_in_use = self.in_use
        return buffer

    def _take_free(self, nbytes: int) -> PooledBuffer | None:
        """The smallest free buffer that fits without much waste."""
        best, best_nbytes = None, max(2 * nbytes, nbytes + 65536) + 1
        for place, buffer in enumerate(self._free):
            if buffer.nbytes == nbytes:
                return self._free.pop(place)
            if nbytes < buffer.nbytes < best_nbytes:
                best, best_nbytes = place, buffer.nbytes
        return None if best is None else self._free.pop(best)

    def give_back(self, buffer: PooledBuffer) -> None:
        """Return a buffer; all of the taker's own tensors on it must be gone."""
        self.in_use -= buffer.nbytes
        if buffer.viewed_elsewhere():
            self._retired.append(buffer)
            self._warn_about_retired()
        else:
            self._free.append(buffer)

    @property
    def retired_nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._retired)

    def _reclaim(self) -> None:
        free = [buffer for buffer in self._retired if not buffer.viewed_elsewhere()]
        self._retired = [buffer for buffer in self._retired if buffer not in free]  # first: nothing is ever in both
        self._free += free

    def _make_room(self, nbytes: int) -> None:
        """Let go of free buffers that fit nobody, so that odd sizes do not pile up."""
        limit = self.limit if self.limit is not None else 2 * max(self.peak_in_use, nbytes)
        self._free.sort(key=lambda buffer: buffer.nbytes)
        while self._free and self.nbytes + nbytes > limit:
            self.nbytes -= self._free.pop().nbytes

    def _warn_about_retired(self) -> None:
        if not self._warned and self.retired_nbytes > _RETIRED_WARNING_BYTES:
            self._warned = True
            names = sorted({buffer.users for buffer in self._retired})
            log.warning(
                "%.0f MiB of gathered memory cannot be reused, because views of these units are still held: %s",
                self.retired_nbytes / 2**20,
                ", ".join(names[:8]),
            )


def allocate_on(device: torch.device) -> Callable[[int], Tensor]:
    """The plain allocator: uninitialised memory of torch's own."""

    def allocate(nbytes: int) -> Tensor:
        with torch.inference_mode(False):  # whoever needs it first: training may have it next
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    return allocate
