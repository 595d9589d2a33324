"""init(): parameters are partitioned as each submodule is built (paper, 7.2).

Inside the context the constructor of every module class is wrapped. When the outermost constructor call of an
instance returns, the parameters that it made are cut into shards, so that no process holds more than one
submodule's full parameters. These first units are one a module; initialisation that comes later (`apply`,
`_init_weights`, tying) touches released parameters, which gathers them one unit at a time and writes the changes
back. When the context ends, each outermost module is partitioned for good (partition_model.py).

The random numbers are the plain constructor's: every rank draws whole tensors in the same order.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from . import parameter_forms
from .collectives import Ranks
from .partition_model import default_device, device_of, make_settings, partition
from .partitioned_model import PartitionedModel, Settings
from .scheduler import OnDemand, Scheduler
from .shard_store import InMemoryStore, ShardStore
from .tile_cutting import AllocatingTiles, TileCount, Unborn, born
from .tiles import tiles_of


@contextmanager
def init(
    dtype: torch.dtype | None = None,
    group: Any = None,
    unit_size: int | str = "auto",
    shard: tuple[str, ...] = ("params", "grads", "optimizer"),
    scheduler: Scheduler | None = None,
    store: ShardStore | None = None,
    reduce_dtype: torch.dtype | None = None,
    timeout: float = 300.0,
) -> Iterator[None]:
    """Modules built inside are partitioned as they are built. Arguments as in `zero3.shard`. Collective.

    After the block the torch constructors are the original ones again. Nested contexts: the outermost counts.
    """
    settings, ranks = make_settings(dtype, unit_size, shard, reduce_dtype), Ranks(group, timeout)
    made: list[nn.Module] = []
    with constructing(ranks, settings, lambda device: store or InMemoryStore(device), made.append):
        yield
    for number, module in enumerate(made):
        device = device_of(module)
        own_store = store if store is not None and number == 0 else InMemoryStore(device)
        own_scheduler = scheduler if scheduler is not None and number == 0 else OnDemand()
        partition(module, ranks, settings, own_store, own_scheduler, device)


class _Construction:
    """What goes on inside one init() context."""

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        make_store: Callable[[torch.device], ShardStore],
        tile_count: TileCount | None = None,
    ):
        self.tile_count = tile_count
        self._ranks, self._settings, self._make_store = ranks, settings, make_store
        self._models: dict[torch.device, PartitionedModel] = {}
        self._depth: dict[int, int] = {}  # id of an instance under construction -> constructor calls
        self._running = 0
        self.outermost: list[weakref.ref[nn.Module]] = []

    def begins(self, module: nn.Module) -> None:
        self._depth[id(module)] = self._depth.get(id(module), 0) + 1
        self._running += self._depth[id(module)] == 1

    def ends(self, module: nn.Module, failed: bool) -> None:
        self._depth[id(module)] -= 1
        if self._depth[id(module)]:
            return
        del self._depth[id(module)]
        self._running -= 1
        if failed:
            return
        self.partition_fresh(module)
        if not self._running:
            self.outermost.append(weakref.ref(module))

    def partition_fresh(self, module: nn.Module) -> None:
        """Cut what `module` holds and nobody has cut yet: one unit for each dtype."""
        kinds: dict[tuple[torch.device, torch.dtype], list] = {}
        for name, param in module.named_parameters():
            if not parameter_forms.is_partitioned(param) and param.device.type != "meta":
                kinds.setdefault((param.device, param.dtype), []).append((param, [name]))
        for (device, _), params in kinds.items():
            model = self._model_on(device)
            unit = model.add_unit(f"{type(module).__name__} {len(model.units)}", params)
            model.fill(unit, ((slot, slot.param.detach().contiguous()) for slot in unit.slots))

    def running(self) -> bool:
        """Whether a module's constructor runs."""
        return self._running > 0

    def born(self, unborn: Unborn, requires_grad: bool) -> nn.Parameter:
        """A parameter in tiles, whose memory as a whole was never made."""
        assert self.tile_count is not None
        count = self.tile_count(unborn.shape, unborn.dtype)
        return born(self._model_on(unborn.device), unborn, requires_grad, count)

    def _model_on(self, device: torch.device) -> PartitionedModel:
        if device not in self._models:
            # Gathered in the shard's own dtype: late initialisation must lose nothing.
            settings = Settings(None, self._settings.unit_size, self._settings.shard, None)
            model = PartitionedModel(None, self._ranks, settings, self._make_store(device), OnDemand(), device)
            model.scheduler.attach(model)
            self._models[device] = model
        return self._models[device]

    def finish(self) -> list[nn.Module]:
        """The outermost modules that are still alive, none inside another; nothing left gathered."""
        for model in self._models.values():
            model.border()
        alive = [module for ref in self.outermost if (module := ref()) is not None]
        inner = {child for module in alive for child in module.modules() if child is not module}
        return [module for module in alive if module not in inner and any(True for _ in module.parameters())]


_active: _Construction | None = None


@contextmanager
def constructing(
    ranks: Ranks,
    settings: Settings,
    make_store: Callable[[torch.device], ShardStore],
    made: Callable[[nn.Module], None],
    tile_count: TileCount | None = None,
) -> Iterator[None]:
    """Wrap the constructors; hand each finished outermost module to `made` when the block has ended well.

    A parameter for which `tile_count` says more than 1 is born in tiles: its memory as a whole is never made.
    """
    global _active
    if _active is not None:
        yield
        return
    construction = _active = _Construction(ranks, settings, make_store, tile_count)
    allocating = nullcontext() if tile_count is None else AllocatingTiles(tile_count, construction.running)
    try:
        with _wrapped_constructors(construction), allocating:
            yield
    finally:
        _active = None
    for module in construction.finish():
        made(module)


@contextmanager
def _wrapped_constructors(construction: _Construction) -> Iterator[None]:
    originals: dict[type, Any] = {}

    def wrap(cls: type) -> None:
        if "__init__" in cls.__dict__ and cls not in originals:
            originals[cls] = cls.__dict__["__init__"]
            cls.__init__ = _wrap(originals[cls], construction)  # type: ignore[misc]

    def later_subclass(cls, **kwargs) -> None:
        if own is not None:
            own.__func__(cls, **kwargs)
        else:
            super(nn.Module, cls).__init_subclass__(**kwargs)
        wrap(cls)

    def new_parameter(cls, data=None, requires_grad=True):
        """torch refuses to make a Parameter of one of ours, as parametrizations do in their constructors."""
        if type(data) is Unborn:
            return construction.born(data, requires_grad)
        if (tiles := tiles_of(data)) is not None:
            data = tiles.whole_tensor()
        return parameter_new(cls, data.detach() if parameter_forms.is_partitioned(data) else data, requires_grad)

    own = nn.Module.__dict__.get("__init_subclass__")
    parameter_new = nn.Parameter.__new__
    for cls in _all_subclasses(nn.Module):
        wrap(cls)
    nn.Module.__init_subclass__ = classmethod(later_subclass)  # type: ignore[assignment, method-assign]
    nn.Parameter.__new__ = staticmethod(new_parameter)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.__init__ = original  # type: ignore[misc]
        nn.Parameter.__new__ = parameter_new  # type: ignore[method-assign]
        if own is not None:
            nn.Module.__init_subclass__ = own  # type: ignore[method-assign]
        else:
            del nn.Module.__init_subclass__


def _wrap(original: Callable, construction: _Construction) -> Callable:
    @functools.wraps(original)
    def constructor(self, *args, **kwargs):
        construction.begins(self)
        failed = True
        try:
            original(self, *args, **kwargs)
            failed = False
        finally:
            construction.ends(self, failed)

    return constructor


def _all_subclasses(cls: type) -> set[type]:
    found: set[type] = set()
    waiting: list[type] = [cls]
    while waiting:
        child: type
        for child in waiting.pop().__subclasses__():
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def materialise_from_meta(
    module: nn.Module, ranks: Ranks, settings: Settings, store: ShardStore, device: torch.device
) -> None:
    """Give a model on the meta device its values, a module at a time, children first as a constructor would.

    Every module with own parameters must have `reset_parameters` (or `_init_weights`-like code must run later by
    the user); RuntimeError names those that have none.
    """
    construction = _Construction(ranks, settings, lambda _: store)
    for child in _children_first(module):
        tensors = [*child._parameters.values(), *child._buffers.values()]
        if not any(tensor is not None and tensor.device.type == "meta" for tensor in tensors):
            continue
        if not hasattr(child, "reset_parameters"):
            raise RuntimeError(
                f"{type(child).__name__} is on the meta device and has no reset_parameters(): nobody knows its initial "
                "values. Build it on a real device under zero3.init(), or load a state into it first."
            )
        child.to_empty(device=device, recurse=False)
        child.reset_parameters()  # type: ignore[operator]
        construction.partition_fresh(child)
    for model in construction._models.values():
        model.border()


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


__all__ = ["constructing", "default_device", "init", "materialise_from_meta"]
