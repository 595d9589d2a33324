"""Free and used room in a linear space: a swap file, or the memory of a pool. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

_NO_END = 1 << 63  # of a space without capacity: where every file ends


class Extents:
    """Hands out ranges of [0, capacity) in whole `unit`s; best fit, so that large room stays whole.

    capacity None: the space grows at its end as needed.
    taken: (start, bytes) of ranges that are in use already.
    """

    def __init__(self, capacity: int | None, unit: int = 4096, taken: Iterable[tuple[int, int]] = ()) -> None:
        self.unit = unit
        self.capacity = None if capacity is None else capacity - capacity % unit
        free: list[tuple[int, int]] = []
        place = 0
        for start, nbytes in sorted(taken):
            if place < start:
                free.append((place, start))
            place = start + self.rounded(nbytes)
        # (start, stop) of the free ranges, ascending; neighbours are always joined. The last is what lies behind all
        # that is in use, perhaps nothing. The books are this list alone, and each change of it is one assignment: an
        # exception that comes between any two steps (KeyboardInterrupt) leaves them as they were or as they will be.
        self._free = [*free, (place, _NO_END if self.capacity is None else self.capacity)]

    @property
    def end(self) -> int:
        """Beyond it everything is free."""
        return self._free[-1][0]

    @property
    def used(self) -> int:
        """Bytes handed out at present."""
        *holes, (end, _) = self._free
        return end - sum(stop - start for start, stop in holes)

    def rounded(self, nbytes: int) -> int:
        """What a range for so many bytes really takes."""
        return -(-nbytes // self.unit) * self.unit

    def allocate(self, nbytes: int) -> int | None:
        """The start of a range of at least nbytes > 0, or None when no free range is large enough."""
        need = self.rounded(nbytes)
        free = self._free
        last = len(free) - 1
        fitting = [(stop - start, place) for place, (start, stop) in enumerate(free) if stop - start >= need]
        if not fitting:
            return None
        # The room at the end only when nothing else will do: it has not been used yet, or is not to be had at all.
        place = min(fitting if fitting[0][1] == last else [hole for hole in fitting if hole[1] != last])[1]
        start, stop = free[place]
        free[place : place + 1] = [(start + need, stop)] if start + need < stop or place == last else []
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Gives back what allocate(nbytes) returned as `start`."""
        stop = start + self.rounded(nbytes)
        free = self._free
        first = behind = bisect(free, (start, stop))
        if first and free[first - 1][1] == start:
            first -= 1
            start = free[first][0]
        if free[behind][0] == stop:
            stop = free[behind][1]
            behind += 1
        free[first:behind] = [(start, stop)]
