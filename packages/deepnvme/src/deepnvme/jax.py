"""Pytrees of jax arrays in and out of a Swap. Loaded on first access of `deepnvme.jax`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .aligned_buffer import Buffer
from .errors import ClosedError
from .swap import Swap

# A tree's structure is no array and stays in memory, as long as the Swap lives.
_structures: weakref.WeakKeyDictionary[Swap, dict[str, Any]] = weakref.WeakKeyDictionary()


def swap_out(swap: Swap, name: str, pytree: Any) -> None:
    """Stores the leaves of a pytree as "NAME/0", "NAME/1", ... and returns when they are stored.

    Leaves that are no arrays are made jax arrays. OSError: as Swap.put; then nothing is stored under the name, neither
    this tree nor the one before, of which leaves were overwritten.
    """
    leaves, structure = jax.tree_util.tree_flatten(pytree)
    # Arrays of an accelerator are brought to the host here; those of the CPU are only viewed.
    hosts = [np.asarray(jnp.asarray(leaf)) for leaf in leaves]
    known = _structures.setdefault(swap, {})
    before = known.pop(name).num_leaves if name in known else 0
    try:
        _pop_leaves(swap, name, range(len(leaves), before))
        requests = [swap.put(_leaf_name(name, i), host) for i, host in enumerate(hosts)]
        for request in requests:
            request.wait()
    except BaseException:
        _pop_leaves(swap, name, range(max(len(leaves), before)))
        raise
    known[name] = structure


def swap_in(swap: Swap, name: str) -> Any:
    """The pytree stored under `name`, of jax arrays. KeyError: none was; ChecksumError: a leaf is damaged."""
    structure = _structures.get(swap, {}).get(name)
    if structure is None:
        raise KeyError(name)
    requests = [swap.get(_leaf_name(name, i)) for i in range(structure.num_leaves)]
    return jax.tree_util.tree_unflatten(structure, [_to_jax(request.result()) for request in requests])


def _pop_leaves(swap: Swap, name: str, numbers: Iterable[int]) -> None:
    for i in numbers:
        with contextlib.suppress(KeyError, ClosedError):
            swap.pop(_leaf_name(name, i))


def _leaf_name(name: str, i: int) -> str:
    return f"{name}/{i}"


def _to_jax(buffer: Buffer) -> jax.Array:
    # The array takes over the Buffer's memory where this version of jax can, and otherwise copies it.
    view = buffer.numpy().view(jnp.dtype(buffer.dtype))
    try:
        return jnp.from_dlpack(buffer) if buffer.nbytes and buffer.shape else jnp.asarray(view)
    except (TypeError, ValueError, RuntimeError, BufferError):
        return jnp.asarray(view)
