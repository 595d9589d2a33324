"""The states of one parameter as whole float32 tensors, for looking and for setting; whichever tier they lie on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero3 import parameter_forms
from zero3.tiles import tiles_of
from zero3.unit import ParamSlot

from .offload_engine import OffloadEngine, pieces
from .unit_states import MOMENTS


def full_grad(param: Tensor) -> Tensor | None:
    """The parameter's reduced gradient, whole, float32, on the CPU; None when it has none. Collective.

    Clipping that was asked for but not yet applied is included.
    """
    if (tiles := tiles_of(param)) is not None:
        grads = [full_grad(tile) for tile in tiles.params]
        return None if any(grad is None for grad in grads) else torch.cat(grads)  # type: ignore[arg-type]
    slot, engine = _slot(param)
    model = slot.unit.model
    model.border()
    if not slot.has_grad:
        engine.check_gradient(slot.unit)
        return None
    gradient = engine.read_gradient(slot.unit)
    factor = engine.optimizer.pending_factor if engine.optimizer is not None else 1.0
    return _whole(slot, gradient.float()).mul_(factor)


def full_state(param: Tensor) -> dict[str, Any]:
    """{"param", "exp_avg", "exp_avg_sq"}: whole float32 tensors on the CPU; "step": updates so far. Collective.

    Before an optimizer is made, moments are zeros.
    """
    if (tiles := tiles_of(param)) is not None:
        states = [full_state(tile) for tile in tiles.params]
        rows = {kind: torch.cat([state[kind] for state in states]) for kind in ("param", *MOMENTS)}
        return {**rows, "step": states[0]["step"]}
    slot, engine = _slot(param)
    _settle(slot, engine)
    state: dict[str, Any] = {"param": _whole(slot, engine.master(slot.unit).float())}
    counters = _counters(slot, engine)
    numel = slot.unit.shard_numel
    for kind in MOMENTS:
        shard = torch.zeros(numel) if counters is None else engine.read(slot.unit, kind, torch.float32, 0, numel)
        state[kind] = _whole(slot, shard)
    state["step"] = 0 if counters is None else counters["step"]
    return state


def set_full_state(parameter: Tensor, state: Mapping[str, Any] | None = None, /, **changes: Any) -> None:
    """Replace some or all of what `full_state` gives. Collective.

    set_full_state(p, full_state(p)), or set_full_state(p, exp_avg=..., step=...): any of "param", "exp_avg",
    "exp_avg_sq" (whole tensors; every rank gives the same and keeps its part) and "step".

    TypeError for an unknown name and for what is no tensor; ValueError for a shape that is not the parameter's and for
    a negative step; RuntimeError for moments without a zinf.AdamW. Nothing is changed then.
    """
    given = {name: value for name, value in {**(state or {}), **changes}.items() if value is not None}
    if (tiles := tiles_of(parameter)) is not None:
        _check(tiles.name, tiles.shape, given)
        for start, stop, tile in tiles:
            set_full_state(tile, {name: v if name == "step" else v[start:stop] for name, v in given.items()})
        return
    slot, engine = _slot(parameter)
    _check(slot.name, slot.shape, given)
    _settle(slot, engine)
    counters = _counters(slot, engine)
    if counters is None and given.keys() - {"param"}:
        raise RuntimeError(f"{slot.name} has no optimizer states: make a zinf.AdamW with it first")
    unit = slot.unit
    if "param" in given:
        engine.write_back(unit, _own_part(slot, given["param"]), slot.start, slot.stop)
    for kind in MOMENTS:
        if kind in given:
            _replace(engine, slot, kind, _own_part(slot, given[kind]))
    if counters is not None and "step" in given:
        counters["step"] = int(given["step"])
    unit.model.values_changed(unit)


def _check(parameter: str, shape: torch.Size, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in ("param", *MOMENTS, "step"):
            raise TypeError(f"{name!r} is no state of a parameter: it has 'param', 'exp_avg', 'exp_avg_sq' and 'step'")
        if name == "step":
            if int(value) < 0:
                raise ValueError(f"step={value} of {parameter} is no number of updates")
        elif not isinstance(value, Tensor):
            raise TypeError(f"{name} of {parameter} is a {type(value).__name__}, a tensor is needed")
        elif tuple(value.shape) != tuple(shape):
            raise ValueError(f"{name} of {parameter}: shape {tuple(value.shape)}, expected {tuple(shape)}")


def _counters(slot: ParamSlot, engine: OffloadEngine) -> dict[str, Any] | None:
    """What the optimizer counts of a parameter; None when it has no moments."""
    if engine.optimizer is None or not engine.has_moments(slot.unit):
        return None
    return engine.optimizer.state.get(slot.owner)


def _slot(param: Tensor) -> tuple[ParamSlot, OffloadEngine]:
    slot = parameter_forms.slot_of(param)
    engine = slot.unit.model.store
    if not isinstance(engine, OffloadEngine):
        raise TypeError(f"{slot.name} is not a parameter of a zinf model")
    return slot, engine


def _settle(slot: ParamSlot, engine: OffloadEngine) -> None:
    slot.unit.model.border()
    if engine.optimizer is not None:
        engine.optimizer.settle()


def _whole(slot: ParamSlot, shard: Tensor) -> Tensor:
    """The whole parameter's worth of a shard-wise float32 state: own part filled in, the others' summed on top."""
    model = slot.unit.model
    whole = torch.zeros(slot.numel)
    first = _first(slot)
    whole[first : first + slot.stop - slot.start] = shard[slot.start : slot.stop].cpu()
    if model.shard_ranks > 1:
        model.ranks.sum(whole, f"collecting the state of {slot.name}")
    return whole.view(slot.shape)


def _own_part(slot: ParamSlot, whole: Tensor) -> Tensor:
    first = _first(slot)
    return whole.detach().reshape(-1)[first : first + slot.stop - slot.start].to("cpu", torch.float32)


def _first(slot: ParamSlot) -> int:
    """Where this rank's part begins in the parameter."""
    if slot.stop <= slot.start:
        return 0
    return slot.unit.rank * slot.unit.shard_numel + slot.start - slot.offset


def _replace(engine: OffloadEngine, slot: ParamSlot, kind: str, part: Tensor) -> None:
    unit = slot.unit
    for start, stop in pieces(unit.shard_numel):
        low, high = max(slot.start, start), min(slot.stop, stop)
        if low < high:
            values = engine.read(unit, kind, torch.float32, start, stop)
            values[low - start : high - start] = part[low - slot.start : high - slot.start]
            engine.write(unit, kind, values, start)
