"""overlap_optimizer="next-forward": a committed step's update runs just ahead of the unit's next use.

step() knows the norm and notes the settings in force; then each unit is updated when it is about to be gathered,
under the next forward, its states read ahead as far as the budget goes (during backward already). That is no
staleness: nobody can see a unit between commit and update, since every look at it gathers it first. The updated
parameters go straight into the gathered buffer, so the bfloat16 half is not read a second time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from zero3.uninterrupted import uninterrupted
from zero3.unit import Unit
from zero3.unit_state import GradState, move_grad

from .errors import ConfigError
from .optimizer_in_step import UpdateInStep
from .optimizer_stream import SlotSettings
from .tiers import Wait


@dataclass(frozen=True)
class _Commit:
    """An update that is owed: settings and factor as they were at step()."""

    settings: SlotSettings
    factor: float


class _PendingUpdate(Wait):
    """Waiting for such a unit means to update it."""

    __slots__ = ("_has_run", "_param_out", "_unit", "_updates")

    def __init__(self, updates: UpdateBeforeUse, unit: Unit, param_out: Tensor):
        super().__init__()
        self._updates, self._unit, self._param_out = updates, unit, param_out
        self._has_run = False

    def __call__(self) -> None:
        if self._has_run:  # an interrupt came right behind it
            return
        with uninterrupted():
            self._updates.run(self._unit, self._param_out)
            self._has_run = True

    def done(self) -> bool:
        return False


class UpdateBeforeUse(UpdateInStep):
    """Commits in step(), updates before use."""

    def __init__(self, *args):
        super().__init__(*args)
        self._commits: dict[Unit, _Commit] = {}

    def step(self, factor: float) -> None:
        self.refuse_if_aborted()
        for unit in list(self._commits):  # not used since the step before
            self.bring_up_to_date(unit)
        with uninterrupted():
            self._commit(self.waiting(), factor)
        self.stream.expect(unit for unit in self._forward_order() if unit in self._commits)

    def _commit(self, waiting: Sequence[Unit], factor: float) -> None:
        self.stream.gradients_are_final(waiting)
        for unit in waiting:
            settings = self.optimizer.settings_of(unit)
            self.optimizer.count_step(unit, settings)
            self.engine.create_moments(unit)  # for what was frozen when the optimizer was made
            # All in memory, there is nothing to read ahead; held by user code, its gradient may change behind step().
            if self.stream.in_place(unit) or self.engine.gradient_is_held(unit):
                self.update(unit, settings, factor)
                continue
            self.keep_changes(unit)
            self._commits[unit] = _Commit(settings, factor)
            if unit.grad_state is GradState.REDUCED:
                move_grad(unit, GradState.COMMITTED)
            self.model.hide(unit)

    def _forward_order(self) -> Iterable[Unit]:
        """The units that the next forward begins with; all of them, where nothing is known."""
        return dict.fromkeys(self.model.scheduler.order.from_start())

    def check_closure(self) -> None:
        raise ConfigError(
            "overlap_optimizer='next-forward' only commits in step(): a closure would see the old parameters. "
            "Use overlap_optimizer=False."
        )

    def backward_needs(self, units: Iterable[Unit]) -> None:
        """Room that is left is used for the states of the next forward's first units."""
        trained = (unit for unit in self._forward_order() if self.optimizer.trains(unit))
        self.stream.expect(islice(trained, _UNITS_AHEAD))

    def owes(self, unit: Unit) -> bool:
        return unit in self._commits

    def start_update(self, unit: Unit, param_out: Tensor) -> Wait:
        self.stream.expect([unit])
        return _PendingUpdate(self, unit, param_out)

    def run(self, unit: Unit, param_out: Tensor | None) -> None:
        """The update that is owed. AbortedStepError where it was begun before, and not finished."""
        self.refuse_if_aborted()
        commit = self._commits.pop(unit, None)
        if commit is None:  # forgotten since: all values are about to be replaced
            return
        direct = param_out if param_out is not None and param_out.device.type == "cpu" else None
        self._aborted = True
        self.update(unit, commit.settings, commit.factor, param_out=direct)
        self._aborted = False
        self.model.show_resident(unit)
        if param_out is not None and direct is None:
            self.engine.start_read(unit, param_out)()

    def bring_up_to_date(self, unit: Unit) -> None:
        if unit in self._commits:
            with uninterrupted():
                self.run(unit, None)

    def forget(self) -> None:
        self._commits.clear()
        super().forget()

    def settle(self) -> None:
        for unit in list(self._commits):
            self.bring_up_to_date(unit)
        super().settle()


# Units of the next forward whose states are read ahead; the stream's budget of bytes is what bounds them in fact.
_UNITS_AHEAD = 8
