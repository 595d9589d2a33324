"""When a unit is gathered and released: the Scheduler protocol, and the plain one.

The other half of the seam to an offload engine. Hooks report what the model needs; a scheduler decides when the
model's mechanisms (`start_read`, `start_gather`, `finish_gather`, `release` of PartitionedModel) run, and may run
them ahead. Phase is "forward", "backward" or "access" (somebody touched a parameter outside both).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel
    from .unit import Unit

Phase = Literal["forward", "backward", "access"]
Collective = Literal["gather", "reduce"]


class Scheduler(Protocol):
    """Told what happens, in order; returns when what is needed is there."""

    def attach(self, model: PartitionedModel) -> None:
        """The model's units are final."""

    def step_begins(self) -> None:
        """The outermost forward begins."""

    def needs(self, unit: Unit, phase: Phase) -> None:
        """Return with `unit` READY. Called at every use, also of a unit that is."""

    def done_with(self, unit: Unit, phase: Phase) -> None:
        """Nobody uses `unit` now: it may be released."""

    def gradient_complete(self, unit: Unit) -> None:
        """This backward has no more gradients for `unit`; its reduced shard went to the store."""

    def backward_ended(self) -> None:
        """All gradients of the backward are complete."""

    def optimizer_stepped(self) -> None:
        """Values on the tiers have changed."""

    def abort(self) -> None:
        """An exception came through: what is in flight must come to rest."""

    def awaiting(self, collective: Collective, unit: Unit) -> AbstractContextManager[None]:
        """Entered while a collective of `unit` is waited for: whoever takes times may."""


class OnDemand:
    """Gather when needed, release when done. No lookahead."""

    def attach(self, model: PartitionedModel) -> None:
        self._model = model

    def step_begins(self) -> None:
        pass

    def needs(self, unit: Unit, phase: Phase) -> None:
        self._model.start_read(unit)
        self._model.start_gather(unit)
        self._model.finish_gather(unit)

    def done_with(self, unit: Unit, phase: Phase) -> None:
        self._model.release(unit)

    def gradient_complete(self, unit: Unit) -> None:
        pass

    def backward_ended(self) -> None:
        pass

    def optimizer_stepped(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def awaiting(self, collective: Collective, unit: Unit) -> AbstractContextManager[None]:
        return nullcontext()
