"""What a person adds to a checkpoint: JSON values and tensors. No pickle: nothing is executed when it is read."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import CheckpointError

_TENSOR_MARK = "__tensor__"


def take_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with each tensor replaced by a mark; the tensors go into `tensors`. TypeError for what is no JSON."""
    if isinstance(value, Tensor):
        name = f"extra.{len(tensors)}"
        tensors[name] = value
        return {_TENSOR_MARK: name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{path}: key {key!r} is no string, a checkpoint keeps JSON values and tensors")
            if key == _TENSOR_MARK:
                raise TypeError(f"{path}: key {key!r} means a tensor in a checkpoint, choose another")
        return {key: take_tensors(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [take_tensors(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{path}: {type(value).__name__} cannot be kept, only JSON values and tensors")


def give_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR_MARK in value:
            name = value[_TENSOR_MARK]
            if not isinstance(name, str) or name not in tensors:
                raise CheckpointError(f"the manifest is damaged: `extra` names a tensor {name!r} that is not there")
            return tensors[name]
        return {key: give_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [give_tensors(item, tensors) for item in value]
    return value
