"""jax arrays and pytrees of them."""

from __future__ import annotations

import numpy as np
import pytest

import deepnvme

jax = pytest.importorskip("jax")
jnp = jax.numpy


@pytest.fixture
def swap(tmp_path):
    with deepnvme.Swap(tmp_path) as s:
        yield s


def test_pytree_comes_back_bit_for_bit(swap):
    tree = {
        "layers": [jnp.arange(12.0).reshape(3, 4), jnp.ones(100_001, jnp.bfloat16) / 3],
        "state": (jnp.int32(7), jnp.zeros((0, 4)), jnp.array([True, False])),
        "rate": 0.25,
    }
    deepnvme.jax.swap_out(swap, "model", tree)
    back = deepnvme.jax.swap_in(swap, "model")
    assert jax.tree_util.tree_structure(back) == jax.tree_util.tree_structure(tree)
    for a, b in zip(jax.tree_util.tree_leaves(back), jax.tree_util.tree_leaves(tree), strict=True):
        assert isinstance(a, jax.Array)
        assert (a.dtype, a.shape) == (jnp.asarray(b).dtype, jnp.asarray(b).shape)
        assert np.asarray(a).tobytes() == np.asarray(jnp.asarray(b)).tobytes()


def test_smaller_tree_in_place_of_a_larger_one(swap):
    deepnvme.jax.swap_out(swap, "x", [jnp.ones(3)] * 3)
    deepnvme.jax.swap_out(swap, "x", (jnp.zeros(3),))
    assert swap.names() == ["x/0"]
    assert deepnvme.jax.swap_in(swap, "x")[0].sum() == 0


def test_unknown_name(swap):
    with pytest.raises(KeyError):
        deepnvme.jax.swap_in(swap, "x")


def test_values_survive_the_next_swap(swap):
    """What was swapped in owns its memory: no later transfer shows through."""
    deepnvme.jax.swap_out(swap, "x", jnp.full(1 << 20, 1.0))
    first = deepnvme.jax.swap_in(swap, "x")
    deepnvme.jax.swap_out(swap, "x", jnp.full(1 << 20, 2.0))
    second = deepnvme.jax.swap_in(swap, "x")
    assert (float(first.min()), float(first.max()), float(second.min())) == (1.0, 1.0, 2.0)


def test_array_is_written_and_never_read_into(tmp_path):
    array = jnp.arange(1000.0)
    with deepnvme.Engine() as io:
        io.write(tmp_path / "file", array).wait()
        assert (tmp_path / "file").read_bytes() == np.asarray(array).tobytes()
        with pytest.raises(TypeError, match="read-only"):
            io.read(tmp_path / "file", array)
