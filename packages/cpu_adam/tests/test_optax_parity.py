"""cpu_adam.optax.adamw beside optax.adamw; JAX arrays never change."""

import numpy as np
import pytest

import cpu_adam

jax = pytest.importorskip("jax", reason="jax is not installed")
optax = pytest.importorskip("optax", reason="optax is not installed")

import jax.numpy as jnp  # noqa: E402

import cpu_adam.optax  # noqa: E402


def parameters(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "dense": {"w": jax.random.normal(keys[0], (40, 30), dtype), "b": jnp.zeros(30, dtype)},
        "scale": jnp.ones((), dtype),
    }


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["dense"]["w"] + params["dense"]["b"]) * params["scale"]) ** 2)


def gradients(params, step):
    return jax.grad(loss)(params, jax.random.normal(jax.random.key(step), (8, 40)))


def trained(transformation, steps=10, jit=False, params=None):
    params = parameters() if params is None else params
    state = transformation.init(params)
    update = jax.jit(transformation.update) if jit else transformation.update
    for step in range(steps):
        updates, state = update(gradients(params, step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol, err_msg=str(path))


SETTINGS = [
    {"learning_rate": 1e-2},
    {"learning_rate": 1e-2, "b1": 0.8, "b2": 0.9, "eps": 1e-4, "weight_decay": 0.1},
    {"learning_rate": optax.linear_schedule(1e-2, 1e-4, 8)},
    {"learning_rate": optax.linear_schedule(1e-2, -1e-2, 8), "weight_decay": 0.1},  # or a rounding below 0
    {"learning_rate": 1e-2, "weight_decay": 0.1, "mask": lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)},
    {"learning_rate": 1e-2, "weight_decay": 0.1, "mask": {"dense": {"w": False, "b": True}, "scale": True}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("jit", [False, True])
def test_ten_steps(settings, jit):
    ours, state = trained(cpu_adam.optax.adamw(**settings), jit=jit)
    theirs, their_state = trained(optax.adamw(**settings))
    assert_close(ours, theirs)
    assert int(state.count) == 10
    assert_close(state.mu, their_state[0].mu)
    assert_close(state.nu, their_state[0].nu)


def test_each_update_has_all_its_digits():
    """Updates far smaller than the parameters: as exact as optax's, not the difference of two parameters."""
    params = jax.tree.map(lambda p: p + 1000.0, parameters())
    grads = gradients(parameters(), 0)
    ours, theirs = (t(1e-5, weight_decay=0.0) for t in (cpu_adam.optax.adamw, optax.adamw))
    a, _ = ours.update(grads, ours.init(params), params)
    b, _ = theirs.update(grads, theirs.init(params), params)
    assert_close(a, b, rtol=1e-5, atol=0)


def test_under_jit_with_the_gradients():
    transformation = cpu_adam.optax.adamw(1e-2)

    @jax.jit
    def step(params, state, x):
        updates, state = transformation.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params, state = parameters(), transformation.init(parameters())
    for i in range(10):
        params, state = step(params, state, jax.random.normal(jax.random.key(i), (8, 40)))
    assert_close(params, trained(transformation)[0])


def test_inside_a_chain():
    ours = optax.chain(optax.clip_by_global_norm(0.1), cpu_adam.optax.adamw(1e-2))
    theirs = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    assert_close(trained(ours)[0], trained(theirs)[0])


def test_bfloat16_parameters_and_gradients():
    transformation = cpu_adam.optax.adamw(1e-2)
    params, state = trained(transformation, params=parameters(jnp.bfloat16))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves((state.mu, state.nu)))


@pytest.fixture
def wide_numbers():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn"])
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_of_any_floating_dtype_are_rounded_to_float32(dtype, jit, wide_numbers):
    params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(7, 5)), jnp.float64)}
    assert params["w"].dtype == np.float64
    grads = jax.tree.map(lambda p: jnp.cos(3 * p).astype(dtype), params)
    results = []
    for transformation, given in (
        (cpu_adam.optax.adamw(1e-2), grads),
        (cpu_adam.optax.adamw(1e-2), jax.tree.map(lambda g: g.astype(jnp.float32), grads)),
        (optax.adamw(1e-2), jax.tree.map(lambda g: g.astype(jnp.float64), grads)),
    ):
        update = jax.jit(transformation.update) if jit else transformation.update
        results.append(update(given, transformation.init(params), params)[0])
    ours, rounded_before, theirs = results
    np.testing.assert_array_equal(ours["w"], rounded_before["w"])
    assert_close(ours, theirs)


@pytest.mark.parametrize("jit", [False, True])
def test_a_batch_of_models(jit):
    transformation = cpu_adam.optax.adamw(1e-2, weight_decay=0.1)
    batch = [jax.tree.map(lambda p, scale=scale: p * scale, parameters()) for scale in (1.0, 2.0, -3.0)]

    def stacked(trees):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    update = jax.vmap(transformation.update)
    update = jax.jit(update) if jit else update
    states = [transformation.init(params) for params in batch]
    together = stacked(states)
    for step in range(3):
        grads = [gradients(params, step) for params in batch]
        alone = [transformation.update(*arguments) for arguments in zip(grads, states, batch, strict=True)]
        states = [state for _, state in alone]
        updates, together = update(stacked(grads), together, stacked(batch))
        for ours, theirs in ((updates, [u for u, _ in alone]), (together, states)):
            jax.tree.map(np.testing.assert_array_equal, ours, stacked(theirs))


def test_inside_scan():
    def trained_by_scan(transformation):
        params = parameters()
        state = jax.tree.map(jnp.asarray, transformation.init(params))

        def body(carry, step):
            params, state = carry
            updates, state = transformation.update(gradients(params, step), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, state), jnp.arange(5))[0][0]

    assert_close(trained_by_scan(cpu_adam.optax.adamw(1e-2)), trained_by_scan(optax.adamw(1e-2)))


def test_whole_numbers_are_no_gradients():
    transformation, params = cpu_adam.optax.adamw(1e-2), {"w": jnp.ones(5)}
    with pytest.raises(TypeError, match="grad has dtype int32"):
        transformation.update({"w": jnp.ones(5, jnp.int32)}, transformation.init(params), params)


@pytest.mark.parametrize("numel", [8, 100_000])
@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_the_originals_stay_as_they_are(numel, printed, jit):
    params = {"w": jnp.arange(numel, dtype=jnp.float32)}
    grads = {"w": jnp.ones(numel)}
    if printed:
        print(params, grads)
    transformation = cpu_adam.optax.adamw(0.1)
    state = transformation.init(params)
    update = jax.jit(transformation.update) if jit else transformation.update
    updates, new_state = update(grads, state, params)
    optax.apply_updates(params, updates)
    update(grads, new_state, params)
    assert np.array_equal(np.asarray(params["w"]), np.arange(numel, dtype=np.float32))
    assert np.all(np.asarray(grads["w"]) == 1)
    assert int(state.count) == 0
    assert not np.any(state.mu["w"])
    assert np.all(np.asarray(new_state.mu["w"]) == np.float32(0.1))


@pytest.mark.parametrize("numel", [8, 100_000])
@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_refuses_jax_arrays_and_touches_nothing(numel, printed, dtype):
    arrays = [jnp.full(numel, value, dtype) for value in (1.0, 0.5, 0.25, 0.125)]
    if printed:
        print(arrays)
    with pytest.raises(TypeError, match=r"param is read-only.*JAX"):
        cpu_adam.step(*arrays, step=1, lr=0.1)
    writable = np.ones(numel, np.float32)
    moments = [np.zeros(numel, np.float32) for _ in range(2)]
    with pytest.raises(TypeError, match="exp_avg is read-only" if dtype == "float32" else "exp_avg has dtype"):
        cpu_adam.step(writable, arrays[1], *arrays[2:], step=1, lr=0.1)
    assert np.all(writable == 1)
    cpu_adam.step(writable, arrays[1], *moments, step=1, lr=0.1)  # a gradient is only read
    assert np.all(writable != 1)
    for array, value in zip(arrays, (1.0, 0.5, 0.25, 0.125), strict=True):
        assert np.all(np.asarray(array, dtype=np.float32) == value)


def test_norm2_and_split_take_jax_arrays():
    x = jax.random.normal(jax.random.key(0), (100,))
    assert cpu_adam.norm2(x) == pytest.approx(float(np.sum(np.asarray(x, dtype=np.float64) ** 2)))
    assert np.array_equal(cpu_adam.join(*cpu_adam.split(x)), np.asarray(x))


@pytest.mark.parametrize("settings", [{"eps_root": 1e-8}, {"nesterov": True}, {"mu_dtype": jnp.bfloat16}])
def test_what_is_not_implemented_is_refused(settings):
    with pytest.raises(ValueError, match="implements"):
        cpu_adam.optax.adamw(1e-3, **settings)


def test_parameters_are_needed():
    transformation = cpu_adam.optax.adamw(1e-3)
    params = parameters()
    with pytest.raises(ValueError, match="params"):
        transformation.update(params, transformation.init(params))
