"""JaxModule: a jax function as a torch module. Loaded on first access of `zinf.jax`; needs `zinf[jax]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

try:
    import jax
except ImportError as error:
    raise ImportError(f"zinf.jax needs jax: pip install 'zinf[jax]' ({error})") from error

import torch
from torch import nn

import zero3
from zero3.untraced import untraced

from .jax_arrays import to_jax
from .jax_calls import Compiled, run
from .parameter_tree import Branch, attach, entries_of, leaves_of, names_of


class JaxModule(nn.Module):
    """`apply_fn(params, *args, **kwargs)` as a module: trained, partitioned and offloaded like any other.

        block = zinf.jax.JaxModule(apply_block, init_block(key))
        y = block(x)                                             # torch tensors in and out
        model = zinf.shard(nn.Sequential(*blocks), config)       # one JaxModule a block

    Parameters
    ----------
    apply_fn         a function that jax.jit can compile
    params           pytree of jax or numpy arrays. Each leaf becomes a Parameter named by its path
                     (`params.dense.kernel`; a dot in a key becomes "_"), with a copy of the values; integers and
                     booleans become buffers. A leaf that is a torch Parameter stays itself: give it to two modules,
                     and they share it.
    recompute        True: backward computes the function again from its parameters and arguments, as a checkpoint
                     does: about a third more arithmetic, and nothing else waits in memory. False: what jax.vjp keeps
                     waits, without the parameters themselves, but with all that is computed from them alone (a weight
                     cast to another dtype has the size of the weight). Right under a checkpoint, which runs the
                     module again as it is.
    static_argnames  keyword arguments that are compiled in: hashable values, a program for each

    Arguments may be pytrees. Of their leaves torch tensors get gradients; jax arrays (random keys, for example), numpy
    arrays and numbers are traced as jax.jit does; whatever else there is (booleans, strings, functions, ...) is static.
    Outputs are the function's pytree with torch tensors in it. int64 tensors become int32 unless jax_enable_x64 is set
    (ValueError where a value does not fit), float64 is refused then (TypeError).

    Compiled once for each shape, for all modules with the same `apply_fn`. All leaves are used at once: whatever the
    unit size, the whole module is gathered while it runs. So a large model is a list of JaxModules, one a block.
    A parameter that the function does not use gets the gradient 0, as in jax. A JaxModule runs where its tensors are,
    if jax has that device. No double backward: create_graph=True raises zero3.UnsupportedError. TypeError for params
    that are no arrays.
    """

    def __init__(
        self,
        apply_fn: Callable[..., Any],
        params: Any,
        *,
        recompute: bool = True,
        static_argnames: str | Sequence[str] = (),
    ):
        super().__init__()
        if not callable(apply_fn):
            raise TypeError(f"apply_fn is a {type(apply_fn).__name__}, not a function of (params, ...)")
        self.recompute = recompute
        self.static_argnames = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        self._compiled = Compiled.of(apply_fn)
        entries, self._structure = entries_of(params)
        attach(self, "params", entries)

    @untraced  # jax compiles it
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        static = tuple((name, kwargs.pop(name)) for name in self.static_argnames if name in kwargs)
        leaves = list(leaves_of(self, "params"))
        keep = not self.recompute and torch.is_grad_enabled()
        return run(self._compiled, self._structure, leaves, (args, kwargs), static, keep)

    def to_pytree(self) -> Any:
        """The parameters as the pytree that `apply_fn` takes, of jax arrays with copies of the values. Collective.

        In a partitioned model each is gathered by itself, and has the dtype of its shard.
        """
        state = zero3.state_dict(self)
        return jax.tree_util.tree_unflatten(self._structure, [to_jax(state[name]) for name in names_of(self, "params")])

    def extra_repr(self) -> str:
        function = self._compiled.function
        return getattr(function, "__qualname__", repr(function))


__all__ = ["Branch", "JaxModule"]
