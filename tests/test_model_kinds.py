"""Every kind of model of DESIGN.md section 5 with all its states on a drive, bit for bit against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zero3_models import MODELS, Regression, SmallGPT
from zinf_testing import SETTINGS, config

import zero3
import zinf
from cpu_adam.torch import CPUAdam
from zinf.config import OVERLAPS

# A parameter of complex numbers: no AdamW of ours updates it (test_offloaded_adamw tells how that is said).
OFFLOADED = {name: model for name, model in MODELS.items() if name != "SeveralDtypes"}


def trained(model):
    return [param for param in model.parameters() if param.requires_grad]


def loop(model, optimizer, steps):
    torch.manual_seed(0)  # whatever the model draws
    losses = []
    for step in range(steps):
        loss = model.loss(model.data(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def compare(make, cfg, steps=4):
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    model = zinf.shard(make(), cfg)
    wanted = loop(plain, CPUAdam(trained(plain), **SETTINGS), steps)
    found = loop(model, zinf.AdamW(trained(model), **SETTINGS), steps)
    assert found == wanted
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    assert all(str(unit.state) == "SHARDED" for unit in zero3.units(model))


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", OFFLOADED)
def test_zoo(nvme, name, overlap):
    compare(OFFLOADED[name], config(nvme, grads="nvme", overlap_optimizer=overlap, unit_size="1KiB"))


@pytest.mark.parametrize("params", ["cpu", "nvme"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_block_applied_four_times(nvme, overlap, params):
    compare(MODELS["SharedBlock"], config(nvme, params, overlap_optimizer=overlap, unit_size="1KiB"), steps=3)


class Checkpointed(Regression):
    """Blocks that are run again in backward, one of them twice, inside a part that is not."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(3)])
        self.last = nn.Linear(12, 12)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_blocks(nvme, reentrant, overlap):
    compare(lambda: Checkpointed(reentrant), config(nvme, overlap_optimizer=overlap, unit_size="1KiB"))


class Optional(Regression):
    """fc2 is used on steps 1, 2 and 5 only."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (nn.Linear(12, 12) for _ in range(3))
        self.step = -1

    def forward(self, x):
        self.step += 1
        x = torch.tanh(self.fc1(x))
        if self.step in (1, 2, 5):
            x = torch.tanh(self.fc2(x))
        return self.fc3(x)


def skipping(rank, world, nvme, overlap, prefetch):
    torch.manual_seed(3)
    plain = Optional()
    torch.manual_seed(3)
    model = zinf.shard(Optional(), config(nvme, overlap_optimizer=overlap, prefetch=prefetch, unit_size=0))
    reference, optimizer = CPUAdam(plain.parameters(), **SETTINGS), zinf.AdamW(model.parameters(), **SETTINGS)
    unused = None
    for step in range(8):
        data = plain.data(step)  # both ranks the same: the mean is the plain gradient
        wanted, found = plain.loss(data), model.loss(data)
        assert found.item() == wanted.item(), step
        wanted.backward()
        found.backward()
        reference.step()
        optimizer.step()
        reference.zero_grad()
        optimizer.zero_grad()
        state = zinf.full_state(model.fc2.weight)
        if step not in (1, 2, 5) and unused is not None:
            assert state["step"] == unused["step"]
            assert all(torch.equal(state[kind], unused[kind]) for kind in ("param", "exp_avg", "exp_avg_sq"))
        unused = state
        assert all(str(unit.state) == "SHARDED" and str(unit.grad_state) == "NONE" for unit in zero3.units(model))
    assert unused["step"] == 3


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no prefetch"])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_layer_that_is_skipped_on_some_steps(ranks, nvme, world, overlap, prefetch):
    if world == 1:
        skipping(0, 1, nvme, overlap, prefetch)
    else:
        ranks(skipping, 2, nvme, overlap, prefetch)


class Experts(Regression):
    """Top-1 of four experts; rank 0 sends all to one, rank 1 to another, the next step the other way round."""

    def __init__(self, rank=0):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(12, 12) for _ in range(4)])
        self.head = nn.Linear(12, 3)

    def forward(self, x, expert):
        return self.head(self.experts[expert](x))


def routed(rank, world, nvme, overlap):
    torch.manual_seed(3)
    plain = Experts()
    torch.manual_seed(3)
    model = Experts()
    zero3.as_unit(model.experts)
    zinf.shard(model, config(nvme, overlap_optimizer=overlap, unit_size=0))
    reference, optimizer = CPUAdam(plain.parameters(), **SETTINGS), zinf.AdamW(model.parameters(), **SETTINGS)
    for step in range(4):
        data = plain.data(step)
        total = sum(plain(data, (step + other) % 2).square().mean() for other in range(world)) / world
        total.backward()
        model(data, (step + rank) % 2).square().mean().backward()
        reference.step()
        optimizer.step()
        reference.zero_grad()
        optimizer.zero_grad()
    for name, value in plain.state_dict().items():
        found = model.state_dict()[name]
        assert torch.allclose(found, value, rtol=1e-6, atol=1e-6), name
    for expert in (2, 3):
        assert zinf.full_state(model.experts[expert].weight)["step"] == 0


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_experts_that_other_ranks_use(ranks, nvme, overlap):
    ranks(routed, 2, nvme, overlap)


class Adapted(Regression):
    """Frozen base, rank-4 adapters, checkpointed."""

    def __init__(self, reentrant):
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(12, 12).requires_grad_(False) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(12).requires_grad_(False) for _ in range(2)])
        self.down = nn.ModuleList([nn.Linear(12, 4, bias=False) for _ in range(2)])
        self.up = nn.ModuleList([nn.Linear(4, 12, bias=False) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_()  # as reentrant checkpointing wants
        for index in range(2):
            x = checkpoint(self.layer, x, index, use_reentrant=self.reentrant)
        return x

    def layer(self, x, index):
        y = self.norms[index](x)
        return x + self.base[index](y) + self.up[index](self.down[index](y))


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_adapters_on_a_frozen_base(nvme, reentrant, overlap):
    compare(lambda: Adapted(reentrant), config(nvme, overlap_optimizer=overlap, unit_size=0))


class Whole(nn.Module):
    """A block that returns a tuple, uses views of its input, and is gathered as one unit."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        left, right = x[:, :6], x[:, 6:]
        return torch.tanh(self.left(left)) * self.scale, torch.tanh(self.right(right))


class OfWholes(Regression):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Whole() for _ in range(2)])
        self.unused = nn.Linear(12, 12)
        for block in self.blocks:
            zero3.as_unit(block)

    def forward(self, x):
        for block in self.blocks:
            x = torch.cat(block(x), 1)
        return x


def as_one_unit(rank, world, nvme, overlap):
    torch.manual_seed(3)
    plain = OfWholes()
    torch.manual_seed(3)
    model = zinf.shard(OfWholes(), config(nvme, overlap_optimizer=overlap, unit_size=0))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    reference, optimizer = CPUAdam(plain.parameters(), **SETTINGS), zinf.AdamW(model.parameters(), **SETTINGS)
    for step in range(5):
        data = plain.data(step)
        plain.loss(data).backward()
        model.loss(data).backward()
        assert zero3.missing_grads(model) == ["unused.weight", "unused.bias"]
        reference.step()
        optimizer.step()
        reference.zero_grad()
        optimizer.zero_grad()
    found = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name
        assert torch.equal(value, start[name]) == name.startswith("unused"), name


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_block_as_one_unit(ranks, nvme, world, overlap):
    if world == 1:
        as_one_unit(0, 1, nvme, overlap)
    else:
        ranks(as_one_unit, 2, nvme, overlap)


class TwoHeads(Regression):
    """The same weight in three places: embedding, head, and a product outside any module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.outer = nn.Linear(12, 12, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x))) + F.linear(x, self.inner.weight.t())


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_tied_weights(nvme, overlap):
    compare(TwoHeads, config(nvme, overlap_optimizer=overlap, unit_size=0))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_evaluation_and_generation_between_steps(nvme, overlap):
    """Without and with gradients enabled, in training mode and not: the training's numbers stay."""

    def run(model, optimizer):
        seen = []
        for step in range(4):
            loss = model.loss(model.data(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(model.loss(model.data(100 + step)).item())
            model.eval()
            with torch.no_grad():
                token = model(model.data(step, size=1))[:, -1].argmax()
            model.train()
            seen += [loss.item(), token.item(), model(model.data(step)).sum().item()]
        return seen

    torch.manual_seed(3)
    plain = SmallGPT(layers=2)
    torch.manual_seed(3)
    model = zinf.shard(SmallGPT(layers=2), config(nvme, overlap_optimizer=overlap, unit_size="4KiB"))
    wanted = run(plain, CPUAdam(plain.parameters(), **SETTINGS))
    assert run(model, zinf.AdamW(model.parameters(), **SETTINGS)) == wanted


def test_evaluation_without_eval_mode_does_not_stop_updates_in_backward(nvme):
    """A forward without gradients in training mode looks like a checkpoint's; no recomputation follows it."""
    model = zinf.shard(MODELS["Perceptron"](), config(nvme, overlap_optimizer="backward", unit_size=0))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    with torch.no_grad():
        model.loss(model.data(0))
    model.loss(model.data(0)).backward()
    assert not optimizer._updates[model._zero3_model.store].waiting()


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_built_under_init(nvme, overlap):
    torch.manual_seed(3)
    plain = SmallGPT(layers=2)
    torch.manual_seed(3)
    with zinf.init(config(nvme, overlap_optimizer=overlap, unit_size="4KiB")):
        model = SmallGPT(layers=2)
    wanted = loop(plain, CPUAdam(plain.parameters(), **SETTINGS), 3)
    assert loop(model, zinf.AdamW(model.parameters(), **SETTINGS), 3) == wanted
