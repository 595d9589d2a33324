"""The order in which a model uses its units: learned while it runs, mended when it changes (paper, 6.2). Pure.

A sequence begins with an outermost forward and runs to the next one, so it holds a forward and the backward that
follows. Sequences are told apart by whether gradients are on and by the unit that comes first: training,
evaluation and the parts of a model that are called by themselves each keep their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)

# How far ahead a unit is looked for when another one came than expected (a layer was skipped).
_RESYNC_WINDOW = 64


class ExecutionOrder(Generic[U]):
    """Predicts the next units.

    first_guess   the units in the order of the module tree: what is expected before anything was seen
    """

    def __init__(self, first_guess: Sequence[U]):
        self._guess = list(first_guess)
        self._known: dict[tuple[bool, U], list[U]] = {}
        self._key: tuple[bool, U] | None = None
        self._seen: list[U] = []
        self._expected: list[U] = []
        self._position = 0
        self._with_backward = False

    def begin(self, with_backward: bool) -> None:
        """An outermost forward begins; `with_backward`: a backward may follow."""
        self._keep()
        self._with_backward = with_backward
        self._key = None
        self._seen = []
        self._expected = self._likely(with_backward)
        self._position = 0

    def observe(self, unit: U) -> bool:
        """`unit` is used now. True when it was the expected one."""
        if self._key is None:
            self._start_with(unit)
        self._seen.append(unit)
        if self._position < len(self._expected) and self._expected[self._position] == unit:
            self._position += 1
            return True
        self._resync(unit)
        return False

    def upcoming(self) -> Iterator[U]:
        """The units expected next, in order."""
        for position in range(self._position, len(self._expected)):
            yield self._expected[position]

    def from_start(self) -> list[U]:
        """The units of the next sequence with a backward, as far as is known."""
        return self._likely(True)

    def _likely(self, with_backward: bool) -> list[U]:
        """Before the first unit is known: the only sequence of this kind, or the module tree."""
        of_kind = [order for (kind, _), order in self._known.items() if kind == with_backward]
        return of_kind[-1] if of_kind else self._from_tree(self._guess)

    def _from_tree(self, units: list[U]) -> list[U]:
        return units + units[::-1] if self._with_backward else list(units)

    def _start_with(self, unit: U) -> None:
        self._key = (self._with_backward, unit)
        known = self._known.get(self._key)
        if known is not None:
            self._expected = known
        elif unit in self._guess:
            self._expected = self._from_tree(self._guess[self._guess.index(unit) :])
        self._position = 0

    def _resync(self, unit: U) -> None:
        """Another unit came: go on behind its next place; when it has none nearby, it is a visitor."""
        window = range(self._position, min(self._position + _RESYNC_WINDOW, len(self._expected)))
        for position in window:
            if self._expected[position] == unit:
                self._position = position + 1
                return

    def _keep(self) -> None:
        if self._key is not None and self._seen:
            self._known[self._key] = self._seen
