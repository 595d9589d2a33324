"""Module events -> the model's bookkeeping. Nothing is decided here.

A module that hosts units holds them while it runs. The root and every host put our saved-tensor hooks on top while
they run. All hooks are called also when an exception passes through (`always_call`): a checkpoint's recomputation
ends by one.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from .own_hook import OwnHook

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel
    from .unit import Unit

log = logging.getLogger(__name__)

# Models whose forward is running, the innermost last.
_running: list[PartitionedModel] = []


def running_model() -> PartitionedModel | None:
    """The model whose forward is running, the innermost of several; None outside of any."""
    return _running[-1] if _running else None


class _Forward:
    """The pair of hooks of one module."""

    def __init__(self, model: PartitionedModel, module: nn.Module, units: list[Unit]):
        self._model = model
        self._units = units
        self._views = any(not unit.permanent for unit in model.units)
        self._pushed: list[bool] = []  # one entry a running forward of this module (it may call itself)
        model.handles += [
            module.register_forward_pre_hook(OwnHook(self.before), prepend=True),
            module.register_forward_hook(OwnHook(self.after), always_call=True),
        ]

    def before(self, module: nn.Module, args) -> None:
        model = self._model
        if not model.depth and torch._C._current_graph_task_id() == -1:
            model.step_begins()
            model.will_replay = torch.is_grad_enabled()
        model.depth += 1
        _running.append(model)
        self._pushed.append(self._views and torch.is_grad_enabled() and model.saved_views.push())
        if not torch.is_grad_enabled() and model.will_replay:
            for unit in self._units:
                unit.replays += 1
        elif torch._C._current_graph_task_id() != -1:
            for unit in self._units:
                unit.replays = max(unit.replays - 1, 0)
        model.hold(self._units)

    def after(self, module: nn.Module, args, output) -> None:
        model = self._model
        if not self._pushed:  # the pre-hook itself failed
            return
        if self._pushed.pop():
            model.saved_views.pop()
        model.depth -= 1
        _running.pop()
        model.let_go(self._units)
        if not model.depth and not torch.is_grad_enabled():
            model.forget_noticed()


def install(model: PartitionedModel, module: nn.Module, hosts: dict[nn.Module, list[Unit]]) -> None:
    """Hook `module` (the root) and every host of units."""
    for host in {module: None, **dict.fromkeys(hosts)}:
        units = [unit for unit in hosts.get(host, []) if not unit.plain]
        if units or host is module:
            _Forward(model, host, units)
    weakref.finalize(module, model.dissolve)


def add_units(model: PartitionedModel, module: nn.Module, units: list[Unit]) -> None:
    """`module` shall hold `units` too while it runs."""
    _Forward(model, module, units)
