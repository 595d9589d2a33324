"""Full tensors out of a partitioned model and into it, one at a time: state_dict and load_state_dict.

Names, shapes and dtypes are the plain model's. Whoever loads reads only what this rank keeps: a safetensors file
is opened lazily and of each tensor only the own part is sliced, where its layout allows.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from . import collectives, parameter_forms
from .own_hook import OwnHook
from .tiles import tiles_of
from .unit import ParamSlot, Unit
from .unit_state import ParamState

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel


_EXTRA_STATE = "_extra_state"  # the name that torch gives it


@contextmanager
def gathered_master(unit: Unit) -> Iterator[Tensor]:
    """The unit's full flat buffer in the master dtype (padded_numel,), valid inside. Collective."""
    model = unit.model
    if unit.plain:
        yield _flat_of(unit)
        return
    shard = model.store.master(unit)
    if model.shard_ranks == 1:
        yield shard
        return
    buffer = model.pool.take(unit.padded_numel * unit.master_dtype.itemsize, unit.name)
    flat = buffer.flat(unit.padded_numel, unit.master_dtype)
    unit.own_slice(flat).copy_(shard)
    collectives.all_gather(
        model.ranks, flat, unit.own_slice(flat), unit.index, f"collecting the values of unit {unit.name}"
    )()
    try:
        yield flat
    finally:
        del flat
        model.pool.give_back(buffer)


def _flat_of(unit: Unit) -> Tensor:
    """Of a plain unit the parameters themselves count: the user may have given them other memory."""
    flat = torch.zeros(unit.padded_numel, dtype=unit.slots[0].param.dtype, device=unit.device)
    for slot in unit.slots:
        slot.view_of(flat).copy_(slot.param.detach())
    return flat


def full_tensor(slot: ParamSlot) -> Tensor:
    """The whole parameter on the CPU, in its own dtype; a copy. Collective."""
    if slot.unit.plain:
        return slot.param.detach().to("cpu", copy=True)
    model = slot.unit.model
    model.border()
    _bring_back(slot.unit)
    with gathered_master(slot.unit) as flat:
        return slot.view_of(flat).to("cpu", copy=True)


def full_parameter(param: Any) -> Tensor:
    """`full_tensor` of a partitioned parameter. Of one in tiles a tile at a time is gathered. Collective."""
    tiles = tiles_of(param)
    if tiles is None:
        return full_tensor(parameter_forms.slot_of(param))
    tiles.keep_changes()
    whole = torch.empty(tiles.shape, dtype=tiles.slots[0].unit.master_dtype)
    for (start, stop, _), slot in zip(tiles, tiles.slots, strict=True):
        whole[start:stop] = full_tensor(slot)
    return whole


def _bring_back(unit: Unit) -> None:
    """Values written into a gathered unit must reach its shard before the shard is read."""
    if unit.state is ParamState.READY:
        unit.model.collect_changes(unit)


class FullState(Mapping):
    """Lazy, ordered mapping name -> full tensor of a partitioned model. Every look-up is collective.

    Under a module's `_extra_state` is what its `get_extra_state` gives, as in torch.
    """

    def __init__(self, module: nn.Module):
        self._entries: dict[str, Any] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            self._entries[name] = param
        persistent = set(persistent_buffers(module))
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if name in persistent:
                self._entries[name] = buffer
        self._entries.update(extra_states(module))
        order = {name: position for position, name in enumerate(_plain_order(module))}
        self._names = sorted(self._entries, key=lambda name: order.get(name, len(order)))

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        if isinstance(entry, nn.Module):
            return entry.get_extra_state()
        if parameter_forms.is_partitioned(entry):
            return full_parameter(entry)
        return entry.detach().to("cpu", copy=True)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # Mapping's own would gather the tensor, on the ranks that ask

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def state_dict(model: nn.Module) -> Mapping[str, Any]:
    """Names and full tensors of the plain model, gathered one at a time as they are looked up. Collective."""
    return FullState(model)


def load_state_dict(model: nn.Module, state: Mapping[str, Any] | str | os.PathLike, strict: bool = True):
    """Load full tensors, streamed: from a mapping, or from a safetensors file, which holds no module's extra state.

    Each rank keeps its own part. `strict`: names must agree exactly, else RuntimeError with the lists. A shape
    that differs is always a RuntimeError, and nothing is loaded then. Returns (missing_keys, unexpected_keys).
    """
    if isinstance(state, str | os.PathLike):
        from safetensors import safe_open

        with safe_open(os.fspath(state), framework="pt") as file:
            return load_from(model, SafetensorsFile(file), strict)
    modules = extra_states(model)
    result = load_from(model, _InMemory(state), strict, modules)
    for name in modules.keys() & state.keys():
        modules[name].set_extra_state(state[name])
    return result


class _InMemory:
    def __init__(self, mapping: Mapping[str, Any]):
        self._mapping = mapping
        self.names = list(mapping)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._mapping[name].shape)

    def flat_part(self, name: str, start: int, stop: int) -> Tensor:
        return self._mapping[name].detach().reshape(-1)[start:stop]


class SafetensorsFile:
    """Full tensors of an opened safetensors file."""

    def __init__(self, file):
        self._file = file
        self.names = list(file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def flat_part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order; only the rows that hold them are read."""
        shape = self.shape(name)
        if not shape or start >= stop:
            return self._file.get_tensor(name).reshape(-1)[start:stop]
        row = 1
        for extent in shape[1:]:
            row *= extent
        first, last = start // row, -(-stop // row)
        rows = self._file.get_slice(name)[first:last]
        return rows.reshape(-1)[start - first * row : stop - first * row]


class Source(Protocol):
    """Full tensors to load from, by name."""

    names: list[str]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""

    def flat_part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order."""


def load_from(model: nn.Module, source: Source, strict: bool, beside: Iterable[str] = ()):
    """Load what this rank keeps of every tensor of `source`. Errors and result as `load_state_dict`."""
    entries, result = compare(model, source, strict, beside)
    load_entries(entries, source)
    return result


def compare(
    model: nn.Module, source: Source, strict: bool, beside: Iterable[str] = ()
) -> tuple[dict[str, Tensor], Any]:
    """The model's parameters and buffers that `source` has, by name, and (missing_keys, unexpected_keys).

    `beside`: what else the model has, of which only the name counts. RuntimeError as `load_state_dict`.
    """
    entries: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    persistent = set(persistent_buffers(model))
    entries.update((n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in persistent)
    wanted = dict.fromkeys([*entries, *beside])
    available = set(source.names)
    missing = [name for name in wanted if name not in available]
    unexpected = [name for name in source.names if name not in wanted]
    faults = []
    if strict and missing:
        faults.append(f"missing: {', '.join(missing)}")
    if strict and unexpected:
        faults.append(f"unexpected: {', '.join(unexpected)}")
    for name, entry in entries.items():
        if name in available and source.shape(name) != tuple(entry.shape):
            faults.append(f"{name}: {source.shape(name)} in the state, {tuple(entry.shape)} in the model")
    if faults:
        raise RuntimeError(f"cannot load the state into {type(model).__name__}: " + "; ".join(faults))
    present = {name: entry for name, entry in entries.items() if name in available}
    return present, nn.modules.module._IncompatibleKeys(missing, unexpected)


def load_entries(entries: Mapping[str, Tensor], source: Source) -> None:
    """Load parameters and buffers, which `source` has under these names."""
    for name, entry in entries.items():
        if parameter_forms.is_partitioned(entry):
            for slot in parameter_forms.slots_of(entry):
                _load_slot(slot, source, name)
        else:
            with torch.no_grad():
                entry.copy_(source.flat_part(name, 0, entry.numel()).view(entry.shape))


def _load_slot(slot: ParamSlot, source: Source, name: str) -> None:
    if slot.unit.plain:
        with torch.no_grad():
            slot.param.copy_(source.flat_part(name, 0, slot.numel).view(slot.shape))
        return
    slot.unit.model.border()
    first = slot.first
    slot.unit.model.assign(slot, lambda start, stop: source.flat_part(name, first + start, first + stop))


def persistent_buffers(module: nn.Module) -> Iterator[str]:
    """Names of the buffers that belong into a state_dict."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name in child._buffers:
            if child._buffers[name] is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name


def extra_states(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that have a state of their own making, by the name that it has in a state_dict."""
    return {
        f"{prefix}.{_EXTRA_STATE}" if prefix else _EXTRA_STATE: child
        for prefix, child in module.named_modules(remove_duplicate=False)
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }


def _plain_order(module: nn.Module) -> Iterator[str]:
    """Names in the order in which nn.Module.state_dict lists them: own parameters, own buffers, own extra state,
    children."""

    def walk(node: nn.Module, prefix: str) -> Iterator[str]:
        yield from (prefix + name for name in node._parameters)
        yield from (prefix + name for name in node._buffers)
        yield prefix + _EXTRA_STATE
        for name, child in node._modules.items():
            if child is not None:
                yield from walk(child, f"{prefix}{name}.")

    return walk(module, "")


# -- model.state_dict() ---------------------------------------------------------------------------------------


class _PlainStateDict:
    """Makes `module.state_dict()` of every module in the tree give full CPU tensors.

    torch asks each parameter for `detach()`; for a released one that would gather and hand out the pool's memory.
    So the placeholders that it stored are replaced, module by module.
    """

    def __init__(self) -> None:
        self._keep_vars = False
        self._state: Any = lambda: None  # weak reference to the dict that is being filled
        self._full: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # in it, by parameter's id

    def before(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        parameter_forms.Released.detach_gathers = False
        self._keep_vars = keep_vars

    def after(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        parameter_forms.Released.detach_gathers = True
        if self._keep_vars:
            return
        if self._state() is not state:
            self._full = weakref.WeakValueDictionary()
            # A plain dict, given as `destination`, takes no reference: a tied parameter is then one tensor a module.
            self._state = weakref.ref(state) if isinstance(state, OrderedDict) else lambda: None
        for name, param in module._parameters.items():
            slots = parameter_forms.slots_of(param)
            if param is not None and prefix + name in state and slots and not slots[0].unit.plain:
                state[prefix + name] = self._full_tensor(param)

    def _full_tensor(self, param: Tensor) -> Tensor:
        """One tensor for all names of a tied parameter, as torch gives."""
        full = self._full.get(id(param))
        if full is None:
            full = self._full[id(param)] = full_parameter(param)
        return full


def install(model: PartitionedModel, module: nn.Module) -> None:
    """Make `state_dict()` of `module`, and of every module in it, give full tensors."""
    hook = _PlainStateDict()
    for child in module.modules():
        model.handles.append(child.register_state_dict_pre_hook(OwnHook(hook.before)))
        model.handles.append(child._register_state_dict_hook(OwnHook(hook.after)))
