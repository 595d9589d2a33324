"""adamw: an optax-style pair (init, update) computed by cpu_adam, with its state in host memory.

Nothing is changed in place: gradients, parameters and the old state stay as they are, new arrays come back.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy
import optax

import cpu_adam


class AdamState(NamedTuple):
    """State after `count` updates; the names are those of optax.ScaleByAdamState."""

    count: Any  # 0-dim int32
    mu: Any  # first moments: a pytree like the parameters, float32
    nu: Any  # second moments, likewise


def adamw(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    mu_dtype: Any = None,
    weight_decay: float = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    threads: int | None = None,
) -> optax.GradientTransformation:
    """optax.adamw with the same arguments, computed on the CPU by cpu_adam.

    learning_rate   a number, or a schedule: a function of the number of updates made before. It may be negative, as
                    optax's: a schedule that falls to 0 in float32 can end a rounding below it.
    mask            a pytree of bool like the parameters, or a function from them to it: which are decayed.
    threads         as `cpu_adam.step`'s.

    With u the update, to be added to the parameters, and m_hat, v_hat as in `cpu_adam.step`::

        u = -lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * p)

    `update` may be called as it is: moments and updates are then numpy arrays in host memory. Under jax.jit it
    is a call-back to the host, and they are results of the jitted function; under jax.vmap one call-back for each
    member of the batch. They are float32 whatever the parameters are; `optax.apply_updates` rounds to the parameters'
    dtype. Gradients of other floating dtypes than float32, bfloat16 and float16 are rounded to float32.

    Raises ValueError for eps_root, nesterov and a mu_dtype other than float32, which are not implemented, and in
    `update` where no parameters are given.
    """
    if eps_root or nesterov or (mu_dtype is not None and numpy.dtype(mu_dtype) != numpy.float32):
        raise ValueError("cpu_adam.optax.adamw implements eps_root=0, nesterov=False and float32 moments only")

    def init(params: Any) -> AdamState:
        def zeros() -> Any:
            return jax.tree.map(lambda param: numpy.zeros(numpy.shape(param), numpy.float32), params)

        return AdamState(numpy.zeros((), numpy.int32), zeros(), zeros())

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        if params is None:
            raise ValueError("update needs params=: the weight decay is computed from them")
        structure = jax.tree.structure(grads)
        decayed = mask(params) if callable(mask) else mask
        flags = [True] * len(jax.tree.leaves(grads)) if decayed is None else jax.tree.leaves(decayed)
        rates = [weight_decay if flag else 0.0 for flag in flags]
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        columns = [jax.tree.leaves(tree) for tree in (grads, state.mu, state.nu, params)]

        # A rate that is no array keeps its digits: as an argument of the call-back it would be rounded to float32.
        rate_array = lr if isinstance(lr, jax.Array) else None

        def on_host(count: Any, rate_array: Any, columns: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
            rate_now = float(lr if rate_array is None else rate_array)
            settings = {"step": int(count) + 1, "betas": (b1, b2), "eps": eps, "threads": threads}
            return [
                _update_leaf(*leaf, lr=rate_now, weight_decay=rate, settings=settings)
                for *leaf, rate in zip(*columns, rates, strict=True)
            ]

        arguments = (state.count, rate_array, columns)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
            results = [(jax.ShapeDtypeStruct(numpy.shape(mu), numpy.float32),) * 3 for mu in columns[1]]
            leaves = jax.pure_callback(on_host, results, *arguments, vmap_method="sequential")
        else:
            leaves = on_host(*arguments)
        updates, mu, nu = (jax.tree.unflatten(structure, [leaf[i] for leaf in leaves]) for i in range(3))
        return updates, AdamState(state.count + numpy.int32(1), mu, nu)

    return optax.GradientTransformation(init, update)


_GRADIENT_DTYPES = ("float32", "bfloat16", "float16")  # that cpu_adam reads; others (float64) are rounded first


def _update_leaf(
    grad: Any, mu: Any, nu: Any, param: Any, *, lr: float, weight_decay: float, settings: dict[str, Any]
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """(update, new mu, new nu) of one array."""
    new_mu, new_nu = numpy.array(mu, numpy.float32), numpy.array(nu, numpy.float32)
    # A step from zero without decay is the update itself with all its digits; new minus old parameter has lost some.
    update = numpy.zeros(new_mu.shape, numpy.float32)
    grad = numpy.ascontiguousarray(grad).reshape(update.shape)
    if jax.numpy.issubdtype(grad.dtype, numpy.floating) and grad.dtype.name not in _GRADIENT_DTYPES:
        grad = grad.astype(numpy.float32)
    cpu_adam.step(update, grad, new_mu, new_nu, lr=abs(lr), **settings)
    if lr < 0:
        numpy.negative(update, out=update)
    if weight_decay:
        update -= numpy.float32(lr * weight_decay) * numpy.asarray(param, dtype=numpy.float32)
    return update, new_mu, new_nu
