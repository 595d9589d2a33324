"""What autograd saved from a unit that was released since: gradients bit-equal to plain torch, memory poisoned."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zero3_models import MODELS, Block, CustomFunction, Perceptron, Regression, SmallGPT, random
from zero3_testing import (
    DistantStore,
    assert_same,
    at_rest,
    full_gradients,
    gradients_of,
    one_and_two,
    pair,
    train_plain,
    train_sharded,
)

import zero3
from zero3.parameter_forms import raw_data, slot_of

pytestmark = pytest.mark.usefixtures("poison")


def distant_pair(make, **arguments):
    return pair(make, store=DistantStore(), **arguments)


class Views(Regression):
    """Transposes, slices, strides, einsum, expand, chunk of weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 36)
        self.second = nn.Linear(12, 12)

    def forward(self, x):
        w = self.first.weight
        q, k, v = w.chunk(3)
        x = torch.tanh(x @ q.t()) + torch.einsum("bi,oi->bo", x, k) * F.linear(x, v)
        x = x @ w[::3].t() + x @ w[5:17, :].T + x * self.first.bias[:12].expand(len(x), 12)
        return x @ self.second.weight.view(12, 12).transpose(0, 1).contiguous() + self.second(x)


VIEWS = [Views, CustomFunction, MODELS["Recurrent"], MODELS["Convolutional"], MODELS["Encoder"], MODELS["WeightNormed"]]


@pytest.mark.parametrize("make", VIEWS)
def test_views_of_weights(make):
    plain, model = distant_pair(make, unit_size=1)
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def test_several_forwards_before_one_backward():
    plain, model = distant_pair(Views)
    for one in (plain, model):
        sum(one.loss(one.data(step)) for step in range(3)).backward()
    assert_same(full_gradients(model), gradients_of(plain))


def test_a_forward_whose_backward_never_comes():
    plain, model = distant_pair(SmallGPT)
    for one in (plain, model):
        one.loss(one.data(0))
        kept = one.loss(one.data(1))
        one.loss(one.data(2)).backward()
        kept.backward()
    assert_same(full_gradients(model), gradients_of(plain))


def test_retain_graph():
    plain, model = distant_pair(Views)
    for one in (plain, model):
        loss = one.loss(one.data(0))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(full_gradients(model), gradients_of(plain))


def test_backward_of_inputs_only():
    plain, model = distant_pair(Views)
    x = plain.data(0)
    grads = []
    for one in (plain, model):
        leaf = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(one(leaf).sum(), leaf)[0])
    assert torch.equal(*grads)
    assert at_rest(model)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("adapters", [False, True])
def test_checkpointing_with_frozen_weights_and_adapters(reentrant, adapters):
    class LoRA(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = nn.Parameter(random(5, 4, base.in_features) / 4)
            self.up = nn.Parameter(random(6, base.out_features, 4) / 4)

        def forward(self, x):
            return self.base(x) + x @ self.down.t() @ self.up.t()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs = nn.Linear(16, 16)
            self.blocks = nn.ModuleList([Block(16) for _ in range(2)]).requires_grad_(not adapters)
            if adapters:
                for block in self.blocks:
                    block.mlp[0] = LoRA(block.mlp[0])

        def loss(self, x):
            x = self.inputs(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.square().mean()

        @staticmethod
        def data(step, size=4):
            return random(step, size, 5, 16)

    plain, model = distant_pair(Model)
    frozen = {name: p.clone() for name, p in plain.named_parameters() if not p.requires_grad}
    state = train_sharded(model, 3)[1]
    assert_same(state, train_plain(plain, 3)[1])
    assert all(torch.equal(state[name], value) for name, value in frozen.items())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert at_rest(model)


def test_checkpointing_that_calls_forward_directly():
    """As in transformers: the recomputation goes round the module's hooks."""

    class Layer(Block):
        def __call__(self, x):
            return checkpoint(self.forward, x, use_reentrant=False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(16) for _ in range(3)])

        def loss(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

        @staticmethod
        def data(step, size=4):
            return random(step, size, 5, 16)

    plain, model = distant_pair(Model)
    assert_same(train_sharded(model, 3)[1], train_plain(plain, 3)[1])
    assert at_rest(model)


def test_a_checkpoint_around_the_whole_model():
    plain, model = distant_pair(SmallGPT)
    for one in (plain, model):
        checkpoint(one.loss, one.data(0), use_reentrant=False).backward()
    assert_same(full_gradients(model), gradients_of(plain))


def test_a_checkpoint_around_several_layers_and_one_inside():
    class Nested(Perceptron):
        def forward(self, x):
            def both(x):
                x = checkpoint(self.layers[0], x, use_reentrant=False)
                return self.layers[1](torch.tanh(x))

            x = checkpoint(both, x, use_reentrant=False)
            return self.layers[3](torch.tanh(self.layers[2](x)))

    plain, model = distant_pair(Nested)
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


@pytest.mark.parametrize("inside", [True, False])
def test_the_users_own_saved_tensor_hooks_are_called(inside):
    """save_on_cpu and hooks that count, entered outside the model and inside it."""

    class Hooked(Perceptron):
        def forward(self, x):
            for layer in self.layers:
                if inside:
                    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                        x = torch.tanh(layer(x))
                else:
                    x = torch.tanh(layer(x))
            return x

    calls = []

    def pack(tensor):
        calls.append("pack")
        return tensor.numpy(force=True).copy()

    def unpack(array):
        calls.append("unpack")
        return torch.from_numpy(array)

    plain, model = distant_pair(Hooked)
    for one in (plain, model):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            one.loss(one.data(0)).backward()
        with torch.autograd.graph.save_on_cpu():
            one.loss(one.data(1)).backward()
    assert calls.count("pack") > 4
    assert_same(full_gradients(model), gradients_of(plain))


def test_nothing_of_the_weights_is_kept_alive_by_the_graph():
    """The memory of a unit is reused although a graph that will use the unit exists."""
    _, model = distant_pair(Perceptron, unit_size=1)
    losses = [model.loss(model.data(step)) for step in range(4)]
    pool = model._zero3_model.pool
    assert pool.retired_nbytes == 0
    assert pool.in_use == 0
    assert pool.nbytes <= 3 * max(unit.nbytes for unit in zero3.units(model))
    del losses


def test_the_graph_dies_with_its_loss():
    _, model = distant_pair(Perceptron)
    gc.disable()
    try:

        def hook(*_):
            """Held by a node of the graph, so it lives as long as the graph."""

        loss = model.loss(model.data(0))
        alive = weakref.ref(hook)
        loss.grad_fn.next_functions[0][0].register_hook(hook)
        del hook
        assert alive() is not None
        del loss
        assert alive() is None
    finally:
        gc.enable()


def test_an_illegal_change_of_an_activation_is_still_found():
    class Illegal(Perceptron):
        def forward(self, x):
            y = self.layers[0](x).exp()
            y.mul_(2)
            return self.layers[1](y)

    _, model = distant_pair(Illegal)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.loss(model.data(0)).backward()


def test_backward_after_the_weights_have_changed_is_an_error():
    _, model = distant_pair(Perceptron)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    early = model.loss(model.data(0))
    model.loss(model.data(1)).backward()
    opt.step()
    with pytest.raises(zero3.StaleViewError, match="layers"):
        early.backward()


@pytest.mark.parametrize("change", ["gathered", "load", "in place"])
def test_so_it_is_whatever_changed_them(change):
    _, model = distant_pair(Perceptron)
    state = dict(model.state_dict())
    early = model.loss(model.data(0))
    if change == "gathered":
        with zero3.gathered(model, modify=True), torch.no_grad():
            model.layers[2].weight.mul_(2)
    elif change == "load":
        model.load_state_dict({name: value + 1 for name, value in state.items()})
    else:
        with torch.no_grad():
            model.layers[2].weight.mul_(2)
    with pytest.raises((zero3.StaleViewError, RuntimeError), match=r"layers|inplace"):
        early.backward()


class AddsOne(torch.optim.Optimizer):
    """Changes what has no gradient, as weight decay and averages do in some optimizers."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.add_(1)


def changed_without_a_gradient(rank, world):
    _, model = distant_pair(Perceptron)
    early = model.loss(model.data(0))
    AddsOne(model.layers[2].parameters()).step()
    with pytest.raises(zero3.StaleViewError, match=r"layers\.2"):
        early.backward()


def test_so_it_is_when_an_optimizer_changes_what_has_no_gradient(ranks):
    one_and_two(ranks, changed_without_a_gradient)


def test_a_change_of_another_parameter_is_no_harm():
    plain, model = distant_pair(Perceptron, unit_size="1GiB")
    for one in (plain, model):
        early = one.layers[0](one.layers[1](one.data(0))).sum()
        with torch.no_grad():
            one.layers[3].weight.mul_(2)
        early.backward()
    assert_same(full_gradients(model), gradients_of(plain))


@pytest.mark.parametrize("changed", [0, 1])
def test_parameters_of_one_shape_share_what_they_show_at_rest_and_no_change(changed):
    class Twins(Regression):
        def __init__(self):
            super().__init__()
            self.twins = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

        def forward(self, x):
            return self.twins[1](self.twins[0](x))

    plain, model = distant_pair(Twins)
    slots = [slot_of(twin.weight) for twin in model.twins]
    assert slots[0].placeholder is slots[1].placeholder
    early = model.twins[0](model.data(0).requires_grad_()).square().sum()
    for one in (plain, model):
        with torch.no_grad():
            one.twins[changed].weight.mul_(2)
    if changed == 0:
        with pytest.raises(zero3.StaleViewError, match=r"twins\.0\.weight"):
            early.backward()
    else:
        early.backward()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])


@pytest.mark.parametrize("through_data", [True, False])
def test_weights_that_forward_itself_rewrites_before_using_them(through_data):
    """Masked and clipped weights: the change is kept, on every use, and backward sees the new values."""

    class Masked(Perceptron):
        def forward(self, x):
            for layer in self.layers:
                mask = torch.ones(12, 12).tril()
                if through_data:
                    layer.weight.data *= mask
                else:
                    with torch.no_grad():
                        layer.weight.mul_(mask)
                x = torch.tanh(layer(x))
            return x

    plain, model = distant_pair(Masked)
    assert_same(train_sharded(model, 3)[1], train_plain(plain, 3)[1])


def test_double_backward_is_refused_with_the_units_name():
    _, model = distant_pair(Perceptron)
    x = model.data(0).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=False)
    assert grad.abs().sum() > 0
    with pytest.raises(zero3.UnsupportedError, match=r"layers\.3"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_weight_kept_by_the_caller_keeps_its_values():
    """A view of a gathered weight that is held on to is not overwritten by the next unit."""
    plain, model = distant_pair(Perceptron, unit_size=1)
    kept, wanted = [], [layer.weight[:3].detach().clone() for layer in plain.layers]
    for layer in model.layers:
        layer.register_forward_hook(lambda layer, *_: kept.append(layer.weight.detach()[:3]))
    model(model.data(0))
    model(model.data(1))
    assert all(torch.equal(a, b) for a, b in zip(kept[:4], wanted, strict=True))


def test_amp_autocast_keeps_copies_of_weights():
    plain, model = distant_pair(Perceptron)
    for one in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = one.loss(one.data(0)) + one.loss(one.data(1))
        loss.backward()
    assert_same(full_gradients(model), gradients_of(plain))


@pytest.mark.parametrize("keep", [lambda tensor: tensor, lambda tensor: tensor.cpu()])
def test_hooks_of_the_user_that_keep_the_parameters_themselves(keep):
    """Backward uses the Parameter objects then, past our own hooks."""

    class Kept(Regression):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.out = nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 12)
            self.keeps = True

        def forward(self, x):
            x = self.first(x)
            if not self.keeps:
                return self.out(F.layer_norm(x, (12,), self.norm.weight, self.norm.bias))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                x = F.layer_norm(x, (12,), self.norm.weight, self.norm.bias)
            return self.out(x)

    plain, model = distant_pair(Kept, unit_size="1GiB")
    for one in (plain, model):
        early = one.loss(one.data(0))
        one.keeps = False
        later = one.loss(one.data(1))
        later.backward()
        early.backward()
    assert_same(full_gradients(model), gradients_of(plain))


class KeptInContext(torch.autograd.Function):
    """Keeps the Parameter itself, and looks at its memory in backward as an extension does: no class is asked."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ raw_data(ctx.weight).t(), x.t() @ grad


class KeepsItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(random(0, 12, 12)), nn.Parameter(random(1, 12))

    def forward(self, x):
        return F.layer_norm(KeptInContext.apply(x, self.weight), (12,), self.scale)


def test_backward_shows_values_to_who_keeps_a_parameter_and_leaves_the_others_released():
    class Mixed(Regression):
        def __init__(self):
            super().__init__()
            self.first, self.keeps, self.last = nn.Linear(12, 12), KeepsItsWeight(), nn.Linear(12, 12)

        def forward(self, x):
            return self.last(torch.tanh(self.keeps(torch.tanh(self.first(x)))))

    plain, model = distant_pair(Mixed, unit_size=1)
    hidden = {}
    for name, module in model.named_children():
        one = next(module.parameters())
        one.register_hook(lambda _, name=name, one=one: hidden.update({name: raw_data(one).isnan().any().item()}))
    for step in range(2):
        for one in (plain, model):
            one.loss(one.data(step)).backward()
    assert_same(full_gradients(model), gradients_of(plain))
    assert hidden == {"first": True, "keeps": False, "last": True}


def test_what_saves_a_parameter_again_shares_its_view_until_the_values_change():
    _, model = distant_pair(Perceptron, unit_size="1GiB")
    (unit,) = zero3.units(model)
    assert not unit.has_saved_views
    early, again = (model.loss(model.data(step)) for step in range(2))
    shared = set(map(id, unit.shared_views.values()))
    assert len(shared) == 3  # the first layer's input needs no gradient
    again.backward()
    assert set(map(id, unit.shared_views.values())) == shared
    assert unit.has_saved_views
    with torch.no_grad():
        model.layers[1].weight.mul_(2)
    changed = model.loss(model.data(2))
    assert len(shared & set(map(id, unit.shared_views.values()))) == 2
    changed.backward()
    assert unit.has_saved_views
    with pytest.raises(zero3.StaleViewError, match=r"layers\.1"):
        early.backward()
    del early, again, changed
    gc.collect()  # of the traceback
    assert not unit.has_saved_views
