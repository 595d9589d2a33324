"""Norms of gradients that lie in parts, and clipping by them."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from zero3_models import Perceptron, SmallGPT
from zero3_testing import (
    DistantStore,
    adamw,
    assert_close,
    assert_same,
    full_gradients,
    gradients_of,
    one_and_two,
    pair,
    parts,
    plain_gradients,
    state_of,
)

import zero3


def clipped(rank, world, helper, max_norm):
    """The norm is the whole model's, an unused parameter counts as nothing, the update is the clipped plain one."""
    plain, model = pair(SmallGPT, store=DistantStore())
    opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
    for step in range(2):
        plain_gradients(plain, plain.data(step), world)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        model.loss(parts(model.data(step), world)[rank]).backward()
        if helper == "torch":
            found = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        else:
            found = zero3.clip_grad_norm_(model, max_norm)
        assert found.ndim == 0
        torch.testing.assert_close(found.as_subclass(torch.Tensor), wanted, rtol=2e-6, atol=0)
        assert_close(full_gradients(model), gradients_of(plain), 1e-5)
        opt_plain.step()
        opt.step()
        opt.zero_grad()
    assert_close(state_of(model), state_of(plain), 2e-3)  # noise in key biases becomes steps of lr; see MECHANISMS
    return float(found)


@pytest.mark.parametrize("helper", ["torch", "zero3"])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_uses_the_norm_of_the_whole_gradient(ranks, helper, max_norm):
    clipped(0, 1, helper, max_norm)
    one, other = ranks(clipped, 2, helper, max_norm)
    assert one == other


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_any_order_through_torch(ranks, order):
    ranks(norm_of_order, 2, order)


def norm_of_order(rank, world, order):
    plain, model = pair(Perceptron)
    plain_gradients(plain, plain.data(0), world)
    model.loss(parts(model.data(0), world)[rank]).backward()
    for foreach in (None, True, False):
        found = nn.utils.clip_grad_norm_(model.parameters(), 1e6, norm_type=order, foreach=foreach)
        wanted = nn.utils.clip_grad_norm_(plain.parameters(), 1e6, norm_type=order)
        torch.testing.assert_close(found.as_subclass(torch.Tensor), wanted, rtol=2e-6, atol=0)
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()], order)
    torch.testing.assert_close(total.as_subclass(torch.Tensor), wanted, rtol=2e-6, atol=0)


def other_norms(rank, world):
    """Of the whole gradient, however it is asked for; what is no norm of all elements together is refused."""
    plain, model = pair(Perceptron)
    plain_gradients(plain, plain.data(0), world)
    model.loss(parts(model.data(0), world)[rank]).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        for norm in (Tensor.norm, torch.linalg.norm, partial(Tensor.norm, p=3), partial(torch.norm, p="fro")):
            torch.testing.assert_close(norm(one.grad).as_subclass(Tensor), norm(other.grad), rtol=2e-6, atol=0)
    matrix = model.layers[0].weight
    for norm in (partial(Tensor.norm, dim=1), partial(torch.linalg.norm, ord=2), partial(torch.norm, p="nuc")):
        with pytest.raises(zero3.UnsupportedError, match=r"layers\.0\.weight"):
            norm(matrix.grad)


def test_norms_as_people_ask_for_them(ranks):
    ranks(other_norms, 2)


def norms_of_copies(rank, world):
    """The norm is asked of a copy of the gradient as often as of the gradient itself."""
    plain, model = pair(Perceptron)
    plain_gradients(plain, plain.data(0), world)
    model.loss(parts(model.data(0), world)[rank]).backward()
    copies = [
        lambda grad: grad.data, Tensor.detach, Tensor.clone, Tensor.double, lambda grad: grad.to(torch.float64),
        copy.deepcopy, lambda grad: grad / 4, lambda grad: 0.5 * grad, lambda grad: -grad,
        lambda grad: grad.detach().view(-1).abs(),
    ]  # fmt: skip
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        for copied in copies:
            found = copied(one.grad).norm(2)
            torch.testing.assert_close(found.as_subclass(Tensor), copied(other.grad).norm(2), rtol=2e-6, atol=0)
    kept = io.BytesIO()
    torch.save(one.grad.clone(), kept)
    kept.seek(0)
    assert torch.equal(torch.load(kept), one.grad.as_subclass(Tensor))


def test_norms_of_copies(ranks):
    ranks(norms_of_copies, 2)


class Waves(nn.Module):
    """A complex parameter among real ones."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def loss(self, x):
        return torch.fft.irfft(torch.fft.rfft(self(x)) * self.filter, n=8).square().mean()

    def forward(self, x):
        return self.inner(x)

    @staticmethod
    def data(step, size=4):
        return torch.randn(size, 8, generator=torch.Generator().manual_seed(step))


def complex_clipped(rank, world, helper):
    """The imaginary part counts, and is scaled."""
    plain, model = pair(Waves, store=DistantStore())
    plain_gradients(plain, plain.data(0), world)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    model.loss(parts(model.data(0), world)[rank]).backward()
    if helper == "torch":
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        found = zero3.clip_grad_norm_(model, 0.1)
    torch.testing.assert_close(found.as_subclass(Tensor), wanted, rtol=2e-6, atol=0)
    assert_close(full_gradients(model), gradients_of(plain), 1e-5)


@pytest.mark.parametrize("helper", ["torch", "zero3"])
def test_clipping_counts_complex_gradients_whole(ranks, helper):
    one_and_two(ranks, complex_clipped, helper)


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_clipping_where_the_norm_is_not_finite_is_as_torchs(scale):
    plain, model = pair(Perceptron, store=DistantStore())
    for one in (plain, model):
        (one.loss(one.data(0)) + scale * one.layers[0].bias[0]).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    zero3.clip_grad_norm_(model, 1.0)
    found, wanted = full_gradients(model), gradients_of(plain)
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=0, atol=0, equal_nan=True)


def test_clipping_by_value():
    plain, model = pair(Perceptron, store=DistantStore())
    plain_gradients(plain, plain.data(0))
    model.loss(model.data(0)).backward()
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert_same(full_gradients(model), gradients_of(plain))
