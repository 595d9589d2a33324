"""Buffers of a block that backward runs again: the second run finds what the first found, and changes nothing.

torch.utils.checkpoint leaves them to the user, so batch norm would count every batch twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_Place = tuple[dict[str, Tensor | None], str, Tensor | None]
"""A buffer: the dict that holds it, its name in there, its value."""

# Bytes up to which a buffer's copy is kept until backward, changed or not: a channel's statistics are that small.
_SMALL = 64 << 10


class Replayable:
    """A call of `fn`, which runs in `module`, that can be repeated as it was the first time."""

    def __init__(self, module: nn.Module, fn: Callable):
        self._module, self._fn = module, fn
        self._found: list[_Place] | None = None  # what fn may have changed since

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._first if self._found is None else self._again)(*args, **kwargs)

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        copies = _Copies()
        before = [
            (buffers, name, buffer, None if buffer is None else buffer._version, copies.of(buffer))
            for buffers, name, buffer in _buffers(self._module)
        ]
        result = self._fn(*args, **kwargs)
        self._found = [
            (buffers, name, copy)
            for buffers, name, buffer, version, copy in before
            if buffers.get(name) is not buffer or (buffer is not None and _may_differ(buffer, version))
        ]
        return result

    def _again(self, *args: Any, **kwargs: Any) -> Any:
        assert self._found is not None
        present = [(buffers, name, buffers.get(name)) for buffers, name, _ in self._found]
        copies = _Copies()  # a graph that is kept may ask once more
        for buffers, name, found in self._found:
            buffers[name] = copies.of(found)
        try:
            return self._fn(*args, **kwargs)
        finally:
            for buffers, name, buffer in present:
                buffers[name] = buffer


class _Copies:
    """One copy of each tensor: what was shared stays shared."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}

    def of(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor.detach().clone()
        return self._copies[id(tensor)]


def _may_differ(buffer: Tensor, version: int | None) -> bool:
    """Whether `buffer` may have been changed since it had `version`; its values are not looked at.

    torch's batch norm changes its running statistics and leaves their version as it was.
    """
    return buffer._version != version or buffer.nbytes <= _SMALL


def _buffers(module: nn.Module) -> Iterator[_Place]:
    """All buffers that training can change."""
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is None or not torch.is_inference(buffer):
                yield child._buffers, name, buffer
