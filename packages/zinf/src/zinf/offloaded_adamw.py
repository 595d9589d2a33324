"""AdamW: the torch.optim.Optimizer that people hold. The states lie on their tiers; here are only the decisions.

When an update runs:

    overlap_optimizer=False       inside step(), all units streamed one after the other
    overlap_optimizer="backward"  a unit's update right behind its gradient, while its parameters are in memory; the
                                  gradient is never kept. A unit that backward may need again waits until it is safe.

Both make the same numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from zero3 import parameter_forms
from zero3.partitioned_model import PartitionedModel
from zero3.unit import ParamSlot, Unit
from zero3.unit_state import GradState, move_grad

from . import gradient_norm
from .errors import AbortedStepError, ConfigError
from .loss_scaling import LossScale
from .offload_engine import OffloadEngine
from .optimizer_stream import OptimizerStream

log = logging.getLogger(__name__)

# Of host_memory, for optimizer states on their way in and out.
_STREAM_PART = 0.2
_STREAM_MOST = 256 << 20


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over all tiers; the update itself is `cpu_adam.step`.

    Parameters
    ----------
    params        parameters, or groups of them, of models made by zinf.init or zinf.shard
    lr, betas, eps, weight_decay   as in torch.optim.AdamW; per group, read when a step runs
    grad_clip     None, or the largest global 2-norm of the gradients
    accumulate    backwards per step. Gradients are summed (scale the loss as in plain torch). With
                  overlap_optimizer="backward" the update runs in the last of them.

    Attributes: `skipped`, whether the last step was skipped because the norm of the gradients was not finite;
    `grad_norm`, the global norm before clipping, where it was computed, else None.

    TypeError for parameters of other models; ValueError for settings out of range.
    """

    handles_partitioned_parameters = True  # zero3 leaves the parameters of a step to us

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        grad_clip: float | None = None,
        accumulate: int = 1,
    ):
        if not lr >= 0 or not eps >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr={lr}, eps={eps} and weight_decay={weight_decay} must not be negative")
        if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"betas={betas} must be two numbers in [0, 1)")
        if not (isinstance(accumulate, int) and accumulate >= 1):
            raise ValueError(f"accumulate={accumulate!r} must be a whole number of at least 1")
        if grad_clip is not None and not grad_clip > 0:
            raise ValueError(f"grad_clip={grad_clip} must be a positive norm")
        self._engines: dict[OffloadEngine, PartitionedModel] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.grad_clip = grad_clip
        self.accumulate = accumulate
        self.skipped = False
        self.grad_norm: float | None = None
        self._clip_factor = 1.0
        self._finished_backwards = 0
        self._gradients_came = False
        self._updated_in_backward = False
        self._aborted: str | None = None
        self._settings: dict[Unit, dict[int, dict[str, Any] | None]] = {}
        self.loss_scale = LossScale(next(iter(self._engines)).config.loss_scale)
        self._check_overlap()
        self._streams = {engine: OptimizerStream(engine, _stream_budget(engine)) for engine in self._engines}
        for engine, model in self._engines.items():
            engine.optimizer = self
            if accumulate > 1:
                engine.will_accumulate(model.units)
            for unit in model.units:
                if any(slot.param in self.state for slot in unit.slots):
                    engine.create_moments(unit)

    def _check_overlap(self) -> None:
        if self.grad_clip is not None and any(
            engine.config.overlap_optimizer == "backward" for engine in self._engines
        ):
            raise ConfigError(
                "grad_clip needs the norm of all gradients before the first update: "
                "overlap_optimizer='backward' cannot clip, use False"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own; as torch's."""
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            slot = parameter_forms.slot_of(param)
            engine = slot.unit.model.store
            if not isinstance(engine, OffloadEngine):
                raise TypeError(f"parameter {slot.name} is not of a zinf model: build it with zinf.init or zinf.shard")
            self._engines[engine] = slot.unit.model
            self.state[param].setdefault("step", 0)
            if engine.optimizer is self:
                engine.create_moments(slot.unit)

    # -- the step --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective.

        With clipping or loss scaling, a norm that is not finite skips the step and touches nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for engine, model in self._engines.items():
            model.border()
            engine.settle_gradients()
        self._refuse_if_aborted()
        factor = self._scale_factor()
        self.skipped = factor is None
        if factor is not None:
            waiting = [(e, unit) for e, model in self._engines.items() for unit in model.units if e.waits(unit)]
            for engine in self._engines:
                self._streams[engine].expect(unit for e, unit in waiting if e is engine)
            for engine, unit in waiting:
                self._update(engine, unit, factor)
        self._step_ends()
        return loss

    def _scale_factor(self) -> float | None:
        """By what the gradients are multiplied: unscaling and clipping together; None: skip the step."""
        factor = self.pending_factor
        if math.isnan(factor):
            return None
        if self.grad_clip is None and self.loss_scale.value == 1.0 and not self.loss_scale.dynamic:
            return factor
        norm = self._norm()
        finite = math.isfinite(norm)
        self.loss_scale.stepped(overflow=not finite)
        if not finite:
            return None
        if self.grad_clip is not None:
            factor *= min(1.0, self.grad_clip / (norm + 1e-6))
        return factor

    def _norm(self) -> float:
        """Global norm of the unscaled gradients, clipping so far included."""
        squares = sum(gradient_norm.norm(engine, model.units) ** 2 for engine, model in self._engines.items())
        self.grad_norm = math.sqrt(squares) * self.pending_factor
        return self.grad_norm

    def _step_ends(self) -> None:
        self._clip_factor = 1.0
        self._finished_backwards = 0
        self._gradients_came = False
        self._updated_in_backward = False
        self._settings.clear()
        for engine, model in self._engines.items():
            model.scheduler.optimizer_stepped()
            engine.reporter.step_ended(model, self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients (there is no other way than to None: they may lie on a drive)."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def _update(self, engine: OffloadEngine, unit: Unit, factor: float, gradient: Tensor | None = None) -> None:
        """One unit's Adam step, with the settings in force."""
        settings = self._settings_of(unit)
        self._streams[engine].update(unit, settings, factor, gradient)
        for slot in unit.slots:
            if settings.get(slot.index) is not None:
                self.state[slot.param]["step"] += 1
        unit.model.values_changed(unit)

    def _settings_of(self, unit: Unit) -> dict[int, dict[str, Any] | None]:
        """Slot index -> settings of its update; None for what has no gradient or is not ours."""
        if not self._settings:
            for group in self.param_groups:
                for param in group["params"]:
                    slot: ParamSlot = param._zero3
                    self._settings.setdefault(slot.unit, {})[slot.index] = {
                        "lr": float(group["lr"]),
                        "betas": tuple(group["betas"]),
                        "eps": float(group["eps"]),
                        "weight_decay": float(group["weight_decay"]),
                        "step": self.state[param]["step"] + 1,
                    }
        ours = self._settings.get(unit, {})
        return {slot.index: ours.get(slot.index) if slot.has_grad else None for slot in unit.slots}

    # -- in backward -----------------------------------------------------------------------------------------

    def _in_backward(self, engine: OffloadEngine) -> bool:
        return engine.config.overlap_optimizer == "backward"

    def takes_at_once(self, unit: Unit, shard: Tensor) -> bool:
        """A gradient has arrived: update now if that is the mode, and safe. True when it was taken."""
        engine = unit.model.store
        self._gradients_came = True
        if not self._in_backward(engine) or self._finished_backwards + 1 < self.accumulate:
            return False
        if not _may_update(unit) or shard.device.type != "cpu":
            return False
        if engine.waits(unit):
            shard = engine.gradient(unit).float().add_(shard)
        else:
            shard = shard.to(engine.waiting_dtype(unit))  # the rounding that waiting would have brought
        self._update_at_once(engine, unit, shard)
        return True

    def _update_at_once(self, engine: OffloadEngine, unit: Unit, gradient: Tensor | None) -> None:
        self._updated_in_backward = True
        self._update(engine, unit, 1.0 / self.loss_scale.value, gradient)
        for slot in unit.slots:
            slot.has_grad = False
        engine.drop_gradient(unit)
        if unit.grad_state is GradState.REDUCED:
            move_grad(unit, GradState.COMMITTED)
            move_grad(unit, GradState.NONE)

    def expect_updates(self, units: list[Unit]) -> None:
        """Backward comes to these units next."""
        engine = units[0].model.store
        if self._in_backward(engine) and self._finished_backwards + 1 >= self.accumulate:
            wanted = [unit for unit in units if any(slot.param in self.state for slot in unit.slots) and unit.trainable]
            self._streams[engine].expect(wanted)

    def forward_begins(self) -> None:
        """An outermost forward begins: the backward before it, if there was one, was a micro-batch."""
        self._refuse_if_aborted()
        if not (torch.is_grad_enabled() and self._gradients_came):
            return
        self._gradients_came = False
        self._finished_backwards += 1
        if self._finished_backwards >= self.accumulate and any(map(self._in_backward, self._engines)):
            raise ConfigError(
                f"overlap_optimizer='backward' updates within backward: call optimizer.step() after every "
                f"{self.accumulate} backward(s). To accumulate K micro-batches, use zinf.AdamW(..., accumulate=K)."
            )

    def backward_ended(self) -> None:
        """Units that had to wait until backward no longer needs them."""
        if self._finished_backwards + 1 < self.accumulate:
            return
        for engine, model in self._engines.items():
            if self._in_backward(engine):
                for unit in model.units:
                    if engine.waits(unit) and _may_update(unit) and unit.grad_state is GradState.REDUCED:
                        self._update_at_once(engine, unit, None)

    def backward_aborted(self) -> None:
        """A backward raised. In mode "backward" the model may be half a step ahead."""
        for stream in self._streams.values():
            stream.forget_expected()
        if self._updated_in_backward:
            newest = next((e.newest_checkpoint for e in self._engines if e.newest_checkpoint), None)
            self._aborted = (
                "a backward was interrupted after some units had been updated (overlap_optimizer='backward'): the model "
                "is between two steps. "
                + (
                    f"Load the newest complete checkpoint: {newest}"
                    if newest
                    else "No checkpoint was saved in this run."
                )
            )

    def _refuse_if_aborted(self) -> None:
        if self._aborted is not None:
            raise AbortedStepError(self._aborted)

    # -- clipping and scaling --------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> Tensor:
        """See `zinf.clip_grad_norm_`."""
        if any(map(self._in_backward, self._engines)):
            raise ConfigError(
                "the gradients are gone: overlap_optimizer='backward' has updated within backward. To clip, use "
                "overlap_optimizer=False with zinf.AdamW(grad_clip=...) or zinf.clip_grad_norm_."
            )
        for engine, model in self._engines.items():
            model.border()
            engine.settle_gradients()
        norm = self._norm()
        if math.isfinite(norm):
            self._clip_factor *= min(1.0, float(max_norm) / (norm + 1e-6))
        else:
            self._clip_factor = math.nan
        return torch.tensor(norm, dtype=torch.float32)

    @property
    def pending_factor(self) -> float:
        """What the gradients will be multiplied by: unscaling, and clipping asked for so far."""
        return self._clip_factor / self.loss_scale.value

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale (Config.loss_scale), for backward. Unscaling happens in the update."""
        return loss * self.loss_scale.value

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise ConfigError(
            "torch.amp.GradScaler does not reach gradients on other tiers: use Config(loss_scale='dynamic') and "
            "optimizer.scale(loss).backward()"
        )

    # -- states ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing pends: all updates are on their tiers."""
        self._refuse_if_aborted()
        for engine, model in self._engines.items():
            model.border()
            engine.settle_gradients()
            self._streams[engine].forget_expected()
            self._streams[engine].drain()

    def loaded(self) -> None:
        """All states were replaced by a checkpoint's."""
        self._aborted = None
        self._updated_in_backward = False
        self._gradients_came = False
        self._finished_backwards = 0
        self._settings.clear()


def _may_update(unit: Unit) -> bool:
    """Whether backward can need the unit's present values no more."""
    return not (unit.saved_views or unit.holds or unit.replays or unit.awaited)


def _stream_budget(engine: OffloadEngine) -> int:
    return min(int(engine.placement.host_memory * _STREAM_PART), _STREAM_MOST)
