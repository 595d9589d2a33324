"""overlap_optimizer=False: every update runs inside step(). Also what the other two ways build upon."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from zero3.partitioned_model import PartitionedModel
from zero3.uninterrupted import uninterrupted
from zero3.unit import Unit
from zero3.unit_state import ParamState

from .errors import AbortedStepError
from .optimizer_stream import OptimizerStream, SlotSettings
from .tiers import Wait

if TYPE_CHECKING:
    from .offload_engine import OffloadEngine
    from .offloaded_adamw import AdamW


class UpdateInStep:
    """Decides when the updates of one model run. The engine and the scheduler report what happens."""

    read_late: tuple[str, ...] = ()  # kinds of state that the stream does not read ahead
    gradients_wait = True  # on their tier, for the stream to fetch

    def __init__(self, optimizer: AdamW, engine: OffloadEngine, model: PartitionedModel):
        self.optimizer = optimizer
        self.engine = engine
        self.model = model
        budget, ahead = engine.placement.stream_memory, model.scheduler.enabled
        self.stream = OptimizerStream(engine, budget, ahead, self.read_late, self.gradients_wait)
        self._aborted = False  # a step, after some of its updates

    # -- the step --------------------------------------------------------------------------------------------

    def waiting(self) -> list[Unit]:
        """Units whose gradient waits for an update of this optimizer's."""
        return [unit for unit in self.model.units if self.engine.waits(unit) and self.optimizer.owns(unit)]

    def step(self, factor: float) -> None:
        """optimizer.step(): gradients count times `factor`."""
        self.refuse_if_aborted()
        units = self.waiting()
        self.stream.gradients_are_final(units)
        self.stream.expect(units)
        for unit in units:
            with uninterrupted():
                settings = self.optimizer.settings_of(unit)
                self.optimizer.count_step(unit, settings)
                self.update(unit, settings, factor)

    def update(
        self,
        unit: Unit,
        settings: SlotSettings,
        factor: float,
        gradient: Tensor | None = None,
        param_in: Tensor | None = None,
        param_out: Tensor | None = None,
    ) -> None:
        """One unit's Adam step. What was gathered of its old values is stale then."""
        self.keep_changes(unit)
        self.stream.update(unit, settings, factor, gradient, param_in, param_out)
        if unit.permanent or unit.state is ParamState.READY:
            self.model.values_changed(unit)
        else:
            unit.generation += 1  # it is SHARDED, or on its way and being filled with the new values

    def refuse_if_aborted(self) -> None:
        """AbortedStepError where states of a unit, or after a backward those of several, are of two steps."""
        if not (self._aborted or self.stream.broken):
            return
        newest = self.engine.newest_checkpoint
        remedy = f"Load the newest complete checkpoint: {newest}" if newest else "No checkpoint was saved in this run."
        raise AbortedStepError(f"an update was cut short: the model is between two steps. {remedy}")

    def keep_changes(self, unit: Unit) -> None:
        """What a forward has written into its own parameters (an embedding's max_norm) comes before the update."""
        if unit.state is ParamState.READY and unit.buffer is not None and unit.used:
            self.model.collect_changes(unit)

    def values_change(self, unit: Unit) -> None:
        """Somebody else than an update is about to give `unit` new values."""
        self.stream.forget_read(unit)

    def check_closure(self) -> None:
        """Closures are welcome: the update runs within step()."""

    def check_gradient(self, unit: Unit) -> None:
        """Raise where user code must not take a gradient that was used up for one that is not there."""

    # -- forward and backward --------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """An outermost forward begins."""
        self.refuse_if_aborted()

    def gradient_arrived(self, unit: Unit, shard: Tensor) -> bool:
        """A reduced gradient is there. True when it was used up, and need not wait."""
        return False

    def backward_needs(self, units: Iterable[Unit]) -> None:
        """Backward comes to these units next."""

    def backward_ended(self) -> None:
        """All gradients of the backward are there."""

    def aborted(self) -> None:
        """A forward or backward raised."""
        self.stream.forget_expected()

    # -- updates that are owed -------------------------------------------------------------------------------

    def owes(self, unit: Unit) -> bool:
        """Whether an update of `unit` was committed and has not run."""
        return False

    def start_update(self, unit: Unit, param_out: Tensor) -> Wait:
        """Begin an update that is owed; the wait ends with the new parameters in `param_out`."""
        raise AssertionError(f"no update of {unit.name} is owed")

    def bring_up_to_date(self, unit: Unit) -> None:
        """Run what is owed to `unit`."""

    def forget(self) -> None:
        """All states are about to be replaced by a checkpoint's: nothing is owed."""
        self.stream.forget()
        self._aborted = False

    def settle(self) -> None:
        """Nothing is owed, nothing on its way: all states are on their tiers."""
        self.refuse_if_aborted()
        self.stream.come_to_rest()
