"""The architectures of `transformers`, unchanged: loss and gradients are plain torch's, state_dict equal both ways.

One rank: bit-equal. Two ranks: largest difference at most 1e-5 of the tensor's largest entry, or 1e-8 of the
model's largest (key biases have a zero gradient in exact arithmetic). Eight in every run, all behind `peers`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="the architectures come from transformers")

from zero3_architectures import ARCHITECTURES, IN_EVERY_RUN, build, inputs, loss_of
from zero3_testing import DistantStore, assert_close, assert_same, at_rest, full_gradients, gradients_of

import zero3

the_rest = [name for name in ARCHITECTURES if name not in IN_EVERY_RUN]
every_architecture = pytest.mark.parametrize(
    "name", [*IN_EVERY_RUN, *(pytest.param(name, marks=pytest.mark.peers) for name in the_rest)]
)


def test_there_are_enough_of_them():
    assert len(ARCHITECTURES) >= 25


def run(model, given, seed=1):
    torch.manual_seed(seed)  # dropout
    loss = loss_of(model, given)
    loss.backward()
    return loss.item()


def compare_on_one_rank(name, prepare):
    torch.manual_seed(0)
    plain = prepare(build(name))
    torch.manual_seed(0)
    with zero3.init(store=DistantStore()):
        model = build(name)
    prepare(model)
    assert_same(model.state_dict(), plain.state_dict())
    assert run(model, inputs(name)) == run(plain, inputs(name))
    assert_same(full_gradients(model), gradients_of(plain))
    assert at_rest(model)


@every_architecture
def test_loss_and_gradients_are_bit_equal_on_one_rank(name):
    compare_on_one_rank(name, lambda model: model)


@every_architecture
def test_with_gradient_checkpointing(name):
    def checkpointed(model):
        if model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return model

    compare_on_one_rank(name, checkpointed)


@pytest.mark.parametrize("name", IN_EVERY_RUN[:4])
def test_training_an_existing_model(name):
    torch.manual_seed(0)
    plain, model = build(name), build(name)
    model.load_state_dict(plain.state_dict())
    zero3.shard(model, store=DistantStore())
    for one in (plain, model):
        opt = torch.optim.AdamW(one.parameters(), lr=1e-3)
        for step in range(3):
            run(one, inputs(name), seed=step)
            opt.step()
            opt.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())


def on_two_ranks(rank, world, names):
    for name in names:
        torch.manual_seed(0)
        plain = build(name)
        torch.manual_seed(0)
        with zero3.init():
            model = build(name)
        halves = [
            {key: value.chunk(world)[part] for key, value in inputs(name, 2 * world).items()} for part in range(world)
        ]
        losses, sums = [], {}
        for part in range(world):
            plain.zero_grad()
            losses.append(run(plain, halves[part], seed=part))
            for key, grad in gradients_of(plain).items():
                sums[key] = grad.clone() if key not in sums else sums[key] + grad
        try:
            assert run(model, halves[rank], seed=rank) == losses[rank]
            found = full_gradients(model)
            assert_close(found, {key: sums[key] / world for key, _ in model.named_parameters() if key in sums})
            assert at_rest(model)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_two_ranks(ranks):
    ranks(on_two_ranks, 2, IN_EVERY_RUN, timeout=200)


@pytest.mark.peers
def test_two_ranks_all(ranks):
    ranks(on_two_ranks, 2, the_rest, timeout=280)
