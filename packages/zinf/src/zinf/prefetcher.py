"""The overlap-centric design (paper, 6.2): which unit is in which stage, and when.

While unit i runs, unit i+1 is gathered from the ranks (gg) and the units behind it are read from their tier (nc),
as many as the budget holds; on the way back the optimizer's states of the units to come are read ahead too. A unit
that came unexpected is simply fetched: a miss costs one wait, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice

import torch

from zero3.partitioned_model import PartitionedModel
from zero3.scheduler import Collective, Phase
from zero3.unit import Unit
from zero3.unit_state import ParamState

from .execution_order import ExecutionOrder
from .offload_engine import OffloadEngine
from .working_set import WorkingSet

# Units whose optimizer states are read ahead in backward, the current one included; the stream's budget of bytes
# is what bounds them in fact.
_UPDATES_AHEAD = 4


class Prefetcher:
    """The scheduler of one model.

    enabled        False: units, and the optimizer's states, are read when they are needed
    hits, misses   uses of units that had been started before, or not, since the last reset
    """

    def __init__(self, engine: OffloadEngine, enabled: bool):
        self._engine = engine
        self._spans = engine.tiers.spans
        self.enabled = enabled
        self.hits = 0
        self.misses = 0

    def attach(self, model: PartitionedModel) -> None:
        self._model = model
        self.order: ExecutionOrder[Unit] = ExecutionOrder(model.units)
        self.working_set = WorkingSet(self._engine.placement.device_memory, model.units)

    # -- events ----------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        self._engine.refuse_half_loaded()
        self._drop_strays()
        self.order.begin(with_backward=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self._engine.reporter.forward_begins()
        if self._engine.updates is not None:
            self._engine.updates.forward_begins()

    def needs(self, unit: Unit, phase: Phase) -> None:
        if phase == "access":
            self._fetch(unit)
            return
        self.order.observe(unit)
        if not unit.permanent and self.enabled:
            if unit.state is ParamState.SHARDED:
                self.misses += 1
            else:
                self.hits += 1
        self._start_read(unit)
        self._read_ahead()
        if phase == "backward":
            self._expect_updates(unit)
        self._fetch(unit)
        self._gather_ahead()

    def done_with(self, unit: Unit, phase: Phase) -> None:
        if phase != "access" and unit in self._soon():
            return
        self._release(unit)

    def gradient_complete(self, unit: Unit) -> None:
        """The store has the gradient; the unit itself is done with by `done_with`."""

    def backward_ended(self) -> None:
        if self._engine.updates is not None:
            self._engine.updates.backward_ended()
        self._drop_strays()

    def optimizer_stepped(self) -> None:
        self._drop_strays()

    def abort(self) -> None:
        self._drop_strays()
        if self._engine.updates is not None:
            self._engine.updates.aborted()

    def awaiting(self, collective: Collective, unit: Unit) -> AbstractContextManager[None]:
        return self._spans.running("gg" if collective == "gather" else "reduce", unit.name)

    # -- stages ----------------------------------------------------------------------------------------------

    def _start_read(self, unit: Unit) -> None:
        """nc. The room comes from units that nobody uses and that are not expected soon."""
        if unit.state is ParamState.SHARDED and not unit.permanent:
            soon = self._soon()
            for idle in self.working_set.idle():
                if self.working_set.fits(unit):
                    break
                if idle is not unit and idle not in soon and idle.state is ParamState.READY:
                    self._release(idle)
            self.working_set.add(unit)
        self._model.start_read(unit)

    def _fetch(self, unit: Unit) -> None:
        """All stages, waiting for each."""
        if unit.state is ParamState.READY:
            return
        self._start_read(unit)
        with self._spans.running("stall", unit.name):
            self._model.start_gather(unit)
            self._model.finish_gather(unit)

    def _read_ahead(self) -> None:
        if not self.enabled:
            return
        ahead = 0
        for unit in self._travelling():
            ahead += unit.nbytes
            if ahead > self.working_set.lookahead:
                return
            if unit.state is ParamState.SHARDED:
                if not self.working_set.fits(unit):
                    return
                self._start_read(unit)

    def _gather_ahead(self) -> None:
        """gg of the next unit, once its own slice is there; messages carry the unit's number, so ranks may differ."""
        if not self.enabled or self._model.shard_ranks == 1 or not self._model.ranks.point_to_point:
            return
        for unit in islice(self._travelling(), 1):
            if unit.state is ParamState.READING and unit.pending is not None and unit.pending.done():
                self._model.start_gather(unit)

    def _expect_updates(self, unit: Unit) -> None:
        updates = self._engine.updates
        if updates is not None:
            nexts = islice(self.order.upcoming(), _UPDATES_AHEAD - 1)
            updates.backward_needs([unit, *(other for other in nexts if other is not unit)])

    # -- what is kept ----------------------------------------------------------------------------------------

    def _travelling(self) -> Iterator[Unit]:
        """Expected units that are not always there, each once."""
        seen: set[Unit] = set()
        for unit in self.order.upcoming():
            if not unit.permanent and unit not in seen:
                seen.add(unit)
                yield unit

    def _soon(self) -> set[Unit]:
        """Units within the lookahead: releasing one would mean to read it again at once."""
        if not self.enabled:
            return set()
        soon, ahead = set(), 0
        for unit in self._travelling():
            ahead += unit.nbytes
            if ahead > self.working_set.lookahead:
                break
            soon.add(unit)
        return soon

    def _release(self, unit: Unit) -> None:
        self._model.release(unit)
        if unit.state is ParamState.SHARDED:
            self.working_set.drop(unit)

    def _drop_strays(self) -> None:
        """What was fetched and not used: the prediction was wrong, or the step is over."""
        for unit in self.working_set.idle():
            self._release(unit)
        self._engine.drop_unheld_activations()
