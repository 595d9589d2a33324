"""Accumulation, no_sync, zero_grad, loss scaling: what happens between backward and step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero3_models import Perceptron, Regression, SharedBlock, SmallGPT
from zero3_testing import (
    DistantStore,
    adamw,
    assert_close,
    assert_same,
    at_rest,
    full_gradients,
    gradients_of,
    one_and_two,
    pair,
    parts,
    plain_gradients,
    state_of,
)

import zero3


def accumulated(rank, world, synced):
    """4 micro-batches, 3 steps, against plain torch accumulating the same micro-batches in the same order."""
    plain, model = pair(Perceptron, store=DistantStore())
    opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
    for step in range(3):
        per_rank = []
        for part in range(world):
            plain.zero_grad()
            for micro in range(4):
                plain.loss(parts(plain.data(4 * step + micro), world)[part]).backward()
            per_rank.append({name: grad.clone() for name, grad in gradients_of(plain).items()})
        for name, param in plain.named_parameters():
            param.grad = sum(grads[name] for grads in per_rank) / world
        for micro in range(4):
            data = parts(model.data(4 * step + micro), world)[rank]
            if synced or micro == 3:
                model.loss(data).backward()
            else:
                with zero3.no_sync(model):
                    model.loss(data).backward()
        if synced and world > 1:  # sums of means, instead of the mean of sums: another order of the same terms
            assert_close(full_gradients(model), gradients_of(plain), 1e-6)
        else:
            assert_same(full_gradients(model), gradients_of(plain))
        opt_plain.step()
        opt.step()
        opt.zero_grad()
    if not synced or world == 1:
        assert_same(state_of(model), state_of(plain))
    assert at_rest(model)


@pytest.mark.parametrize("synced", [True, False])
def test_accumulation(ranks, synced):
    one_and_two(ranks, accumulated, synced)


def communicated(rank, world):
    """Inside no_sync nothing is sent; the first backward outside reduces all."""
    _, model = pair(Perceptron)
    sent = []
    send = type(model._zero3_model.ranks).send
    type(model._zero3_model.ranks).send = lambda self, tensor, to, tag: (
        sent.append(tag % 2) or send(self, tensor, to, tag)
    )
    try:
        with zero3.no_sync(model):
            model.loss(parts(model.data(0), world)[rank]).backward()
            assert 1 not in sent
        model.loss(parts(model.data(1), world)[rank]).backward()
        assert sum(sent) == len(zero3.units(model))
    finally:
        type(model._zero3_model.ranks).send = send


def test_no_sync_sends_no_gradient(ranks):
    ranks(communicated, 2)


def zeroed(rank, world):
    """zero_grad() before, between forward and backward, in between micro-batches, and to zeros instead of None."""
    plain, model = pair(SmallGPT, store=DistantStore())
    for set_to_none in (True, False):
        model.loss(parts(model.data(0), world)[rank]).backward()
        loss = model.loss(parts(model.data(1), world)[rank])
        model.zero_grad(set_to_none=set_to_none)
        loss.backward()
        _, wanted = plain_gradients(plain, plain.data(1), world)
        found = full_gradients(model)
        assert_same({name: found[name] for name in wanted}, wanted)
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
        assert all(p.grad is None for p in model.parameters())
        assert full_gradients(model) == {}


def test_zero_grad_reaches_the_shard_whenever_it_is_called(ranks):
    one_and_two(ranks, zeroed)


def test_no_sync_and_zero_grad():
    plain, model = pair(Perceptron, store=DistantStore())
    with zero3.no_sync(model):
        model.loss(model.data(0)).backward()
    model.zero_grad()
    model.loss(model.data(1)).backward()
    assert_same(full_gradients(model), plain_gradients(plain, plain.data(1))[1])


class Overflows(Perceptron):
    """A loss that is infinite on the second batch, in parameters that rank 0 does not hold."""

    def loss(self, x):
        return self(x).square().mean() * (float("inf") if x.sum() > 1e4 else 1.0)

    @classmethod
    def data(cls, step, size=4):
        data = super().data(step, size)
        if step == 1:
            data[-1] = 1e5
        return data


def scaled(rank, world):
    """torch's GradScaler: the step with an infinite gradient is skipped on both ranks, the scale is halved."""
    plain, model = pair(Overflows, store=DistantStore())
    outcomes = []
    for one in (plain, model):
        opt = torch.optim.SGD(one.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        scales = []
        for step in range(3):
            if one is plain:
                summed = {}
                for part in parts(one.data(step), world):
                    opt.zero_grad()
                    scaler.scale(one.loss(part)).backward()
                    for name, grad in gradients_of(one).items():
                        summed[name] = grad.clone() if name not in summed else summed[name] + grad
                for name, param in one.named_parameters():
                    param.grad = summed[name] / world
            else:
                scaler.scale(one.loss(parts(one.data(step), world)[rank])).backward()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            scales.append(scaler.get_scale())
        outcomes.append((scales, state_of(one)))
    assert outcomes[0][0] == outcomes[1][0] == [256.0, 128.0, 128.0]
    assert_same(outcomes[1][1], outcomes[0][1])


def test_grad_scaler_skips_on_all_ranks(ranks):
    one_and_two(ranks, scaled)


class ReentrantShared(SharedBlock):
    """One block in several reentrant segments: its gradient completes several times in one backward."""

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(3):
            x = x + checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


class NonReentrantShared(SharedBlock):
    def forward(self, x):
        for _ in range(3):
            x = x + checkpoint(self.block, x, use_reentrant=False)
        return self.head(x)


def shared(rank, world):
    for make in (SharedBlock, ReentrantShared, NonReentrantShared):
        plain, model = pair(make, store=DistantStore())
        opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
        for step in range(3):
            plain_gradients(plain, plain.data(step), world)
            model.loss(parts(model.data(step), world)[rank]).backward()
            compare = assert_same if make is not ReentrantShared or world == 1 else assert_close
            compare(full_gradients(model), gradients_of(plain))
            opt_plain.step()
            opt.step()
            opt.zero_grad()
        assert at_rest(model)


def test_a_block_applied_several_times(ranks):
    one_and_two(ranks, shared)


def test_hooks_of_the_user_see_what_they_see_in_plain_torch():
    plain, model = pair(Perceptron, store=DistantStore())
    seen = {}
    for one in (plain, model):
        seen[one] = []
        for layer in one.layers:
            layer.weight.register_hook(lambda grad, one=one: seen[one].append(grad.clone()))
            layer.bias.register_hook(lambda grad: 2 * grad)
        one.loss(one.data(0)).backward()
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))
    assert_same(full_gradients(model), gradients_of(plain))


def test_assigned_gradients_are_used():
    plain, model = pair(Perceptron, store=DistantStore())
    for one in (plain, model):
        one.loss(one.data(0)).backward()
        one.layers[0].weight.grad = one.layers[0].weight.grad * 3
        one.layers[1].bias.grad = torch.ones(12)
        one.layers[2].bias.grad.mul_(2)
        one.layers[3].bias.grad = None
        adamw(one.parameters()).step()
    assert_same(state_of(model), state_of(plain))


def through_data(rank, world):
    """`param.grad.data = values` is an assignment to the gradient, and `set_` too."""
    plain, model = pair(Perceptron, store=DistantStore())
    plain_gradients(plain, plain.data(0), world)
    model.loss(parts(model.data(0), world)[rank]).backward()
    for one in (plain, model):
        one.layers[0].weight.grad.data = one.layers[0].weight.grad.data * 3
        one.layers[1].weight.grad.set_(one.layers[1].weight.grad.detach() * 2)
    assert_same(full_gradients(model), gradients_of(plain))
    with pytest.raises(zero3.UnsupportedError, match="cannot become"):
        model.layers[0].weight.grad.data = torch.ones(3)


def test_values_put_under_a_gradient(ranks):
    one_and_two(ranks, through_data)


def written_in_no_sync(rank, world):
    """Gradients that user code changes while they wait unreduced; both ranks have the same batch."""
    plain, model = pair(Perceptron, store=DistantStore())
    opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
    for step in range(2):
        for one in (plain, model):
            with zero3.no_sync(model):
                one.loss(one.data(step)).backward()
                one.layers[0].weight.grad = one.layers[0].weight.grad * 3
                one.layers[1].weight.grad.mul_(2)
                one.layers[2].weight.grad = None
                one.layers[1].bias.grad = None
                one.layers[1].bias.grad = torch.ones(one.layers[1].bias.shape)
                one.layers[3].weight.grad.data = one.layers[3].weight.grad.data + 1
            one.loss(one.data(step + 2)).backward()
        for optimizer in (opt_plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(state_of(model), state_of(plain))


def test_gradients_that_are_written_while_they_wait_unreduced(ranks):
    one_and_two(ranks, written_in_no_sync)


def test_a_gradient_of_another_shape_is_refused():
    _, model = pair(Perceptron, store=DistantStore())
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight|shape"):
        model.layers[0].weight.grad = torch.ones(3)


def frozen_and_thawed(rank, world):
    """requires_grad toggled between steps, from both sides, and parameters added to the optimizer later."""
    plain, model = pair(Perceptron, store=DistantStore())
    opt_plain, opt = (torch.optim.AdamW(one.layers[3].parameters(), lr=0.01) for one in (plain, model))
    for one in (plain, model):
        one.layers[:3].requires_grad_(False)
    for step in range(5):
        for one, optimizer in ((plain, opt_plain), (model, opt)):
            if step == 2:
                one.layers[1].requires_grad_(True)
                one.layers[3].requires_grad_(False)
                optimizer.add_param_group({"params": list(one.layers[1].parameters()), "lr": 0.05})
            if step == 4:
                one.layers[3].bias.requires_grad_(True)
        plain_gradients(plain, plain.data(step), world)
        model.loss(parts(model.data(step), world)[rank]).backward()
        assert_same(full_gradients(model), gradients_of(plain))
        for optimizer in (opt_plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(state_of(model), state_of(plain))
    assert at_rest(model)


def test_frozen_and_thawed_between_steps(ranks):
    one_and_two(ranks, frozen_and_thawed)


def test_missing_grads_names_what_got_no_gradient():
    model = zero3.shard(SmallGPT(), store=DistantStore())
    model.holder.weight.requires_grad_(False)
    model.loss(model.data(0)).backward()
    assert zero3.missing_grads(model) == ["holder.bias"]
    plain = zero3.shard(SmallGPT())
    plain.loss(plain.data(0)).backward()
    assert zero3.missing_grads(plain) == ["holder.bias"]


def test_an_optimizer_step_that_raises_and_is_tried_again():
    plain, model = pair(Perceptron, store=DistantStore())

    class Fails(torch.optim.SGD):
        fail = True

        @torch.no_grad()
        def step(self, closure=None):
            if self.fail:
                raise RuntimeError("the step fails")
            return super().step(closure)

    for one in (plain, model):
        opt = Fails(one.parameters(), lr=0.1)
        one.loss(one.data(0)).backward()
        with pytest.raises(RuntimeError, match="the step fails"):
            opt.step()
        one.loss(one.data(1)).backward()
        opt.fail = False
        opt.step()
        opt.zero_grad()
    assert_same(state_of(model), state_of(plain))
    assert_same(full_gradients(model), {})


def with_closure(rank, world):
    plain, model = pair(Perceptron, store=DistantStore())
    losses = {}
    for one in (plain, model):
        opt = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)

        def closure(step, one=one, opt=opt):
            opt.zero_grad()
            if one is plain:
                return plain_gradients(plain, plain.data(step), world)[0][rank]
            loss = one.loss(parts(one.data(step), world)[rank])
            loss.backward()
            return loss.item()

        first, second = partial(closure, 0), partial(closure, 1)
        losses[one] = [opt.step(first), opt.step(closure=second), opt.step(first)]
    assert losses[plain] == losses[model]
    assert_same(state_of(model), state_of(plain))


def test_a_step_with_a_closure(ranks):
    one_and_two(ranks, with_closure)


def only_no_sync(rank, world):
    """A step after backwards that were all inside no_sync: what waits is reduced then."""
    plain, model = pair(Perceptron, store=DistantStore())
    plain_gradients(plain, plain.data(0), world)
    with zero3.no_sync(model):
        model.loss(parts(model.data(0), world)[rank]).backward()
        own = plain_gradients(pair(Perceptron)[0], parts(model.data(0), world)[rank])[1]
        assert_same({name: p.grad for name, p in model.named_parameters()}, own)
    adamw(plain.parameters()).step()
    adamw(model.parameters()).step()
    assert_same(state_of(model), state_of(plain))


def test_a_step_after_no_sync_reduces_what_waits(ranks):
    one_and_two(ranks, only_no_sync)


class Raises(Perceptron):
    """Raises in forward, or in the middle of backward, when told so."""

    where = None

    def forward(self, x):
        for position, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if position == 1 and self.where == "forward":
                raise ValueError("in forward")
            if position == 1 and self.where == "backward":
                x.register_hook(self.fail)
        return x

    def fail(self, grad):
        raise ValueError("in backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_after_an_exception(where):
    """Nothing stays gathered, and nothing of the half gradient is added."""
    plain, model = pair(Raises, store=DistantStore())
    opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
    for step in range(3):
        if step == 1:
            model.where = where
            with pytest.raises(ValueError, match="in " + where):
                model.loss(model.data(7)).backward()
            model.where = None
            opt.zero_grad()
            assert at_rest(model)
            assert all(p.grad is None for p in model.parameters())
        for one in (plain, model):
            one.loss(one.data(step)).backward()
        opt_plain.step()
        opt.step()
        opt.zero_grad()
        opt_plain.zero_grad()
    assert_same(state_of(model), state_of(plain))


def test_an_exception_in_the_middle_of_a_units_backward():
    class Model(Raises):
        def __init__(self):
            super().__init__()
            zero3.as_unit(self)

    plain, model = pair(Model, store=DistantStore())
    model.where = "backward"
    with pytest.raises(ValueError, match="in backward"):
        model.loss(model.data(7)).backward()
    assert all(p.grad is None for p in model.parameters())
    assert at_rest(model)
    model.where = None
    for one in (plain, model):
        one.loss(one.data(0)).backward()
    assert_same(full_gradients(model), gradients_of(plain))


def half_done(rank, world):
    """Both ranks fail in backward, at the same place; then they go on."""
    plain, model = pair(Raises)
    model.where = "backward"
    try:
        model.loss(parts(model.data(7), world)[rank]).backward()
        raise AssertionError("backward did not fail")
    except ValueError:
        model.where = None
    model.zero_grad()
    _, wanted = plain_gradients(plain, plain.data(0), world)
    model.loss(parts(model.data(0), world)[rank]).backward()
    assert_same(full_gradients(model), wanted)


def test_two_ranks_go_on_after_an_exception(ranks):
    ranks(half_done, 2)


def test_gradients_flow_to_the_inputs_of_a_frozen_model():
    plain, model = pair(lambda: SmallGPT().requires_grad_(False), store=DistantStore())
    prompts = []
    for one in (plain, model):
        prompt = nn.Parameter(torch.zeros(1, 1, 32))
        x = one.embedding(one.data(0)) + prompt
        for block in one.blocks:
            x = block(x)
        one.norm(x).square().sum().backward()
        prompts.append(prompt.grad)
    assert torch.equal(*prompts)
    assert at_rest(model)


class Sparse(Regression):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 12, sparse=True)

    def forward(self, x):
        return self.embedding(torch.arange(len(x))) * x


def test_sparse_gradients_are_refused():
    _, model = pair(Sparse, store=DistantStore())
    with pytest.raises(zero3.UnsupportedError, match=r"embedding\.weight.*sparse=False"):
        model.loss(model.data(0)).backward()


class NoBiasGradient(torch.autograd.Function):
    """A linear layer whose author gives no gradient for the bias."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None


class Biased(Regression):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        return NoBiasGradient.apply(x, self.layer.weight, self.layer.bias)


def test_a_function_that_gives_no_gradient_for_one_of_a_units_parameters():
    plain, model = pair(Biased, store=DistantStore())
    for one in (plain, model):
        one.loss(one.data(0)).backward()
    assert_same(full_gradients(model), gradients_of(plain))
    assert zero3.missing_grads(model) == ["layer.bias"]


def test_a_gradient_that_is_kept_past_zero_grad_stays_and_others_give_their_memory_on():
    model = zero3.shard(Perceptron(), store=DistantStore(), unit_size=1)

    def step(number):
        model.loss(model.data(number)).backward()
        return [param.grad for param in model.parameters()]

    kept = step(0)
    values = [grad.clone() for grad in kept]
    model.zero_grad()
    addresses = {grad.data_ptr() for grad in step(1)}
    assert_same(dict(enumerate(kept)), dict(enumerate(values)))
    assert addresses.isdisjoint(grad.data_ptr() for grad in kept)
    model.zero_grad()
    assert addresses == {grad.data_ptr() for grad in step(2)}
