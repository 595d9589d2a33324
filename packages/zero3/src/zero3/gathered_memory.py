"""Which gathered unit an address belongs to. Asked for every tensor that autograd saves, so it must cost little."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .unit import Unit


class GatheredMemory:
    """The units that are READY in a pool's buffer, by address.

    bounds   first and last + 1 address of each unit, in order: what is at an odd place among them is some unit's
    """

    def __init__(self) -> None:
        self.bounds: list[int] = []
        self._units: dict[int, Unit] = {}  # by first address

    def add(self, unit: Unit) -> None:
        """Harmless where it is there already."""
        start = unit.buffer.start
        if self._units.get(start) is unit:  # an interrupt came right behind
            return
        place = bisect_right(self.bounds, start)
        self.bounds[place:place] = start, start + unit.nbytes
        self._units[start] = unit

    def remove(self, unit: Unit) -> None:
        """Harmless where it is not there."""
        start = unit.buffer.start
        if self._units.get(start) is unit:
            del self._units[start]
            place = bisect_right(self.bounds, start)  # behind it, and behind what ends there
            del self.bounds[place - 1 : place + 1]

    def unit_at(self, address: int) -> Unit | None:
        """The unit that `address` lies in; None where it is nobody's."""
        place = bisect_right(self.bounds, address)
        return self._units[self.bounds[place - 1]] if place & 1 else None
