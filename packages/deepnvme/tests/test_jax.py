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


def test_a_tree_that_does_not_fit_leaves_no_mixture(tmp_path):
    def tree(value, *numels):
        return [jnp.full(numel, value) for numel in numels]

    with deepnvme.Swap(tmp_path, capacity="1MiB") as swap:
        deepnvme.jax.swap_out(swap, "tree", tree(1.0, 100, 100, 100))
        with pytest.raises(OSError, match="does not fit"):
            deepnvme.jax.swap_out(swap, "tree", tree(2.0, 100, 100, 1 << 20))
        with pytest.raises(KeyError, match="tree"):
            deepnvme.jax.swap_in(swap, "tree")
        assert swap.names() == []
        deepnvme.jax.swap_out(swap, "tree", tree(3.0, (1 << 18) - 1024, 1024))  # all the room there is
        for found, expected in zip(deepnvme.jax.swap_in(swap, "tree"), tree(3.0, (1 << 18) - 1024, 1024), strict=True):
            assert jnp.array_equal(found, expected)
        deepnvme.jax.swap_out(swap, "tree", [])
        deepnvme.jax.swap_out(swap, "tree", tree(4.0, 3, 3))
        with pytest.raises(ValueError, match="int4"):
            deepnvme.jax.swap_out(swap, "tree", [jnp.zeros(3), jnp.zeros(3, "int4")])
        with pytest.raises(KeyError):
            deepnvme.jax.swap_in(swap, "tree")


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
