"""zinf.jax.JaxModule beside the same function in jax alone: values, gradients, what a module must be able to do."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from zinf_testing import assert_same, state_of

import zero3
import zinf

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from zinf_jax_models import BOTH_WAYS, layer, layer_params, random_array  # noqa: E402

from zinf.jax_arrays import to_jax, to_torch  # noqa: E402

# -- one call, beside jax ------------------------------------------------------------------------------------------


def as_numpy(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, dtype=np.float64), tree)


@BOTH_WAYS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_gradients_are_jaxs_own(recompute, dtype):
    params, x, weight = layer_params(dtype), random_array(7, (5, 6), dtype), random_array(8, (5, 3), dtype)
    module = zinf.jax.JaxModule(layer, params, recompute=recompute)
    ours = torch.from_dlpack(x).clone().requires_grad_()
    found = module(ours, scale=0.5)
    (found["out"] * torch.from_dlpack(weight)).sum().backward()

    wanted = jax.jit(layer)(params, x, 0.5)
    assert set(found) == {"out", "most"}
    assert found["out"].dtype == getattr(torch, dtype)
    assert found["most"].dtype == torch.int32
    assert not found["most"].requires_grad
    np.testing.assert_array_equal(found["most"].numpy(), wanted["most"])
    close = partial(np.testing.assert_allclose, rtol=4 * jnp.finfo(dtype).eps, atol=2 * jnp.finfo(dtype).eps)
    close(found["out"].detach().double().numpy(), as_numpy(wanted["out"]))

    def loss(w, b, last, x):
        return (layer({"w": w, "b": b, "last": [last, None]}, x, 0.5)["out"] * weight).sum()

    floats = params["w"], params["b"], params["last"][0], x
    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*floats)
    named_params = dict(module.named_parameters())
    mine = [*(named_params[f"params.{name}"] for name in ("w", "b", "last.0")), ours]
    assert len(named_params) == 3
    for tensor, grad in zip(mine, grads, strict=True):
        assert tensor.grad.dtype == getattr(torch, dtype)
        close(tensor.grad.double().numpy(), as_numpy(grad), atol=8 * jnp.finfo(dtype).eps)


@BOTH_WAYS
def test_arguments_and_outputs_are_pytrees(recompute):
    def mixed(params, pair, extra, *, table):
        (a, b), c = pair
        return (a * params + table["c"], [b * c * extra["number"]]), None

    module = zinf.jax.JaxModule(mixed, 2.0, recompute=recompute)
    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    (first, (second,)), nothing = module(((a, b), c), {"number": np.float32(5)}, table={"c": np.ones(3, "f4")})
    assert nothing is None
    torch.testing.assert_close(first, a * 2 + 1)
    torch.testing.assert_close(second, b * c * 5)
    second.sum().backward()
    assert torch.equal(a.grad, torch.zeros(3))  # as jax: what is not used has the gradient 0
    torch.testing.assert_close(b.grad, 5 * c.detach())
    assert module.params.grad == 0


@BOTH_WAYS
def test_complex_gradients_follow_torch(recompute):
    def product(params, z, x):
        return z * z * (2 + 1j), jnp.abs(z) * x

    module = zinf.jax.JaxModule(product, {}, recompute=recompute)
    plain = [torch.randn(4, dtype=torch.complex64, requires_grad=True), torch.randn(4, requires_grad=True)]
    ours = [tensor.detach().clone().requires_grad_() for tensor in plain]
    for holomorphic, real in (
        (plain[0] * plain[0] * (2 + 1j), plain[0].abs() * plain[1]),
        module(ours[0].conj().resolve_conj().conj(), ours[1]),  # a tensor that is conjugated when it is read
    ):
        ((holomorphic * (1 - 3j)).sum().abs() + real.sum()).backward()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@BOTH_WAYS
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, 1::2],
        lambda x: x[:1].expand(3, 4),
        lambda x: x.flatten()[1:],
        lambda x: x[0, 0],
        lambda x: x[:0],
    ],
    ids=["transposed", "strided", "expanded", "unaligned", "scalar", "empty"],
)
def test_any_layout_of_a_tensor(recompute, make):
    module = zinf.jax.JaxModule(lambda p, x: p * x * x, 3.0, recompute=recompute)
    base = torch.randn(5, 4, requires_grad=True)
    for result in (module(make(base)), 3 * make(base) ** 2):
        result.sum().backward()
    view = make(base.detach())
    torch.testing.assert_close(module(view), 3 * view**2)
    np.testing.assert_allclose(module.params.grad.item(), (view**2).sum().item(), rtol=1e-5, atol=1e-6)
    grad, base.grad = base.grad, None
    (2 * 3 * make(base) ** 2).sum().backward()  # both ways together have given twice this
    torch.testing.assert_close(grad, base.grad)


CONSTANT = jnp.arange(100.0)


@BOTH_WAYS
def test_no_output_shares_memory_with_anything(recompute):
    """What a function returns as it got it, twice, or from its closure, may be written to in torch."""

    def same(params, x):
        doubled = x * 2
        return params["w"], params["w"], x, x, CONSTANT, CONSTANT, doubled, doubled, params["n"]

    module = zinf.jax.JaxModule(same, {"w": jnp.arange(100.0), "n": jnp.arange(100)}, recompute=recompute)
    x = torch.arange(100.0, requires_grad=True)
    outputs = module(x)
    assert len({output.data_ptr() for output in (*outputs, x, module.params.w, module.params.n)}) == 12
    sum(output.sum() for output in outputs[:-1]).backward()
    for number, output in enumerate(outputs):
        output.data.fill_(-number)
    for untouched in (module.params.w, module.params.n, x, torch.from_dlpack(CONSTANT)):
        assert torch.equal(untouched.detach().float(), torch.arange(100.0))
    assert [int(output[7]) for output in outputs] == [-number for number in range(9)]
    again = module(x)
    assert torch.equal(again[0].detach(), torch.arange(100.0))
    assert torch.equal(again[4], torch.arange(100.0))
    x.grad.fill_(-1.0)
    assert torch.equal(module.params.w.grad, torch.full((100,), 2.0))


def test_gradients_of_an_identity_share_no_memory():
    module = zinf.jax.JaxModule(lambda p, x: p + x, jnp.zeros(100))
    x, direction = torch.zeros(100, requires_grad=True), torch.ones(100)
    module(x).backward(direction)
    x.grad.add_(5)
    assert torch.equal(module.params.grad, torch.ones(100))
    assert torch.equal(direction, torch.ones(100))


def test_aligned_tensors_are_read_where_they_lie():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.bool, torch.uint8):
        tensor = torch.ones(64, 64).to(dtype)
        array = to_jax(tensor)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        assert to_torch(array).data_ptr() == tensor.data_ptr()
        assert to_torch(array).dtype == dtype
    unaligned = torch.arange(100.0)[1:]
    assert to_jax(unaligned).unsafe_buffer_pointer() != unaligned.data_ptr()
    assert np.array_equal(to_jax(unaligned), unaligned.numpy())


# -- dtypes --------------------------------------------------------------------------------------------------------


def test_int64_tensors_become_int32_if_they_fit():
    module = zinf.jax.JaxModule(lambda p, ids: (p[ids], ids), jnp.arange(10.0))
    rows, ids = module(torch.tensor([[1, 9]]))
    assert torch.equal(rows, torch.tensor([[1.0, 9.0]]))
    assert ids.dtype == torch.int32
    for wide in (torch.tensor([0, 2**31]), np.array([-(2**31) - 1, 0])):
        with pytest.raises(ValueError, match=r"from .* to .* do not fit into jax's int32"):
            module(wide)
    assert torch.equal(module(torch.tensor([2**31 - 1, -(2**31)]))[1], torch.tensor([2**31 - 1, -(2**31)]).int())


def test_float64_is_not_narrowed_silently():
    module = zinf.jax.JaxModule(lambda p, x: p * x, 1.0)
    for wide in (torch.ones(3, dtype=torch.float64), np.ones(3), torch.ones(3, dtype=torch.complex128)):
        with pytest.raises(TypeError, match="jax_enable_x64"):
            module(wide)
    with pytest.raises(TypeError, match="float64 would silently become float32"):
        zinf.jax.JaxModule(lambda p, x: p * x, {"w": np.ones(3)})


def test_with_64_bits_nothing_is_converted(run_python):
    run_python("""
        import jax, numpy, torch, zinf
        jax.config.update("jax_enable_x64", True)
        module = zinf.jax.JaxModule(lambda p, x, ids: (p["w"][ids] * x, ids), {"w": numpy.arange(3.0) / 3})
        x = torch.tensor([1 / 7, 1 / 9], dtype=torch.float64, requires_grad=True)
        y, ids = module(x, torch.tensor([2, 1]))
        y.sum().backward()
        assert (y.dtype, ids.dtype, module.params.w.dtype) == (torch.float64, torch.int64, torch.float64)
        assert torch.equal(x.grad, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
        assert torch.equal(module.params.w.grad, torch.tensor([0, 1 / 9, 1 / 7], dtype=torch.float64))
    """)


# -- what is traced, what is static --------------------------------------------------------------------------------


def test_programs_are_compiled_once_for_a_shape_and_shared():
    traces = []

    def counted(params, x, number, flag=False):
        traces.append(x.shape)
        return params["w"] * x * number + (1 if flag else 0)

    modules = [zinf.jax.JaxModule(counted, {"w": jnp.ones(4) * i}) for i in range(3)]

    def step(size, number=2.0, **flags):
        for module in modules:
            module(torch.ones(size, 4, requires_grad=True), number, **flags).sum().backward()

    step(2)
    assert len(traces) == 2  # forward, and backward with its own
    step(2)
    step(2, number=3.0)  # numbers are traced
    assert len(traces) == 2
    step(3)
    step(3, flag=True)  # booleans are not
    assert len(traces) == 6
    step(3, flag=False)
    step(2)
    assert len(traces) == 8  # flag=False spelled out is another call than without it; nothing else is new
    del traces[:]
    kept = zinf.jax.JaxModule(counted, {"w": jnp.ones(4)}, recompute=False)
    for _ in range(3):
        kept(torch.ones(2, 4), 2.0).sum().backward()
    assert len(traces) == 1


def test_static_arguments():
    def reshaped(params, x, activation="none", groups=1, inner=None):
        x = (x * params).reshape(groups, -1)
        return {"none": x, "tanh": jnp.tanh(x)}[activation] if inner is None else inner(x)

    module = zinf.jax.JaxModule(reshaped, 1.0, static_argnames="groups")
    x = torch.randn(6)
    torch.testing.assert_close(module(x, "tanh", groups=3), torch.tanh(x.reshape(3, 2)))
    torch.testing.assert_close(module(x, inner=jnp.exp), torch.exp(x.reshape(1, 6)))
    with pytest.raises(TypeError, match=r"unhashable.*must be a tensor, an array"):
        module(x, groups=[3])
    one, true = zinf.jax.JaxModule(lambda p, x, flag: x * p if flag is True else x, 2.0), torch.ones(1)
    assert (one(true, True).item(), one(true, False).item()) == (2.0, 1.0)


@BOTH_WAYS
def test_random_keys_are_arguments_and_backward_draws_the_same(recompute):
    def dropout(params, key, x):
        here, following = jax.random.split(key)
        return jnp.where(jax.random.bernoulli(here, 0.5, x.shape), x * params, 0), following

    module = zinf.jax.JaxModule(dropout, jnp.full(1000, 3.0), recompute=recompute)
    x, key = torch.ones(1000, requires_grad=True), jax.random.key(7)
    y, following = module(key, x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert 300 < (y == 3).sum() < 700
    assert jnp.array_equal(jax.random.key_data(following), jax.random.key_data(jax.random.split(key)[1]))
    assert not torch.equal(module(following, x)[0], y)
    with pytest.raises(TypeError, match=r"random keys.*pass them as arguments"):
        zinf.jax.JaxModule(dropout, {"key": key})


# -- as a module ---------------------------------------------------------------------------------------------------


def test_names_tell_the_path():
    tree = {
        "dense": {"kernel": jnp.ones((2, 2)), "steps": jnp.arange(2)},
        "training": jnp.ones(1),  # an attribute of every module
        "a.b": jnp.ones(1),
        "a_b": jnp.ones(1),
        "": [jnp.ones(1), (jnp.zeros(2), None)],
        "_order": {"0": jnp.ones(1)},
        "scan/~/w": 0.5,
    }
    module = zinf.jax.JaxModule(lambda params: params, tree)
    assert [name for name, _ in module.named_parameters()] == [
        "params.a_b", "params.a_b_", "params.scan/~/w", "params.training_",
        "params._.0", "params._.1.0", "params._order_.0", "params.dense.kernel",
    ]  # fmt: skip
    assert [name for name, _ in module.named_buffers()] == ["params.dense.steps"]
    jax.tree.map(np.testing.assert_array_equal, module.to_pytree(), tree)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one.detach(), other), module(), tree)

    other = zinf.jax.JaxModule(lambda params: params, jax.tree.map(jnp.zeros_like, tree))
    other.load_state_dict(module.state_dict())
    jax.tree.map(np.testing.assert_array_equal, other.to_pytree(), tree)


def test_parameters_are_copies_and_jaxs_arrays_never_change():
    arrays = {"jax": jnp.ones(64), "numpy": np.ones(64, np.float32)}
    module = zinf.jax.JaxModule(lambda p: p["jax"] + p["numpy"], arrays)
    taken = module.to_pytree()
    with torch.no_grad():
        for param in module.parameters():
            param.fill_(7)
    assert all((np.asarray(array) == 1).all() for array in (*arrays.values(), *taken.values()))
    assert torch.equal(module(), torch.full((64,), 14.0))


def test_what_cannot_be_a_parameter_is_named():
    with pytest.raises(TypeError, match="'name' is a str"):
        zinf.jax.JaxModule(lambda p: p, {"w": {"name": "x"}})
    with pytest.raises(TypeError, match="apply_fn is a dict"):
        zinf.jax.JaxModule({}, lambda p: p)


def test_a_torch_parameter_is_shared():
    first = zinf.jax.JaxModule(lambda p, x: x @ p["w"], {"w": jnp.ones((3, 3))})
    second = zinf.jax.JaxModule(lambda p, x: x @ p["v"].T, {"v": first.params.w})
    model = nn.Sequential(first, second)
    assert len(list(model.parameters())) == 1
    model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(first.params.w.grad, torch.full((3, 3), 6.0))


@BOTH_WAYS
def test_frozen_parameters_get_no_gradient(recompute):
    module = zinf.jax.JaxModule(lambda p, x: p["a"] * p["b"] * x, {"a": 2.0, "b": 3.0}, recompute=recompute)
    module.params.a.requires_grad_(False)
    module(torch.ones(1)).backward()
    assert (module.params.a.grad, module.params.b.grad.item()) == (None, 2.0)
    module.requires_grad_(False)
    assert not module(torch.ones(1)).requires_grad
    x = torch.ones(1, requires_grad=True)
    module(x).backward()
    assert x.grad.item() == 6.0


@BOTH_WAYS
def test_without_gradients_nothing_is_kept(recompute):
    module = zinf.jax.JaxModule(lambda p, x: jnp.sin(p * x), jnp.ones(1000), recompute=recompute).eval()
    x = torch.ones(1000, requires_grad=True)
    with torch.no_grad():
        assert module(x).grad_fn is None
    with torch.inference_mode():
        assert module(x).is_inference()


@BOTH_WAYS
def test_graphs_live_as_in_torch(recompute):
    """Several forwards before one backward, a graph used twice, and one that is gone."""
    module = zinf.jax.JaxModule(lambda p, x: jnp.exp(p * x), 0.5, recompute=recompute)
    plain = torch.tensor(0.5, requires_grad=True)
    x = torch.randn(10, requires_grad=True)
    for loss in (sum(module(x * i).sum() for i in range(3)), sum((plain * x * i).exp().sum() for i in range(3))):
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    torch.testing.assert_close(module.params.grad, plain.grad)
    weak = weakref.ref(module(x).grad_fn)
    assert weak() is None


@BOTH_WAYS
def test_double_backward_is_refused(recompute):
    module = zinf.jax.JaxModule(lambda p, x: (p * x) ** 3, 0.5, recompute=recompute)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(zero3.UnsupportedError, match="double backward"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)


@BOTH_WAYS
def test_an_input_that_was_changed_since_is_noticed(recompute):
    module = zinf.jax.JaxModule(lambda p, x: p * x * x, 2.0, recompute=recompute)
    x = torch.ones(2)
    y = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    array = np.ones(2, np.float32)
    y = module(array)
    array += 1
    y.sum().backward()
    assert module.params.grad == 2


@BOTH_WAYS
@pytest.mark.parametrize("reentrant", [True, False])
def test_under_a_checkpoint(recompute, reentrant):
    torch.manual_seed(0)
    module = zinf.jax.JaxModule(layer, layer_params(), recompute=recompute)

    def both(x):
        return module(torch.nn.functional.dropout(x))["out"].square()

    x = torch.randn(5, 6, requires_grad=True)
    grads = []
    for call in (both, partial(torch.utils.checkpoint.checkpoint, both, use_reentrant=reentrant)):
        torch.manual_seed(3)
        module.zero_grad()
        call(x).sum().backward()
        grads.append([x.grad, *(param.grad for param in module.parameters())])
        x.grad = None
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_copies_and_pickles():
    module = zinf.jax.JaxModule(layer, layer_params(), recompute=False)
    x = torch.ones(5, 6)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(state_of(other), state_of(module))
        assert torch.equal(other(x)["out"], module(x)["out"])
        with torch.no_grad():
            other.params.w.zero_()
        assert not torch.equal(other(x)["out"], module(x)["out"])
        assert other.params.w is not module.params.w
        assert other._compiled is module._compiled


def test_a_function_goes_with_its_last_module():
    class Held:
        pass

    held = Held()

    def function(params, x, held=held):
        return params * x

    modules = [zinf.jax.JaxModule(function, 1.0, recompute=recompute) for recompute in (True, False)]
    for module in modules:
        module(torch.ones(3)).sum().backward()
    alive = weakref.ref(held)
    del held, function, modules, module
    gc.collect()
    assert alive() is None


def test_functions_that_have_no_hash():
    class Function:
        __hash__ = None

        def __call__(self, params, x):
            return params * x

    assert zinf.jax.JaxModule(Function(), 2.0)(torch.ones(1)) == 2


def test_without_jax_the_extra_is_named(run_python):
    run_python("""
        import sys
        sys.modules["jax"] = None
        import zinf
        try:
            zinf.jax
        except ImportError as error:
            assert "pip install 'zinf[jax]'" in str(error), error
        else:
            raise AssertionError
    """)


def test_jax_is_loaded_on_first_access_only(run_python):
    run_python("""
        import sys, zinf
        assert "jax" not in sys.modules
        assert zinf.jax.JaxModule
        assert "jax" in sys.modules
    """)


def test_torch_compile_leaves_it_to_jax():
    torch._dynamo.reset()
    module = zinf.jax.JaxModule(lambda params, x: layer(params, x)["out"], layer_params())
    model = nn.Sequential(nn.Linear(6, 6), module, nn.Linear(3, 3))
    x = torch.randn(4, 6)
    wanted = model(x)
    wanted.sum().backward()
    gradients = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    found = torch.compile(model, backend="eager")(x)
    assert torch.equal(found, wanted)
    found.sum().backward()
    assert all(torch.equal(param.grad, one) for param, one in zip(model.parameters(), gradients, strict=True))
    torch._dynamo.reset()
