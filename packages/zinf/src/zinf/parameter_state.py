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

    A complex or float64 one is in its own dtype. Clipping that was asked for but not yet applied is included.
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
    return _whole(slot, _for_looking(gradient)).mul_(factor)


def full_state(param: Tensor) -> dict[str, Any]:
    """{"param", "exp_avg", "exp_avg_sq"}: whole float32 tensors on the CPU; "step": updates so far. Collective.

    Before an optimizer is made, moments are zeros. A parameter that float32 cannot hold (complex, float64, whole
    numbers) is in its own dtype.
    """
    if (tiles := tiles_of(param)) is not None:
        states = [full_state(tile) for tile in tiles.params]
        rows = {kind: torch.cat([state[kind] for state in states]) for kind in ("param", *MOMENTS)}
        return {**rows, "step": states[0]["step"]}
    slot, engine = _slot(param)
    _settle(slot, engine)
    state: dict[str, Any] = {"param": _whole(slot, _for_looking(engine.master(slot.unit)))}
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

    TypeError for an unknown name, for what is no tensor or has no values, and for complex ones of what is not;
    ValueError for a shape that is not the parameter's, and for what is no number of updates; RuntimeError for moments
    without a zinf.AdamW. Nothing is changed then.
    """
    given = {name: value for name, value in {**(state or {}), **changes}.items() if value is not None}
    if (tiles := tiles_of(parameter)) is not None:
        _check(tiles.name, tiles.shape, tiles.slots[0].unit.master_dtype, given)
        for start, stop, tile in tiles:
            set_full_state(tile, {name: v if name == "step" else v[start:stop] for name, v in given.items()})
        return
    slot, engine = _slot(parameter)
    _check(slot.name, slot.shape, slot.unit.master_dtype, given)
    _settle(slot, engine)
    counters = _counters(slot, engine)
    if counters is None and given.keys() - {"param"}:
        raise RuntimeError(f"{slot.name} has no optimizer states: make a zinf.AdamW with it first")
    unit = slot.unit
    if "param" in given:
        engine.write_back(unit, _own_part(slot, given["param"], unit.master_dtype), slot.start, slot.stop)
    for kind in MOMENTS:
        if kind in given:
            _replace(engine, slot, kind, _own_part(slot, given[kind], torch.float32))
    if counters is not None and "step" in given:
        counters["step"] = int(given["step"])
    unit.model.values_changed(unit)


def _check(parameter: str, shape: torch.Size, dtype: torch.dtype, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in ("param", *MOMENTS, "step"):
            raise TypeError(f"{name!r} is no state of a parameter: it has 'param', 'exp_avg', 'exp_avg_sq' and 'step'")
        if name == "step":
            if not _is_count(value):
                raise ValueError(f"step={value!r} of {parameter} is no number of updates")
        elif not isinstance(value, Tensor):
            raise TypeError(f"{name} of {parameter} is a {type(value).__name__}, a tensor is needed")
        elif tuple(value.shape) != tuple(shape):
            raise ValueError(f"{name} of {parameter}: shape {tuple(value.shape)}, expected {tuple(shape)}")
        elif value.is_meta:
            raise TypeError(f"{name} of {parameter} is on the meta device, where tensors have no values")
        elif value.is_complex() and not (name == "param" and dtype.is_complex):
            raise TypeError(f"{name} of {parameter} is {value.dtype}, and its imaginary part would be lost")


def _is_count(value: Any) -> bool:
    """A whole number of at least 0; torch's optimizers count in tensors of floats."""
    try:
        return not isinstance(value, bool | str) and int(value) == float(value) >= 0
    except (TypeError, ValueError, OverflowError):
        return False


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
    """The whole parameter's worth of a shard-wise state: own part filled in, the others' summed on top."""
    model = slot.unit.model
    whole = torch.zeros(slot.numel, dtype=shard.dtype)
    first = _first(slot)
    whole[first : first + slot.stop - slot.start] = shard[slot.start : slot.stop].cpu()
    if model.shard_ranks > 1:
        # As bytes: where one rank has values the others have zeros, and not every dtype can be summed.
        model.ranks.sum(whole.view(torch.uint8), f"collecting the state of {slot.name}")
    return whole.view(slot.shape)


def _for_looking(values: Tensor) -> Tensor:
    """In float32, if that holds them."""
    return values.float() if values.is_floating_point() and values.element_size() <= 4 else values


def _own_part(slot: ParamSlot, whole: Tensor, dtype: torch.dtype) -> Tensor:
    first = _first(slot)
    return whole.detach().reshape(-1)[first : first + slot.stop - slot.start].to("cpu", dtype)


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
