"""What a person adds to a checkpoint: JSON values and tensors. No pickle: nothing is executed when it is read.

A dict may have whole numbers as keys too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import CheckpointError

_TENSOR_MARK = "__tensor__"
_ITEMS_MARK = "__items__"  # of a dict with whole numbers as keys, which JSON has not (milestones of a schedule)


def take_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with each tensor replaced by a mark; the tensors go into `tensors`. TypeError for what is no JSON."""
    if isinstance(value, Tensor):
        name = f"extra.{len(tensors)}"
        tensors[name] = value
        return {_TENSOR_MARK: name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"{path}: key {key!r} is neither a string nor a whole number")
            if key in (_TENSOR_MARK, _ITEMS_MARK):
                raise TypeError(f"{path}: key {key!r} has a meaning of its own in a checkpoint, choose another")
        kept = [[key, take_tensors(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        return dict(kept) if all(isinstance(key, str) for key in value) else {_ITEMS_MARK: kept}
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
        if _ITEMS_MARK in value:
            return {key: give_tensors(item, tensors) for key, item in _pairs(value[_ITEMS_MARK])}
        return {key: give_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [give_tensors(item, tensors) for item in value]
    return value


def _pairs(items: Any) -> list[list[Any]]:
    pairs = isinstance(items, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in items)
    if not pairs or not all(isinstance(key, str | int) for key, _ in items):
        raise CheckpointError("the manifest is damaged: keys of a dict in `extra` are not what they were")
    return items
