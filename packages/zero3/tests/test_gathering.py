"""gathered(): full parameters inside a with block."""

from __future__ import annotations

import contextlib

import pytest
import torch
from zero3_models import Perceptron, SmallGPT
from zero3_testing import DistantStore, assert_same, at_rest, pair, state_of, train_plain, train_sharded

import zero3
from zero3.shard_store import InMemoryStore

every_store = pytest.mark.parametrize("store", [DistantStore, lambda: None], ids=["distant", "default"])


@every_store
def test_values_inside_are_whole(store):
    plain, model = pair(SmallGPT, store=store())
    with zero3.gathered(model):
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, wanted)
            assert found.stride() == wanted.stride()
            assert found.is_contiguous()
    assert at_rest(model)


@every_store
def test_changes_with_modify_are_kept(store):
    plain, model = pair(SmallGPT, store=store())
    for one in (plain, model):
        with zero3.gathered(model, modify=True), torch.no_grad():
            one.embedding.weight[3:7].fill_(2.0)
            one.blocks[0].mlp[0].bias.add_(1)
            one.norm.weight.data.mul_(3)
            one.holder.weight.detach().numpy()[:, 2] = 5
    assert_same(state_of(model), state_of(plain))
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def ranks_change(rank, world):
    plain, model = pair(Perceptron)
    first, second = model.layers[0].weight, model.layers[1].bias
    before = state_of(model)
    with pytest.raises(zero3.UnsupportedError, match=r"layers\.0\.weight.*modify=True"):  # noqa: SIM117, PT012
        with zero3.gathered([first, second]), torch.no_grad():
            if rank == 1:
                first[2:4] = 5.0
    assert_same(state_of(model), before)
    with zero3.gathered([first, second, first, torch.zeros(3)], modify=True), torch.no_grad():
        first[2:4] = 5.0 + rank
        if rank == 0:
            second.fill_(7.0)
    with torch.no_grad():
        plain.layers[0].weight[2:4] = 5.0
        plain.layers[1].bias.fill_(7.0)
    assert_same(state_of(model), state_of(plain))
    assert_same(train_sharded(model, 2, rank, world)[1], train_plain(plain, 2, world)[1])


def test_rank_0_decides_and_a_change_without_modify_is_an_error_on_every_rank(ranks):
    ranks(ranks_change, 2)


@every_store
def test_a_change_without_modify_is_an_error_and_dropped(store):
    _, model = pair(Perceptron, store=store())
    before = state_of(model)
    for change in (lambda p: p.data.add_(1), lambda p: p.detach().mul_(3), lambda p: p.data.zero_()):
        with pytest.raises(zero3.UnsupportedError, match=r"layers\.1\.weight"), zero3.gathered(model):
            change(model.layers[1].weight)
        assert_same(state_of(model), before)


@every_store
def test_an_exception_inside_drops_the_changes(store):
    _, model = pair(Perceptron, store=store())
    before = state_of(model)
    with pytest.raises(ValueError, match="stop"), zero3.gathered(model, modify=True), torch.no_grad():  # noqa: PT012
        model.layers[1].weight.add_(1)
        raise ValueError("stop")
    assert_same(state_of(model), before)
    assert at_rest(model)


def test_training_inside_and_blocks_inside_blocks():
    plain, model = pair(Perceptron, store=DistantStore())
    with zero3.gathered(model), zero3.gathered(model.layers[0].weight):
        model.loss(model.data(0)).backward()
        assert str(zero3.units(model)[0].state) == "READY"
    plain.loss(plain.data(0)).backward()
    for one in (plain, model):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_same(state_of(model), state_of(plain))
    assert at_rest(model)


class Resident(InMemoryStore):
    """Shards are gathered memory, but the machinery's, not ordinary parameters."""

    plain_gradients = False


@pytest.mark.parametrize("store", [DistantStore, lambda: Resident(torch.device("cpu")), lambda: None])
@pytest.mark.parametrize("outer_fails", [False, True])
def test_what_an_inner_block_keeps_an_outer_one_does_not_drop(store, outer_fails):
    plain, model = pair(Perceptron, store=store())
    weight = model.layers[0].weight
    with contextlib.suppress(KeyError), zero3.gathered(model):
        with zero3.gathered(weight, modify=True), torch.no_grad():
            weight[1] = 7.0
        if outer_fails:
            raise KeyError
    with torch.no_grad():
        plain.layers[0].weight[1] = 7.0
    assert_same(state_of(model), state_of(plain))


@pytest.mark.parametrize("what", [[], [torch.zeros(2)], torch.zeros(2)])
def test_plain_tensors_do_no_harm(what):
    with zero3.gathered(what):
        pass


def test_double_backward_inside_is_allowed():
    """The refusal of double backward names this way out."""
    plain, model = pair(Perceptron, store=DistantStore())
    x = plain.data(0)
    penalties = []
    for one in (plain, model):
        with zero3.gathered(one):
            leaf = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(one(leaf).sum(), leaf, create_graph=True)
            penalty = grad.square().sum()
            (one.loss(x) + penalty).backward()
        penalties.append(penalty.item())
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert penalties[0] == penalties[1]
    assert_same(state_of(model), state_of(plain))


def full_shapes(rank, world):
    plain, model = pair(SmallGPT)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert zero3.full_shape(found) == wanted.shape


def test_full_shape(ranks):
    full_shapes(0, 1)
    ranks(full_shapes, 2)
    with pytest.raises(TypeError, match="partitioned"):
        zero3.full_shape(torch.zeros(2))
