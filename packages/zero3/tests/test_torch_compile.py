"""torch.compile looks past our hooks: a compiled model trains as the same one does uncompiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zero3_models import Perceptron, SmallGPT
from zero3_testing import DistantStore, assert_same, at_rest, pair, state_of, train_plain, train_sharded

import zero3


class Compiler:
    """A backend of torch.compile that runs each graph as it is, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, _examples):
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


@pytest.mark.parametrize("store", [DistantStore, lambda: None], ids=["distant", "default"])
@pytest.mark.parametrize("make", [Perceptron, SmallGPT])
def test_the_whole_model(compiler, store, make, poison):
    plain, model = pair(make, store=store(), unit_size=1024)
    model.compile(backend=compiler)
    assert_same(train_sharded(model, 3)[1], train_plain(plain, 3)[1])
    assert compiler.graphs
    assert at_rest(model)


def test_through_autograd_of_the_compiler():
    torch._dynamo.reset()
    plain, model = pair(Perceptron, store=DistantStore(), unit_size=1024)
    model.compile(backend="aot_eager")
    plain.compile(backend="aot_eager")
    assert_same(train_sharded(model, 3)[1], train_plain(plain, 3)[1])


def test_each_block_by_itself(compiler):
    plain, model = pair(SmallGPT, store=DistantStore(), unit_size=1024)
    for block in model.blocks:
        block.compile(backend=compiler)
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])
    assert compiler.graphs


def test_a_step_that_calls_the_model(compiler):
    _, model = pair(Perceptron, store=DistantStore(), unit_size=1024)
    wanted = model.loss(model.data(0))
    assert torch.equal(torch.compile(model.loss, backend=compiler)(model.data(0)), wanted)
    with torch.no_grad():
        assert torch.equal(torch.compile(model.loss, backend=compiler)(model.data(0)), wanted)
    assert at_rest(model)


def compiled_on_ranks(rank, world):
    torch._dynamo.reset()
    plain, model = pair(Perceptron, unit_size=1024)
    compiler = Compiler()
    model.compile(backend=compiler)
    found = train_sharded(model, 2, rank, world)[1]
    assert compiler.graphs
    assert_same(found, train_plain(plain, 2, world)[1])


def test_two_ranks(ranks):
    ranks(compiled_on_ranks, 2)


def test_an_error_inside_releases_what_was_gathered(compiler):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            x = self.inner(x)
            raise ValueError("stop")

    model = zero3.shard(nn.Sequential(nn.Linear(4, 4), Fails()), store=DistantStore(), unit_size=64)
    model.compile(backend=compiler)
    before = state_of(model)
    with pytest.raises(ValueError, match="stop"):
        model(torch.ones(2, 4))
    assert at_rest(model)
    assert_same(state_of(model), before)
