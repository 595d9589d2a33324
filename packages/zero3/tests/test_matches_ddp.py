"""Two ranks against plain training on the whole batch, rank by rank, and against DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero3_models import MODELS, Perceptron, SmallGPT
from zero3_testing import (
    DistantStore,
    assert_close,
    assert_same,
    full_gradients,
    gradients_of,
    parts,
    plain_gradients,
    state_of,
    train_plain,
    train_sharded,
)

import zero3

CHOICES = [(), ("optimizer",), ("grads", "optimizer"), ("params", "grads", "optimizer")]


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def all_models(rank, world):
    """Every model of the zoo, gradients and training; buffers are each rank's own, so they are not compared."""
    for name, make in MODELS.items():
        torch.manual_seed(3)
        plain = make()
        torch.manual_seed(3 + rank)  # values are rank 0's
        model = zero3.shard(make(), store=DistantStore())
        data = plain.data(0)
        losses, wanted = plain_gradients(plain, data, world)
        loss = model.loss(parts(data, world)[rank])
        loss.backward()
        try:
            if name not in ("Convolutional", "WeightNormed"):  # each rank's own batch statistics, power iterations
                assert loss.item() == losses[rank]
                assert_same(full_gradients(model), wanted)
            else:
                assert list(full_gradients(model)) == list(wanted)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_gradients_of_every_model_are_the_mean_over_ranks_bit_for_bit(ranks):
    ranks(all_models, 2, timeout=120)


def trained(rank, world, choice):
    torch.manual_seed(3)
    plain = SmallGPT(layers=2)
    torch.manual_seed(3)
    model = zero3.shard(SmallGPT(layers=2), shard=choice)
    losses, state = train_sharded(model, 3, rank, world, sgd)
    wanted_losses, wanted = train_plain(plain, 3, world, sgd)
    assert losses == [step[rank] for step in wanted_losses]
    assert_same(state, wanted)


@pytest.mark.parametrize("choice", CHOICES)
def test_whatever_is_partitioned_the_numbers_are_the_same(ranks, choice):
    ranks(trained, 2, choice)


def test_three_ranks(ranks):
    ranks(three, 3)


def three(rank, world):
    torch.manual_seed(3)
    plain = Perceptron()
    torch.manual_seed(3)
    model = zero3.shard(Perceptron())
    assert_close(
        train_sharded(model, 3, rank, world, sgd, size=6)[1], train_plain(plain, 3, world, sgd, size=6)[1], 1e-6
    )


def beside_ddp(rank, world):
    torch.manual_seed(3)
    ddp = DistributedDataParallel(SmallGPT(layers=2), find_unused_parameters=True)
    torch.manual_seed(3)
    model = zero3.shard(SmallGPT(layers=2))
    data = parts(model.data(0), world)[rank]
    SmallGPT.loss(ddp, data).backward()
    model.loss(data).backward()
    assert_close(full_gradients(model), gradients_of(ddp.module), 1e-6)


def test_gradients_are_those_of_distributed_data_parallel(ranks):
    ranks(beside_ddp, 2)


def bf16_wire(rank, world):
    """Gradients travel in bfloat16 and are summed in float32, in the order of the ranks."""
    torch.manual_seed(3)
    plain = Perceptron()
    torch.manual_seed(3)
    model = zero3.shard(Perceptron(), reduce_dtype=torch.bfloat16)
    data = model.data(0)
    halves = [plain_gradients(plain, part)[1] for part in parts(data, world)]
    model.loss(parts(data, world)[rank]).backward()
    wanted = {name: sum(half[name].bfloat16().float() for half in halves) / world for name in halves[0]}
    assert_same(full_gradients(model), wanted)


def test_gradients_on_the_wire_may_be_narrower(ranks):
    ranks(bf16_wire, 2)


def values_of_rank_0(rank, world):
    torch.manual_seed(rank)
    model = SmallGPT(layers=1)
    give_buffers(model, rank)
    zero3.shard(model)
    torch.manual_seed(0)
    wanted = SmallGPT(layers=1)
    give_buffers(wanted, 0)
    assert_same(state_of(model), state_of(wanted))
    assert model.turned.stride() == wanted.turned.stride()


def give_buffers(model, rank):
    """Whole, turned, expanded, of no element, of every second column; and a parameter of one element out of four."""
    table = torch.arange(12.0).view(3, 4) + rank
    model.register_buffer("table", table)
    model.register_buffer("turned", table.clone().t())
    model.register_buffer("expanded", table[:, :1].clone().expand(3, 4))
    model.register_buffer("scalar", torch.tensor(rank).expand(5))
    model.register_buffer("empty", torch.empty(2, 0).expand(2, 0))
    model.register_buffer("columns", table.clone()[:, ::2])
    model.one = nn.Parameter(table.clone()[0, ::4])


def test_every_rank_begins_with_the_values_of_rank_0(ranks):
    ranks(values_of_rank_0, 2)


def sparse_buffer(rank, world):
    model = SmallGPT(layers=1)
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(zero3.UnsupportedError, match=r"buffer graph is torch\.sparse_coo"):
        zero3.shard(model)


def test_a_sparse_buffer_is_refused_on_several_ranks(ranks):
    ranks(sparse_buffer, 2)
