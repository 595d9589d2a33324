"""A call of a jax function from torch: compiled programs, and the node of torch's graph. Loaded with zinf.jax only.

Three rules about memory:

- jax reads the parameters where they lie, in a unit's reused buffer. So a call returns only when jax has finished,
  and what it returns is on none of that memory: every output is a `jnp.copy`, which costs nothing unless the function
  returns an argument, or the same array twice, where jax could hand out one memory under two names.
- What waits for backward are torch's tensors, saved through autograd's own door: a parameter of a partitioned model
  is kept as a place in its unit, and offloaded activations go to their tier.
- No jax array outlives the call, or the pool could not reuse the buffer under it.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from zero3 import UnsupportedError

from .jax_arrays import is_differentiable, other_to_jax, to_jax, to_torch

_ARRAYS_AND_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float, complex)


class _Traced(enum.Enum):
    TENSOR = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True)
class _Static:
    """A leaf that is compiled in. Its type counts: True and 1 are equal."""

    kind: type
    value: Any


@dataclass(frozen=True)
class Call:
    """What one compiled program is for.

    params     structure of the parameters' pytree
    arguments  structure of (args, kwargs), whose leaves are `leaves`
    static     keyword arguments that are static as a whole
    """

    params: Any
    arguments: Any
    leaves: tuple[_Traced | _Static, ...]
    static: tuple[tuple[str, Any], ...]

    def __call__(self, function: Callable, tensors: Iterable[Any], others: Iterable[Any]) -> Any:
        """Of the values of all tensors, parameters first, and of the other traced leaves."""
        tensors, others = iter(tensors), iter(others)
        params = jax.tree_util.tree_unflatten(self.params, list(islice(tensors, self.params.num_leaves)))
        traced = {_Traced.TENSOR: tensors, _Traced.OTHER: others}
        leaves = [leaf.value if isinstance(leaf, _Static) else next(traced[leaf]) for leaf in self.leaves]
        args, kwargs = jax.tree_util.tree_unflatten(self.arguments, leaves)
        return function(params, *args, **kwargs, **dict(self.static))


_by_function: weakref.WeakValueDictionary[Callable, Compiled] = weakref.WeakValueDictionary()


class Compiled:
    """The programs of one function, shared by all modules that have it, and gone with the last of them."""

    @classmethod
    def of(cls, function: Callable) -> Compiled:
        try:
            hash(function)
        except TypeError:
            return cls(functools.partial(function))
        found = _by_function.get(function)
        if found is None:
            found = _by_function[function] = cls(function)
        return found

    def __init__(self, function: Callable):
        self.function = function
        self.forward = jax.jit(functools.partial(_forward, function), static_argnums=0)
        self.forward_keeping = jax.jit(functools.partial(_forward_keeping, function), static_argnums=(0, 1))
        self.backward_again = jax.jit(functools.partial(_backward_again, function), static_argnums=(0, 1))
        self.backward_kept = jax.jit(functools.partial(_pulled_back))

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        return self

    def __reduce__(self) -> tuple:
        return Compiled.of, (self.function,)


# -- what is compiled; the first arguments are static --------------------------------------------------------------


def _forward(function: Callable, call: Call, tensors: list, others: list) -> Any:
    return jax.tree.map(jnp.copy, call(function, tensors, others))


def _backward_again(
    function: Callable, call: Call, wanted: tuple[bool, ...], tensors: list, others: list, grads: list
) -> list:
    """Gradients of the wanted tensors, from the arguments: the forward is part of this program."""
    _, pull_back = _vjp(function, call, wanted, tensors, others)
    return _pulled_back(pull_back, grads)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class _Kept:
    """How the pull-back is made again: its structure, and of each leaf the argument that it is, or None."""

    structure: Any
    sources: tuple[int | None, ...]

    def tree_flatten(self) -> tuple[tuple, _Kept]:
        return (), self

    @classmethod
    def tree_unflatten(cls, kept: _Kept, _: tuple) -> _Kept:
        return kept


def _forward_keeping(
    function: Callable, call: Call, wanted: tuple[bool, ...], tensors: list, others: list
) -> tuple[Any, list, _Kept]:
    """(outputs, what the pull-back needs beside the tensors, how it is made of both)."""
    outputs, pull_back = _vjp(function, call, wanted, tensors, others)
    leaves, structure = jax.tree_util.tree_flatten(pull_back)
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    sources = tuple(places.get(id(leaf)) for leaf in leaves)
    rest = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
    return jax.tree.map(jnp.copy, outputs), rest, _Kept(structure, sources)


def _vjp(function: Callable, call: Call, wanted: tuple[bool, ...], tensors: list, others: list) -> tuple[Any, Any]:
    """(outputs, pull-back of those that have gradients to the wanted tensors)."""

    def of_wanted(*chosen: Any) -> tuple[list, Any]:
        left = iter(chosen)
        outputs = call(function, [next(left) if one else t for one, t in zip(wanted, tensors, strict=True)], others)
        return [leaf for leaf in jax.tree.leaves(outputs) if is_differentiable(leaf)], outputs

    _, pull_back, outputs = jax.vjp(of_wanted, *compress(tensors, wanted), has_aux=True)
    return outputs, pull_back


def _pulled_back(pull_back: Any, grads: list) -> list:
    """A complex gradient is the conjugate in torch of what it is in jax."""
    return [jnp.copy(jnp.conj(grad)) for grad in pull_back([jnp.conj(grad) for grad in grads])]


# -- torch's side --------------------------------------------------------------------------------------------------


class _Node(torch.autograd.Function):
    """What both ways to a gradient share: `_Again` computes the function a second time, `_Keeping` does not.

    `apply(compiled, call, others, *tensors)` returns the structure of the outputs, and their leaves.
    """

    @staticmethod
    def results(ctx: Any, outputs: Any) -> tuple:
        leaves, structure = jax.tree_util.tree_flatten(outputs)
        ctx.differentiable = [is_differentiable(leaf) for leaf in leaves]
        results = [to_torch(leaf) for leaf in leaves]
        fixed = [result for result, one in zip(results, ctx.differentiable, strict=True) if not one]
        ctx.mark_non_differentiable(*(result for result in fixed if isinstance(result, Tensor)))
        return structure, *results

    @staticmethod
    def cotangents(ctx: Any, grads: Sequence[Any]) -> list[jax.Array]:
        if torch.is_grad_enabled():
            raise UnsupportedError("double backward (create_graph=True) through a JaxModule is not supported")
        return [to_jax(grad) for grad in compress(grads, ctx.differentiable)]

    @staticmethod
    def gradients(wanted: Sequence[bool], grads: Iterable[jax.Array]) -> tuple:
        found = map(to_torch, jax.block_until_ready(grads))
        return None, None, None, *(next(found) if one else None for one in wanted)


class _Again(_Node):
    @staticmethod
    def forward(ctx: Any, compiled: Compiled, call: Call, others: list, *tensors: Tensor) -> tuple:
        ctx.compiled, ctx.call, ctx.others = compiled, call, others
        outputs = jax.block_until_ready(compiled.forward(call, [to_jax(tensor) for tensor in tensors], others))
        ctx.save_for_backward(*tensors)
        return _Node.results(ctx, outputs)

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: Any) -> tuple:
        cotangents = _Node.cotangents(ctx, grads)
        wanted = tuple(ctx.needs_input_grad[3:])
        tensors = [to_jax(tensor) for tensor in ctx.saved_tensors]
        return _Node.gradients(wanted, ctx.compiled.backward_again(ctx.call, wanted, tensors, ctx.others, cotangents))


class _Keeping(_Node):
    @staticmethod
    def forward(ctx: Any, compiled: Compiled, call: Call, others: list, *tensors: Tensor) -> tuple:
        ctx.compiled, ctx.wanted = compiled, tuple(ctx.needs_input_grad[3:])
        arrays = [to_jax(tensor) for tensor in tensors]
        outputs, rest, kept = jax.block_until_ready(compiled.forward_keeping(call, ctx.wanted, arrays, others))
        ctx.kept = kept.structure
        # Tensors wait by autograd's door, whoever they come from; the others (random keys) are small.
        rest = iter([to_torch(leaf) for leaf in rest])
        waiting = [next(rest) if source is None else tensors[source] for source in kept.sources]
        ctx.is_tensor = [isinstance(value, Tensor) for value in waiting]
        ctx.keys = [value for value in waiting if not isinstance(value, Tensor)]
        ctx.save_for_backward(*compress(waiting, ctx.is_tensor))
        return _Node.results(ctx, outputs)

    @staticmethod
    def backward(ctx: Any, _: Any, *grads: Any) -> tuple:
        cotangents = _Node.cotangents(ctx, grads)
        saved, keys = map(to_jax, ctx.saved_tensors), iter(ctx.keys)
        leaves = [next(saved) if one else next(keys) for one in ctx.is_tensor]
        pull_back = jax.tree_util.tree_unflatten(ctx.kept, leaves)
        return _Node.gradients(ctx.wanted, ctx.compiled.backward_kept(pull_back, cotangents))


def run(compiled: Compiled, structure: Any, params: list[Tensor], arguments: Any, static: tuple, keep: bool) -> Any:
    """`function(params, *args, **kwargs)` of torch tensors, where `arguments` is (args, kwargs).

    structure  of the parameters' pytree
    keep       what the pull-back needs waits for backward, instead of being computed again
    """
    values, form = jax.tree_util.tree_flatten(arguments)
    leaves = tuple(_kind_of(value) for value in values)
    call = Call(structure, form, leaves, static)
    try:
        hash(call)
    except TypeError as error:
        raise TypeError(
            f"{error}: an argument must be a tensor, an array, a number, a pytree of these, or hashable"
        ) from error
    tensors = [*params, *(value for value, kind in zip(values, leaves, strict=True) if kind is _Traced.TENSOR)]
    others = [other_to_jax(value) for value, kind in zip(values, leaves, strict=True) if kind is _Traced.OTHER]
    node = _Keeping if keep and any(tensor.requires_grad for tensor in tensors) else _Again
    outputs, *results = node.apply(compiled, call, others, *tensors)
    return jax.tree_util.tree_unflatten(outputs, results)


def _kind_of(value: Any) -> _Traced | _Static:
    if isinstance(value, Tensor):
        return _Traced.TENSOR
    if isinstance(value, _ARRAYS_AND_NUMBERS) and not isinstance(value, bool):
        return _Traced.OTHER
    return _Static(type(value), value)
