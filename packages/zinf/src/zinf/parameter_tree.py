"""A pytree of arrays as nested modules whose names tell the path: {"dense": {"kernel": ...}} is `dense.kernel`.

So state_dict, parameter groups, partitioning and export work on a jax function's parameters as on any module's.
Loaded with zinf.jax only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import jax
from torch import Tensor, nn

from .jax_arrays import parameter_from

Entry = tuple[tuple, Any]  # the path that is left, as keys of jax.tree_util, and the leaf at its end


class Branch(nn.Module):
    """A node of the tree. It has no forward: units are held by the module that takes all leaves at once."""

    def __init__(self, entries: Sequence[Entry]):
        super().__init__()
        self._order: list[str] = []  # the tree's, in which parameters and branches are mixed
        for key, group in groupby(entries, key=lambda entry: entry[0][0]):
            name = self._free_name(key)
            self._order.append(name)
            attach(self, name, [(path[1:], leaf) for path, leaf in group])

    def _free_name(self, key: Any) -> str:
        """What torch accepts as a name: no dots, not empty, no attribute of a module."""
        text = next((str(getattr(key, kind)) for kind in ("key", "idx", "name") if hasattr(key, kind)), str(key))
        name = text.replace(".", "_") or "_"
        while hasattr(self, name):
            name += "_"
        return name


def attach(parent: nn.Module, name: str, entries: Sequence[Entry]) -> None:
    """Register what `entries` hold under one name: a parameter, a buffer (integers, booleans), or a branch."""
    if len(entries) != 1 or entries[0][0]:
        parent.add_module(name, Branch(entries))
        return
    tensor = parameter_from(entries[0][1], name)
    if isinstance(tensor, nn.Parameter):
        parent.register_parameter(name, tensor)
    else:
        parent.register_buffer(name, tensor)


def entries_of(tree: Any) -> tuple[list[Entry], Any]:
    """(entries, structure) of a pytree."""
    return jax.tree_util.tree_flatten_with_path(tree)


def leaves_of(parent: nn.Module, name: str) -> Iterator[Tensor]:
    """The tensors under `name` that the module has now, in the tree's order: one put in another's place counts."""
    child = getattr(parent, name)
    if isinstance(child, Branch):
        for inner in child._order:
            yield from leaves_of(child, inner)
    else:
        yield child


def names_of(parent: nn.Module, name: str) -> Iterator[str]:
    """Their names in `parent`, in the same order."""
    child = getattr(parent, name)
    if isinstance(child, Branch):
        for inner in child._order:
            yield from (f"{name}.{rest}" for rest in names_of(child, inner))
    else:
        yield name
