"""What a person adds to a checkpoint: JSON values and tensors. No pickle: nothing is executed when it is read.

A dict may have whole numbers as keys too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import CheckpointError
from .safetensors_file import refuse_unwritable

_TENSOR_MARK = "__tensor__"
_ITEMS_MARK = "__items__"  # of a dict with whole numbers as keys, which JSON has not (milestones of a schedule)
_MOST_LEVELS = 200  # of lists and dicts in one another: JSON is read and written by recursion


def take_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with each tensor replaced by a mark; the tensors go into `tensors`. TypeError for what cannot be kept."""
    return _take(value, path, tensors, _MOST_LEVELS)


def _take(value: Any, path: str, tensors: dict[str, Tensor], levels: int) -> Any:
    if not levels:
        raise TypeError(f"{path[:80]}... is nested deeper than {_MOST_LEVELS} levels, or in itself")
    if isinstance(value, Tensor):
        refuse_unwritable(path, value)
        name = f"extra.{len(tensors)}"
        tensors[name] = value
        return {_TENSOR_MARK: name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"{path}: key {key!r} is neither a string nor a whole number")
            if key in (_TENSOR_MARK, _ITEMS_MARK):
                raise TypeError(f"{path}: key {key!r} has a meaning of its own in a checkpoint, choose another")
        kept = [[key, _take(item, f"{path}.{key}", tensors, levels - 1)] for key, item in value.items()]
        return dict(kept) if all(isinstance(key, str) for key in value) else {_ITEMS_MARK: kept}
    if isinstance(value, list | tuple):
        return [_take(item, f"{path}.{index}", tensors, levels - 1) for index, item in enumerate(value)]
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
