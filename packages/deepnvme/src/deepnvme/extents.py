"""Free and used room in a linear space: a swap file, or the memory of a pool. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """Hands out ranges of [0, capacity) in whole `unit`s; best fit, so that large room stays whole.

    capacity None: the space grows at its end as needed.
    """

    def __init__(self, capacity: int | None, unit: int = 4096) -> None:
        self.unit = unit
        self.capacity = None if capacity is None else capacity - capacity % unit
        self.end = 0  # bytes that were ever in use; beyond it everything is free
        self.used = 0  # bytes handed out at present
        self._starts: list[int] = []  # of the free ranges below `end`, ascending; neighbours are always joined
        self._sizes: dict[int, int] = {}  # free range's start -> its bytes

    def rounded(self, nbytes: int) -> int:
        """What a range for so many bytes really takes."""
        return -(-nbytes // self.unit) * self.unit

    def allocate(self, nbytes: int) -> int | None:
        """The start of a range of at least nbytes > 0, or None when no free range is large enough."""
        need = self.rounded(nbytes)
        fitting = [start for start in self._starts if self._sizes[start] >= need]
        if fitting:
            start = min(fitting, key=self._sizes.__getitem__)
            rest = self._sizes[start] - need
            self._remove(start)
            if rest:
                self._insert(start + need, rest)
        else:
            at_end = self._take_from_end(need)
            if at_end is None:
                return None
            start = at_end
        self.used += need
        return start

    def free(self, start: int, nbytes: int) -> None:
        """Gives back what allocate(nbytes) returned as `start`."""
        size = self.rounded(nbytes)
        self.used -= size
        place = bisect_left(self._starts, start)
        if place < len(self._starts) and self._starts[place] == start + size:
            size += self._remove(self._starts[place])
        if place and self._starts[place - 1] + self._sizes[self._starts[place - 1]] == start:
            start = self._starts[place - 1]
            size += self._remove(start)
        self._insert(start, size)

    def shrink(self, end: int) -> None:
        """The room beyond `end`, which is free, was not to be had after all: it must be grown into anew."""
        if end < self.end:
            start = self._starts[-1]
            self._remove(start)
            if start < end:
                self._insert(start, end - start)
            self.end = end

    def _take_from_end(self, need: int) -> int | None:
        # A free range that touches the end is lengthened rather than left behind.
        last = self._starts[-1] if self._starts else 0
        touches = bool(self._starts) and last + self._sizes[last] == self.end
        start = last if touches else self.end
        if self.capacity is not None and start + need > self.capacity:
            return None
        if touches:
            self._remove(start)
        self.end = start + need
        return start

    def _insert(self, start: int, size: int) -> None:
        self._starts.insert(bisect_left(self._starts, start), start)
        self._sizes[start] = size

    def _remove(self, start: int) -> int:
        del self._starts[bisect_left(self._starts, start)]
        return self._sizes.pop(start)
