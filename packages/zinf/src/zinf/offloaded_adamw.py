"""AdamW: the torch.optim.Optimizer that people hold. The states lie on their tiers; here are only the decisions.

When an update really runs:

    overlap_optimizer=False           inside step(), all units streamed one after the other
    overlap_optimizer="next-forward"  step() only commits: it notes every group's settings, and from then on owns the
                                      gradients. A unit is updated when it is used next (optimizer_before_use.py)
    overlap_optimizer="backward"      right behind a unit's gradient (optimizer_in_backward.py)

All make the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from cpu_adam.scalars import scheduled_rate
from zero3 import parameter_forms
from zero3.partitioned_model import PartitionedModel
from zero3.unit import ParamSlot, Unit

from . import gradient_norm, optimizer_state_dict, unit_states
from .errors import ConfigError
from .loss_scaling import LossScale
from .offload_engine import OffloadEngine
from .optimizer_before_use import UpdateBeforeUse
from .optimizer_in_backward import UpdateInBackward
from .optimizer_in_step import UpdateInStep


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over all tiers; the update itself is `cpu_adam.step`.

    Parameters
    ----------
    params        parameters, or groups of them, of models made by zinf.init or zinf.shard; others of these models keep
                  their gradients, and are not updated
    lr, betas, eps, weight_decay   as in torch.optim.AdamW, but for the defaults; per group, read when a step runs
    grad_clip     None, or the largest global 2-norm of the gradients
    accumulate    backwards per step. Gradients are summed (scale the loss as in plain torch). With
                  overlap_optimizer="backward" the update runs in the last of them.

    Attributes: `skipped`, whether the last step was skipped because the norm of the gradients was not finite;
    `grad_norm`, the global norm before the last clipping, or None, where the last step did without one.

    TypeError for parameters of other models, and of dtypes that `cpu_adam.step` does not update (complex, float64);
    ValueError for settings out of range, and for a model of which another zinf.AdamW trains what is not among these
    parameters. One that trains nothing else is succeeded, as by any new optimizer: moments and counters begin anew.
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
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _checked(settings)
        if not (isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate >= 1):
            raise ValueError(f"accumulate={accumulate!r} must be a whole number of at least 1")
        if grad_clip is not None and not _number(float, grad_clip) > 0:
            raise ValueError(f"grad_clip={grad_clip!r} must be a positive norm")
        self._engines: dict[OffloadEngine, PartitionedModel] = {}
        self._succeeded = False
        super().__init__(params, settings)
        predecessors = self._predecessors()
        self.grad_clip = grad_clip
        self.accumulate = accumulate
        self.skipped = False
        self.grad_norm: float | None = None
        self._measured = False  # `grad_norm` is of the gradients since the last step
        self._clip_factor = 1.0
        self._settings: dict[Unit, dict[int, dict[str, Any] | None]] = {}
        self.loss_scale = LossScale(next(iter(self._engines)).config.loss_scale)
        if grad_clip is not None:
            self._refuse_clipping(self._engines)
        self._updates: dict[OffloadEngine, UpdateInStep] = {}
        for predecessor in predecessors:
            predecessor._end()
        self._take_charge()

    def _predecessors(self) -> list[AdamW]:
        """Those that have had charge of our models. ValueError where one of them trains anything that we do not."""
        found = list(dict.fromkeys(engine.optimizer for engine in self._engines if engine.optimizer is not None))
        for other in found:
            for param in other.state:
                if param not in self.state:
                    self._refuse_two(parameter_forms.slots_of(param)[0])
        return found

    def _refuse_two(self, slot: ParamSlot) -> NoReturn:
        raise ValueError(f"the model has a zinf.AdamW already, which trains parameter {slot.name}: add a group to it")

    def _end(self) -> None:
        """Another takes our parameters over: what we owe them is done, and our moments are gone."""
        self.settle()
        for engine in self._engines:
            engine.forget_moments()
        self._engines.clear()
        self._updates.clear()
        self._succeeded = True

    def _take_charge(self) -> None:
        """From now on the updates of our parameters are ours: of new models, and of new units of old ones."""
        for engine, model in self._engines.items():
            if engine not in self._updates:
                self._take_charge_of_model(engine, model)
            for unit in model.units:
                if self.trains(unit):
                    engine.create_moments(unit)
                    if engine.config.overlap_optimizer != "backward":
                        engine.reserve_gradient(unit)

    def _take_charge_of_model(self, engine: OffloadEngine, model: PartitionedModel) -> None:
        updates = _UPDATES[engine.config.overlap_optimizer](self, engine, model)
        self._updates[engine] = engine.updates = updates
        engine.optimizer = self
        if self.accumulate > 1:
            engine.will_accumulate(model.units)

    def _refuse_clipping(self, engines: Iterable[OffloadEngine]) -> None:
        if any(engine.config.overlap_optimizer == "backward" for engine in engines):
            raise ConfigError(
                "the gradients are gone when their norm is known: overlap_optimizer='backward' updates within "
                "backward. To clip, use overlap_optimizer='next-forward' or False, with zinf.AdamW(grad_clip=...) or "
                "zinf.clip_grad_norm_."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with settings of their own, of further models too; as torch's. A refusal adds nothing."""
        super().add_param_group(param_group)
        try:
            slots = [
                slot
                for param in self.param_groups[-1]["params"]
                for slot in parameter_forms.slots_of(param) or [parameter_forms.slot_of(param)]
            ]
            engines = {self._checked_engine(slot): slot.unit.model for slot in slots}
            self._check_models(engines)
        except BaseException:
            self.param_groups.pop()
            raise
        self._engines.update(engines)
        for slot in slots:
            self.state[slot.owner].setdefault("step", 0)
        if hasattr(self, "_updates"):  # else we are still being made
            self._take_charge()

    def _check_models(self, engines: Iterable[OffloadEngine]) -> None:
        """One optimizer scales one loss, and takes one norm."""
        configs = [engine.config for engine in dict.fromkeys([*self._engines, *engines])]
        if len({config.loss_scale for config in configs}) > 1:
            found = ", ".join(repr(config.loss_scale) for config in configs)
            raise ConfigError(f"the models of one optimizer must agree in loss_scale, which is {found}")
        if getattr(self, "grad_clip", None) is not None:
            self._refuse_clipping(engines)

    def _checked_engine(self, slot: ParamSlot) -> OffloadEngine:
        _refuse_gone(slot.unit.model)
        engine = slot.unit.model.store
        if not isinstance(engine, OffloadEngine):
            raise TypeError(f"parameter {slot.name} is not of a zinf model: build it with zinf.init or zinf.shard")
        if slot.unit.model.under_construction:
            raise RuntimeError(f"parameter {slot.name} is still under zinf.init: make the optimizer behind that block")
        if slot.param.requires_grad and slot.unit.dtype not in unit_states.UPDATED:
            raise TypeError(
                f"parameter {slot.name} is {slot.unit.dtype}, of which zinf.AdamW makes no update: give it to "
                "another optimizer, or freeze it with requires_grad_(False)"
            )
        if hasattr(self, "_updates") and engine.optimizer not in (None, self):  # else `_predecessors` decides
            self._refuse_two(slot)
        return engine

    def trains(self, unit: Unit) -> bool:
        """Whether any parameter of `unit` is ours, and not all are frozen."""
        return unit.trainable and self.owns(unit)

    def owns(self, unit: Unit) -> bool:
        """Whether any parameter of `unit` is ours. The gradients of others are not touched, as in torch."""
        return any(slot.owner in self.state for slot in unit.slots)

    def owns_all(self, unit: Unit) -> bool:
        """Whether every trainable parameter of `unit` is ours."""
        return all(slot.owner in self.state or not slot.param.requires_grad for slot in unit.slots)

    # -- the step --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective.

        With clipping or loss scaling, a norm that is not finite skips the step and touches nothing.
        """
        self._check_in_charge()
        loss = None
        if closure is not None:
            for updates in self._updates.values():
                updates.check_closure()
            with torch.enable_grad():
                loss = closure()
        self._settle_gradients()
        factor = self._scale_factor()
        self.skipped = factor is None
        if factor is not None:
            for updates in self._updates.values():
                updates.step(factor)
        self._step_ends()
        return loss

    def _check_in_charge(self) -> None:
        if self._succeeded:
            raise RuntimeError("a later zinf.AdamW trains these parameters: step that one")
        for model in self._engines.values():
            _refuse_gone(model)

    def _settle_gradients(self) -> None:
        for engine, model in self._engines.items():
            model.border()
            model.gradients.settle(reduce_all=True)
            engine.settle_gradients()

    def _scale_factor(self) -> float | None:
        """By what the gradients are multiplied: unscaling and clipping together; None: skip the step."""
        factor = self.pending_factor
        if math.isnan(factor):  # clip_grad_norm_ has met a norm that is not finite
            self.loss_scale.stepped(overflow=True)
            return None
        if self.grad_clip is None and self.loss_scale.value == 1.0 and not self.loss_scale.dynamic:
            return factor
        norm = self._norm(own=True)
        finite = math.isfinite(norm)
        self.loss_scale.stepped(overflow=not finite)
        if not finite:
            return None
        if self.grad_clip is not None:
            factor *= min(1.0, self.grad_clip / (norm + 1e-6))
        return factor

    def _norm(self, own: bool) -> float:
        """Global norm of the unscaled gradients, clipping so far included: of the models', or only of our own."""

        def counts(slot: ParamSlot) -> bool:
            return slot.has_grad and (not own or slot.owner in self.state)

        squares = sum(gradient_norm.norm(engine, model.units, counts) ** 2 for engine, model in self._engines.items())
        self.grad_norm, self._measured = math.sqrt(squares) * self.pending_factor, True
        return self.grad_norm

    def _step_ends(self) -> None:
        self._clip_factor = 1.0
        self._settings.clear()
        if not self._measured:
            self.grad_norm = None
        self._measured = False
        for engine, model in self._engines.items():
            model.scheduler.optimizer_stepped()
            engine.reporter.step_ended(model, self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients (there is no other way than to None: they may lie on a drive)."""
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def settings_of(self, unit: Unit) -> dict[int, dict[str, Any] | None]:
        """Slot index -> settings of its next update; None for what has no gradient or is not ours."""
        if not self._settings:
            checked = [_checked(group) for group in self.param_groups]  # all, before anything is noted
            for group, of_group in zip(self.param_groups, checked, strict=True):
                for param in group["params"]:
                    settings = {**of_group, "step": self.state[param]["step"] + 1}
                    for slot in parameter_forms.slots_of(param):
                        self._settings.setdefault(slot.unit, {})[slot.index] = settings
        ours = self._settings.get(unit, {})
        return {slot.index: ours.get(slot.index) if slot.has_grad else None for slot in unit.slots}

    def count_step(self, unit: Unit, settings: dict[int, dict[str, Any] | None]) -> None:
        """An update of `unit` with these settings is certain now."""
        for slot in unit.slots:
            if (ours := settings.get(slot.index)) is not None:  # one count for all tiles of a parameter
                self.state[slot.owner]["step"] = ours["step"]

    # -- clipping and scaling --------------------------------------------------------------------------------

    def clip(self, max_norm: float) -> Tensor:
        """See `zinf.clip_grad_norm_`."""
        largest = _number(float, max_norm)
        if not largest >= 0:  # a negative one would turn the gradients round
            raise ValueError(f"max_norm={max_norm!r} is no norm: give a number of at least 0")
        self._refuse_clipping(self._engines)
        self._settle_gradients()
        norm = self._norm(own=False)
        if math.isfinite(norm):
            self._clip_factor *= min(1.0, largest / (norm + 1e-6))
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

    # -- state dicts -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Settings of the groups and step counters, and nothing else: the moments stay on their tiers.

        To keep a run, use `zinf.save`; to look at a parameter's moments, `zinf.full_state`.
        """
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a torch.optim.AdamW's state dict: settings, counters, and moments as whole tensors. Collective.

        RuntimeError for one without moments, as our own `state_dict` gives: `zinf.load` takes up a zinf run.
        """
        optimizer_state_dict.load(self, state_dict)

    def __reduce__(self) -> NoReturn:
        # A copy would have neither the moments nor charge of the model, and step nothing.
        raise TypeError("a zinf.AdamW cannot be copied or pickled: its states lie on tiers. zinf.save keeps them")

    # -- states ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Every update has run, and all states are on their tiers."""
        for engine, model in self._engines.items():
            model.border()
            engine.settle_gradients()
            self._updates[engine].settle()

    def forget(self) -> None:
        """All states are about to be replaced by a checkpoint's: what pends does not matter any more."""
        for engine, updates in self._updates.items():
            engine.forget_grad_writes()
            updates.forget()
        self._clip_factor = 1.0
        self._settings.clear()


def _refuse_gone(model: PartitionedModel) -> None:
    if model.gone:
        raise RuntimeError("a model of this optimizer is gone: keep it as long as it is trained")
    if not model.under_construction and not model.handles:
        raise RuntimeError(
            "a model of this optimizer was sharded again since, which left its moments behind: make a new zinf.AdamW"
        )


def _checked(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group, as numbers. ValueError names one that is none, or out of range."""
    settings: dict[str, Any] = {}
    for name in ("lr", "eps", "weight_decay"):
        settings[name] = _number(scheduled_rate if name == "lr" else float, group[name])
        if not 0 <= settings[name] < math.inf:
            raise ValueError(f"{name}={group[name]!r} must be a finite number, and not negative")
    betas = group["betas"]
    settings["betas"] = tuple(_number(float, beta) for beta in betas) if isinstance(betas, Sequence) else ()
    if not (len(settings["betas"]) == 2 and all(0 <= beta < 1 for beta in settings["betas"])):
        raise ValueError(f"betas={betas!r} must be two numbers in [0, 1)")
    return settings


def _number(convert: Callable[[Any], float], value: Any) -> float:
    if isinstance(value, str | bool):  # Python takes "1e-3" and True for numbers, and schedulers would not
        return math.nan
    try:
        return convert(value)
    except (TypeError, ValueError):
        return math.nan  # in no range


_UPDATES = {False: UpdateInStep, "backward": UpdateInBackward, "next-forward": UpdateBeforeUse}
