"""One rank against plain torch: losses, weights and buffers after several steps, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from zero3_models import MODELS, Perceptron, SmallGPT
from zero3_testing import (
    DistantStore,
    assert_same,
    at_rest,
    full_gradients,
    plain_gradients,
    train_plain,
    train_sharded,
)

import zero3
from zero3.shard_store import InMemoryStore

STORES = {"distant": DistantStore, "in memory": lambda: InMemoryStore(torch.device("cpu"))}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def built_twice(make):
    """The same initial values, in two models."""
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    return plain, make()


@every_model
@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_training_is_bit_equal(make, store, poison):
    plain, model = built_twice(make)
    zero3.shard(model, store=store())
    losses, state = train_sharded(model, 3)
    wanted_losses, wanted = train_plain(plain, 3)
    assert [[loss] for loss in losses] == wanted_losses
    assert_same(state, wanted)


@every_model
def test_gradients_are_bit_equal_and_nothing_stays_gathered(make, poison):
    plain, model = built_twice(make)
    zero3.shard(model, store=DistantStore())
    losses, wanted = plain_gradients(plain, plain.data(0))
    loss = model.loss(model.data(0))
    loss.backward()
    assert [loss.item()] == losses
    assert_same(full_gradients(model), wanted)
    assert at_rest(model)


@every_model
def test_names_shapes_and_dtypes_are_the_plain_models(make):
    plain, model = built_twice(make)
    zero3.shard(model, store=DistantStore())
    found = [(name, param.shape, param.ndim, param.dtype) for name, param in model.named_parameters()]
    assert found == [(name, param.shape, param.ndim, param.dtype) for name, param in plain.named_parameters()]


@pytest.mark.parametrize("unit_size", [1, "4KiB", "1GiB", "auto"])
def test_the_size_of_units_changes_no_number(unit_size):
    plain, model = built_twice(SmallGPT)
    zero3.shard(model, store=DistantStore(), unit_size=unit_size)
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def test_one_unit_may_be_gathered_at_a_time():
    _, model = built_twice(Perceptron)
    zero3.shard(model, store=DistantStore())
    most = 0

    def count(*_):
        nonlocal most
        most = max(most, sum(str(unit.state) != "SHARDED" for unit in zero3.units(model)))

    for layer in model.layers:
        layer.register_forward_hook(count)
        layer.register_full_backward_hook(count)
    model.loss(model.data(0)).backward()
    assert most <= 2


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=False),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        lambda params: torch.optim.RMSprop(params, lr=0.01),
        lambda params: torch.optim.Adagrad(params, lr=0.01),
        lambda params: torch.optim.Adadelta(params),
        lambda params: torch.optim.NAdam(params),
        lambda params: torch.optim.RAdam(params),
        lambda params: torch.optim.Adamax(params),
        lambda params: torch.optim.ASGD(params),
        lambda params: torch.optim.Rprop(params),
    ],
)
def test_any_element_wise_optimizer(optimizer):
    plain, model = built_twice(Perceptron)
    zero3.shard(model, store=DistantStore())
    assert_same(train_sharded(model, 3, optimizer=optimizer)[1], train_plain(plain, 3, optimizer=optimizer)[1])


def test_groups_by_ndim_and_a_schedule():
    def optimizer(params):
        matrices = [p for p in params if p.ndim >= 2]
        others = [p for p in params if p.ndim < 2]
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)

    plain, model = built_twice(SmallGPT)
    zero3.shard(model, store=DistantStore())
    states = []
    for one in (plain, model):
        opt = optimizer(list(one.parameters()))
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        for step in range(3):
            one.loss(one.data(step)).backward()
            opt.step()
            schedule.step()
            opt.zero_grad()
        states.append(dict(one.state_dict()))
    assert_same(states[1], states[0])


def test_several_steps_in_bfloat16_use_the_full_precision_shard():
    plain, model = built_twice(Perceptron)
    zero3.shard(model, store=DistantStore(), dtype=torch.bfloat16)
    master = {name: value.detach().clone() for name, value in plain.named_parameters()}
    opt_plain, opt = torch.optim.SGD(master.values(), lr=0.01), torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        x = model.data(step).bfloat16()
        half = {name: value.detach().bfloat16().requires_grad_() for name, value in master.items()}
        torch.func.functional_call(plain, half, x).square().mean().backward()
        for name, value in master.items():
            value.grad = half[name].grad.float()
        opt_plain.step()
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    found = model.state_dict()
    assert all(value.dtype == torch.float32 for value in found.values())
    assert_same(found, {name: value.detach() for name, value in master.items()})


def test_evaluation_and_generation_between_steps():
    plain, model = built_twice(SmallGPT)
    zero3.shard(model, store=DistantStore())
    outcomes = []
    for one in (plain, model):
        opt = torch.optim.AdamW(one.parameters(), lr=0.01)
        outcome = []
        for step in range(3):
            one.train()
            one.loss(one.data(step)).backward()
            one.eval()
            with torch.no_grad():
                tokens = one.data(7, size=1, length=3)
                for _ in range(4):
                    tokens = torch.cat([tokens, one(tokens)[:, -1:].argmax(-1)], 1)
            outcome.append(tokens)
            opt.step()
            opt.zero_grad()
            with torch.inference_mode():
                outcome.append(one(one.data(8)).sum())
        outcomes.append(outcome)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert at_rest(model)


def test_gradients_of_a_model_that_was_partitioned_in_inference_mode():
    plain, model = built_twice(Perceptron)
    with torch.inference_mode():
        zero3.shard(model, store=DistantStore())
    for one in (plain, model):
        one.loss(one.data(0)).backward()
    assert_same(full_gradients(model), {name: param.grad for name, param in plain.named_parameters()})


def test_loss_outside_the_model_and_backward_of_a_tensor():
    plain, model = built_twice(Perceptron)
    zero3.shard(model, store=DistantStore())
    x, grad = plain.data(0), plain.data(1)
    plain(x).backward(grad)
    model(x).backward(grad)
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    assert_same(full_gradients(model), wanted)


def test_one_loss_over_two_models():
    """Two partitioned models, one feeding the other, and their weights side by side in one expression."""
    (plain1, model1), (plain2, model2) = built_twice(Perceptron), built_twice(Perceptron)
    zero3.shard(model1, store=DistantStore())
    zero3.shard(model2, store=DistantStore())
    states = []
    for first, second in ((plain1, plain2), (model1, model2)):
        opt = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.01)
        for step in range(3):
            x = first.data(step)
            penalty = (first.layers[0].weight - second.layers[3].weight).square().sum()
            (second(first(x)).square().mean() + first(x).mean() + 0.1 * penalty).backward()
            opt.step()
            opt.zero_grad()
        states.append({**first.state_dict(prefix="1."), **second.state_dict(prefix="2.")})
    assert_same(states[1], states[0])


def test_parameters_to_vector_and_other_readers_of_all_parameters():
    plain, model = built_twice(SmallGPT)
    zero3.shard(model, store=DistantStore())
    assert torch.equal(parameters_to_vector(model.parameters()), parameters_to_vector(plain.parameters()))
    norms = [torch.linalg.vector_norm(p) for p in plain.parameters()]
    assert all(
        torch.equal(torch.linalg.vector_norm(p), norm) for p, norm in zip(model.parameters(), norms, strict=True)
    )


PENALTIES = {
    "square": lambda p: p.square().sum(),
    "norm": lambda p: p.norm(),
    "twice": lambda p: p.pow(2).sum() + p.exp().mean(),
    "view": lambda p: p.view(-1).pow(3).sum(),
    "with another's": lambda p: (p * p.detach().sin()).sum(),
}


@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("first", [True, False], ids=["before forward", "after it"])
def test_parameters_used_outside_of_any_forward_are_differentiated(penalty, first):
    """By many units, of which only a few stay gathered; with and without a part of the model in the graph."""
    for whole in (True, False):
        plain, model = built_twice(Perceptron)
        zero3.shard(model, store=DistantStore(), unit_size=1)
        assert len(zero3.units(model)) > 3
        gradients = []
        for one in (plain, model):
            terms = [lambda one=one: sum(penalty(p) for p in one.parameters())]
            terms += [lambda one=one: one.loss(one.data(0))] if whole else []
            loss = sum(term() for term in (terms if first else reversed(terms)))
            one.loss(one.data(1))  # another forward in between
            loss.backward()
            gradients.append({name: p.grad.as_subclass(torch.Tensor) for name, p in one.named_parameters()})
        assert_same(gradients[1], gradients[0])


def test_a_graph_of_gathered_parameters_is_refused_once_they_are_released():
    _, model = built_twice(Perceptron)
    zero3.shard(model, store=DistantStore(), unit_size=1)
    with zero3.gathered(model):
        sum(p.square().sum() for p in model.parameters()).backward()  # inside: as plain torch
        loss = sum(p.square().sum() for p in model.parameters())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_penalty_on_all_parameters_is_differentiated():
    plain, model = built_twice(SmallGPT)
    zero3.shard(model, store=DistantStore())
    gradients = []
    for one in (plain, model):
        penalty = sum(p.square().sum() for p in one.parameters())
        (one.loss(one.data(0)) + 0.01 * penalty).backward()
        gradients.append({name: p.grad.as_subclass(torch.Tensor) for name, p in one.named_parameters()})
    assert_same(gradients[1], gradients[0])
