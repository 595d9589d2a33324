"""overlap_optimizer="backward": a unit's Adam runs right behind its gradient, while its parameters are in memory.

Gradients are kept nowhere. A unit that this backward may need again (a saved view of it is alive, a checkpoint will
run it again) waits until that is over; its gradient lies on its tier until then. Only for loops that always step: a
step that is interrupted in between leaves the model half updated, so the next use raises and names a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zero3.uninterrupted import uninterrupted
from zero3.unit import Unit
from zero3.unit_state import GradState, ParamState, move_grad

from .errors import ConfigError
from .optimizer_in_step import UpdateInStep


class UpdateInBackward(UpdateInStep):
    """Updates in the last backward of a step."""

    read_late = ("param",)  # it is mostly in memory when the gradient comes
    gradients_wait = False  # mostly

    def __init__(self, *args):
        super().__init__(*args)
        self._used_up: set[Unit] = set()  # their gradients of this step are gone
        self._begin_anew()

    @property
    def _last_backward(self) -> bool:
        return self._finished_backwards + 1 >= self.optimizer.accumulate

    def gradient_arrived(self, unit: Unit, shard: Tensor) -> bool:
        if not any(slot.has_grad for slot in unit.slots):  # room for one that user code gives, outside of backward
            self.check_gradient(unit)
            return False  # it waits for step()
        self._gradients_came = True
        if not self._last_backward or not _may_update(unit) or shard.device.type != "cpu":
            return False
        if not self.optimizer.owns_all(unit):  # the gradient is another's too, or only another's
            return False
        if self.engine.waits(unit):
            shard = self.engine.read_gradient(unit).float().add_(shard)
        else:
            shard = shard.to(self.engine.waiting_dtype(unit))  # the rounding that waiting would have brought
        self._update(unit, shard)
        return True

    def _update(self, unit: Unit, gradient: Tensor | None) -> None:
        self._updated = True
        with uninterrupted():
            self._update_whole(unit, gradient)

    def _update_whole(self, unit: Unit, gradient: Tensor | None) -> None:
        settings = self.optimizer.settings_of(unit)
        self.optimizer.count_step(unit, settings)
        at_hand = unit.state is ParamState.READY and unit.flat.device.type == "cpu"
        gathered = unit.own_slice(unit.flat) if at_hand else None
        self.update(unit, settings, self.optimizer.pending_factor, gradient, param_in=gathered)
        for slot in unit.slots:
            slot.has_grad = False
        self.engine.drop_gradient(unit)
        self._used_up.add(unit)
        if unit.grad_state is GradState.REDUCED:
            move_grad(unit, GradState.COMMITTED)
            move_grad(unit, GradState.NONE)

    def backward_needs(self, units: Iterable[Unit]) -> None:
        if self._last_backward:
            self.stream.expect(unit for unit in units if self.optimizer.trains(unit))

    def backward_ended(self) -> None:
        """Now the units that had to wait."""
        if self._last_backward:
            for unit in self.waiting():
                if _may_update(unit) and unit.grad_state is GradState.REDUCED and self.optimizer.owns_all(unit):
                    self._update(unit, None)

    def forward_begins(self) -> None:
        """The backward before it, if there was one, was a micro-batch."""
        super().forward_begins()
        if not (torch.is_grad_enabled() and self._gradients_came):
            return
        self._gradients_came = False
        self._finished_backwards += 1
        if self._finished_backwards >= self.optimizer.accumulate:
            raise ConfigError(
                "overlap_optimizer='backward' updates within backward: call optimizer.step() after every "
                f"{self.optimizer.accumulate} backward(s). To accumulate K micro-batches, use "
                "zinf.AdamW(..., accumulate=K)."
            )

    def check_gradient(self, unit: Unit) -> None:
        if unit in self._used_up:
            raise ConfigError(
                f"the gradient of {unit.slots[0].name} is gone: overlap_optimizer='backward' has updated within "
                "backward and keeps no gradient. To look at gradients or to clip them, use "
                "overlap_optimizer='next-forward' or False, with zinf.AdamW(grad_clip=...) or zinf.clip_grad_norm_."
            )

    def step(self, factor: float) -> None:
        super().step(factor)  # what still waits
        for unit in filter(self.optimizer.owns_all, self.waiting()):
            self.engine.drop_gradient(unit)
            for slot in unit.slots:
                slot.has_grad = False
        for unit in self.model.units:
            unit.replays = 0  # a checkpoint whose loss was thrown away runs no more
        self._begin_anew()

    def _begin_anew(self) -> None:
        """No backward of the next step has run."""
        self._used_up.clear()
        self._finished_backwards = 0
        self._gradients_came = self._updated = False

    def aborted(self) -> None:
        super().aborted()
        self._gradients_came = False
        self._aborted = self._aborted or self._updated

    def forget(self) -> None:
        super().forget()
        self._begin_anew()


def _may_update(unit: Unit) -> bool:
    """Whether backward can need the unit's present values no more."""
    return not (unit.has_saved_views or unit.holds or unit.replays or unit.awaited)
