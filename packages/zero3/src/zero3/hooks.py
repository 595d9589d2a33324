"""Module events -> the model's bookkeeping. Nothing is decided here.

A module that hosts units holds them while it runs. The root and every host put our saved-tensor hooks on top while
they run. All hooks are called also when an exception passes through (`always_call`): a checkpoint's recomputation
ends by one.

torch does not call them for a KeyboardInterrupt, nor for anything else that is no Exception. So a running forward
remembers the frame of `Module._call_impl` that runs it: where that frame is not on the stack any more, the forward
was interrupted, and whoever looks next ends it.

torch.compile does not look into the hooks: it compiles what lies between them, a graph or more a unit.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

from .errors import UnsupportedError
from .one_thread import frames_of
from .own_hook import OwnHook
from .saved_views import HookPair, take_off
from .untraced import untraced

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel
    from .unit import Unit

log = logging.getLogger(__name__)


_CALL = nn.Module._call_impl.__code__


class _Running:
    """A forward of a hooked module that runs now.

    frame    of torch's function that calls the hooks and the module's own forward; None where that is another one
    thread   in which it runs
    views    our saved-tensor hooks, where it has put them on top
    held     units that it holds
    references   to the parameters of each when it began, where a graph is made
    """

    __slots__ = ("frame", "held", "hook", "model", "references", "thread", "views")

    def __init__(self, hook: _Forward, model: PartitionedModel):
        self.hook, self.model = hook, model
        frame: FrameType | None = sys._getframe(2)  # of whoever calls the hook
        while frame is not None and frame.f_code is not _CALL:
            frame = frame.f_back
        self.frame = frame
        self.thread = threading.get_ident()
        self.views: HookPair | None = None
        self.held: Sequence[Unit] = ()
        self.references: list[list[int]] = []

    def was_interrupted(self) -> bool:
        """Whether its frame has left the stack of its thread."""
        frames = frames_of(self.thread)
        return not (any(frames) if self.frame is None else any(frame is self.frame for frame in frames))


class _Stack(threading.local):
    """The forwards that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.forwards: list[_Running] = []


_stack = _Stack()


def running_model() -> PartitionedModel | None:
    """The model whose forward is running in this thread, the innermost of several; None outside of any."""
    end_interrupted()
    return _stack.forwards[-1].model if _stack.forwards else None


def runs(model: PartitionedModel) -> bool:
    """Whether a forward of `model` is running in this thread."""
    end_interrupted()
    forwards = _stack.forwards
    if forwards and forwards[-1].model is model:  # nearly always, and this is asked all the time
        return True
    return any(one.model is model for one in forwards)


def _refuse_traces() -> None:
    """A recorded graph would keep the memory that the parameters had in this one forward."""
    if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
        raise UnsupportedError(
            "torch.jit.trace, torch.export and torch.onnx cannot record a partitioned model: its parameters are there "
            "for one use at a time. Give them copy.deepcopy(model), which is a plain one."
        )


def end_interrupted() -> None:
    """End the forwards that an interrupt has left behind."""
    forwards = _stack.forwards
    left: list[_Running] = []
    while forwards and forwards[-1].was_interrupted():
        left.insert(0, forwards.pop())
    if left:
        log.warning("a forward was interrupted: what it held is released")
        _end(left)


def _end(forwards: Sequence[_Running]) -> None:
    """End forwards that lie one inside the other, the outermost first."""
    views = [one.views for one in forwards if one.views is not None]
    if views:
        take_off(views)
    for one in reversed(forwards):
        one.model.let_go(one.held)
        if one in one.model.outermost:
            one.model.outermost.remove(one)


class _Forward:
    """The pair of hooks of one module."""

    def __init__(self, model: PartitionedModel, module: nn.Module, units: list[Unit]):
        self._model = model
        self._units = units
        self._views = any(not unit.permanent for unit in model.units)
        model.handles += [
            module.register_forward_pre_hook(OwnHook(self.before), prepend=True),
            module.register_forward_hook(OwnHook(self.after), always_call=True),
        ]

    @untraced
    def before(self, module: nn.Module, args) -> None:
        model, grad = self._model, torch.is_grad_enabled()
        in_backward = torch._C._current_graph_task_id() != -1
        outermost = not in_backward and not runs(model)
        # First of all: torch calls `after` also when the rest of this fails.
        running = _Running(self, model)
        _stack.forwards.append(running)
        if outermost:
            if self._views:
                _refuse_traces()
                model.outermost.append(running)  # before anybody looks: to append is one step for all threads
            model.step_begins()
            model.will_replay = grad
        if self._views and grad and (pair := model.saved_views.pair()) is not None:
            running.views = pair  # noted first: an interrupt may come between
            pair.put_on_top()
        model.count_replays(self._units)
        running.held = self._units
        model.hold(self._units)
        if self._views and grad:
            running.references = [unit.references() for unit in self._units]

    def again(self) -> None:
        """As `before`, in a checkpoint's recomputation: the checkpoint's saved-tensor hooks must stay on top."""
        running = _Running(self, self._model)
        _stack.forwards.append(running)
        running.held = self._units
        self._model.hold(self._units)

    @untraced
    def after(self, module: nn.Module, args, output) -> None:
        forwards = _stack.forwards
        if forwards and forwards[-1].hook is not self:
            end_interrupted()  # the interrupt was caught by the forward that ends now
        if not forwards or forwards[-1].hook is not self:  # another pre-hook failed before ours was called
            return
        running = forwards.pop()
        if running.references:
            self._model.find_kept(self._units, running.references)
        _end([running])
        if not torch.is_grad_enabled() and not runs(self._model):
            self._model.forget_noticed()


@contextmanager
def running_again(module: nn.Module) -> Iterator[None]:
    """What `module`'s hooks enclose runs again by itself, in a checkpoint inside its forward: its units are held."""
    own = [hook.func.__self__ for hook in module._forward_pre_hooks.values() if isinstance(hook, OwnHook)]  # type: ignore[attr-defined]
    forwards = [one for one in own if isinstance(one, _Forward)]
    try:
        for forward in forwards:
            forward.again()
        yield
    finally:
        for forward in reversed(forwards):
            forward.after(module, (), None)


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
