"""The bytes of gathered units, those on their way included, against the budget (DESIGN.md, section 7)."""

from __future__ import annotations

from zero3.unit import Unit


class WorkingSet:
    """Which units are present, oldest first.

    limit      bytes that may be present; one unit in use may exceed it, a prefetch may not
    lookahead  bytes of units that are fetched ahead of their use
    """

    def __init__(self, limit: int, units: list[Unit]):
        travelling = [unit.nbytes for unit in units if not unit.permanent]
        largest = max(travelling, default=0)
        self.limit = max(limit, largest)
        self.lookahead = min(max(2 * largest, _LOOKAHEAD_BYTES), max(self.limit - largest, 0))
        self._present: dict[Unit, None] = {}
        self.nbytes = 0
        self.peak_nbytes = 0

    def add(self, unit: Unit) -> None:
        if unit not in self._present and not unit.permanent:
            self._present[unit] = None
            self.nbytes += unit.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def drop(self, unit: Unit) -> None:
        if unit in self._present:
            del self._present[unit]
            self.nbytes -= unit.nbytes

    def fits(self, unit: Unit) -> bool:
        return self.nbytes + unit.nbytes <= self.limit

    def idle(self) -> list[Unit]:
        """Present units that no running forward holds, oldest first."""
        return [unit for unit in self._present if not unit.holds]

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._present


# Fetched ahead at least, when the budget allows: some 20 ms of a drive's reading.
_LOOKAHEAD_BYTES = 64 << 20
