"""Models whose use of modules changes from step to step and from rank to rank."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional as F
from zero3_models import Perceptron, Regression, random
from zero3_testing import (
    DistantStore,
    adamw,
    assert_same,
    at_rest,
    full_gradients,
    gradients_of,
    pair,
    parts,
    plain_gradients,
    state_of,
)

import zero3


class Skips(Regression):
    """fc2 is used on some steps only."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(12, 12) for _ in range(3))
        self.use = True

    def forward(self, x):
        x = torch.tanh(self.fc1(x))
        if self.use:
            x = torch.tanh(self.fc2(x))
        return self.fc3(x)


def skipping(rank, world):
    plain, model = pair(Skips, store=DistantStore())
    opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
    for step in range(8):
        plain.use = model.use = step in (1, 2, 5)
        before = {key: value.clone() for key, value in state_of(model).items() if key.startswith("fc2")}
        losses, _ = plain_gradients(plain, plain.data(step), world)
        loss = model.loss(parts(model.data(step), world)[rank])
        loss.backward()
        assert loss.item() == losses[rank]
        for optimizer in (opt_plain, opt):
            optimizer.step()
            optimizer.zero_grad()
        assert at_rest(model)
        if not model.use:
            assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert opt.state[model.fc2.weight]["step"] == 3
    assert_same(state_of(model), state_of(plain))


def test_a_layer_that_is_used_on_some_steps_only(ranks):
    skipping(0, 1)
    ranks(skipping, 2)


class Experts(nn.Module):
    """Top-1 routing told by the data: a sample's first entry names its expert."""

    def __init__(self, as_unit=False):
        super().__init__()
        self.router = nn.Linear(12, 12)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 12)) for _ in range(4)])
        if as_unit:
            self.block = ExpertBlock(self.experts)
            zero3.as_unit(self.block)

    def forward(self, x):
        if hasattr(self, "block"):
            return self.block(self.router(x), x[:, 0])
        return mix(self.experts, self.router(x), x[:, 0])

    def loss(self, x):
        return self(x).square().mean()

    @staticmethod
    def data(step, size=4):
        data = random(step, size, 12)
        data[:, 0] = torch.tensor([step % 2] * (size // 2) + [(step + 1) % 2] * (size // 2))
        return data


class ExpertBlock(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, choice):
        return mix(self.experts, x, choice)


def mix(experts, x, choice):
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        if (rows := choice == number).any():
            out[rows] = expert(x[rows])
    return out


class ExpertsInOneUnit(Experts):
    def __init__(self):
        super().__init__(as_unit=True)


def routed(rank, world):
    """Rank 0 sends all to one expert, rank 1 to another, then reversed; experts 2 and 3 are never used."""
    plain, model = pair(ExpertsInOneUnit, store=DistantStore())
    opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
    start = state_of(model)
    for step in range(4):
        _, wanted = plain_gradients(plain, plain.data(step), world)
        model.loss(parts(model.data(step), world)[rank]).backward()
        assert_same(full_gradients(model), wanted)
        for optimizer in (opt_plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    idle = [name for name, _ in model.named_parameters() if name.startswith(("experts.2", "experts.3"))]
    assert zero3.missing_grads(model) == idle
    state = state_of(model)
    assert_same(state, state_of(plain))
    assert all(torch.equal(state[name], start[name]) for name in idle)


def test_experts_that_differ_between_ranks_inside_one_unit(ranks):
    ranks(routed, 2, timeout=30)


def alternating(rank, world):
    """Both ranks use the same experts, other ones in each step, in changing order."""

    class Model(Perceptron):
        order = (0, 1, 2, 3)

        def forward(self, x):
            for number in self.order:
                x = torch.tanh(self.layers[number](x))
            return x

    plain, model = pair(Model, store=DistantStore())
    opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
    for step, order in enumerate([(0, 1, 2, 3), (3, 1), (2, 0, 2, 1), (3, 2, 1, 0), (0,)]):
        plain.order = model.order = order
        _, wanted = plain_gradients(plain, plain.data(step), world)
        model.loss(parts(model.data(step), world)[rank]).backward()
        assert_same(full_gradients(model), wanted)
        for optimizer in (opt_plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(state_of(model), state_of(plain))


def test_the_order_of_modules_changes(ranks):
    alternating(0, 1)
    ranks(alternating, 2)


def disagreeing(rank, world):
    """Outside as_unit: both ranks get an error that names the units, soon, and no wrong number."""
    model = zero3.shard(Experts(), timeout=3)
    started = time.monotonic()
    try:
        for step in range(2):
            model.loss(parts(model.data(step), world)[rank]).backward()
            full_gradients(model)
    except zero3.RankMismatchError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("ranks that use different experts were not told")


def test_experts_that_differ_between_ranks_elsewhere_end_in_an_error_on_all_ranks(ranks):
    for message, seconds in ranks(disagreeing, 2, fresh=True):
        assert "experts." in message
        assert "as_unit" in message
        assert seconds < 30


class Detached(Regression):
    """Equal layers; the first takes raw data, one in the middle sits behind a detach."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(8)])

    def forward(self, x):
        for position, layer in enumerate(self.layers):
            if position == 4:
                x = x.detach()
            x = torch.tanh(layer(x))
        return x


def released(rank, world):
    plain, model = pair(Detached, store=DistantStore(), unit_size=1)
    pool = model._zero3_model.pool
    unit_nbytes = max(unit.nbytes for unit in zero3.units(model))
    for step in range(2):
        loss = model.loss(parts(model.data(step), world)[rank])
        assert pool.in_use == 0
        loss.backward()
        full = full_gradients(model)
        assert at_rest(model)
        assert pool.in_use == 0
        _, wanted = plain_gradients(plain, plain.data(step), world)
        assert_same(full, wanted)
        model.zero_grad()
    gradients_on_their_way = 3 * unit_nbytes if world > 1 else unit_nbytes
    assert pool.peak_in_use <= 2 * unit_nbytes + 2 * gradients_on_their_way


def test_layers_behind_a_detach_are_released(ranks):
    released(0, 1)
    ranks(released, 2)


class ViewsOfItsInput(Regression):
    """A block that is one unit, returns a tuple and uses views of its input."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

        def forward(self, x):
            left, right = x.chunk(2, -1)
            for layer in self.layers:
                left, right = right, torch.tanh(layer(left)) + right
            return left, {"right": right, "sum": left + right}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])
        for block in self.blocks:
            zero3.as_unit(block)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        for block in self.blocks:
            left, rest = block(x)
            x = torch.cat([left, rest["right"]], -1) + F.pad(rest["sum"], (0, 6))
        return x


def as_units(rank, world):
    plain, model = pair(ViewsOfItsInput, store=DistantStore())
    assert {unit.name for unit in zero3.units(model)} >= {"blocks.0", "blocks.1"}
    opt_plain, opt = adamw(plain.parameters()), adamw(model.parameters())
    start = state_of(model)
    for step in range(5):
        plain_gradients(plain, plain.data(step), world)
        model.loss(parts(model.data(step), world)[rank]).backward()
        assert zero3.missing_grads(model) == ["unused.weight", "unused.bias"]
        for optimizer in (opt_plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    state = state_of(model)
    assert_same(state, state_of(plain))
    assert all(not torch.equal(state[name], start[name]) for name in state if name.startswith("blocks"))


def test_every_weight_of_a_block_that_is_one_unit_is_trained(ranks):
    as_units(0, 1)
    ranks(as_units, 2)


def without_a_loss(rank, world):
    """Backward gathers, so a rank that runs none is missing; with replicated parameters it contributes zero."""
    plain, model = pair(Perceptron, shard=("grads", "optimizer"))
    data = parts(plain.data(0), world)
    wanted = {name: grad / world for name, grad in plain_gradients(plain, data[0])[1].items()}
    out = model(data[rank])
    if rank == 0:
        out.square().mean().backward()
    assert_same(full_gradients(model), wanted)


def test_a_rank_without_a_loss_contributes_zero(ranks):
    ranks(without_a_loss, 2)


def test_gradients_of_frozen_parts_do_not_exist():
    plain, model = pair(Perceptron, store=DistantStore())
    for one in (plain, model):
        one.layers[1].requires_grad_(False)
        one.loss(one.data(0)).backward()
    assert_same(full_gradients(model), gradients_of(plain))
