"""Activations on every tier: the same bits as without, and really there."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch import nn
from zinf_testing import SETTINGS, assert_same, config, state_of

import zero3
import zinf
from cpu_adam.torch import CPUAdam

TIERS = ["device", "cpu", "nvme"]


class Blocks(nn.Module):
    """Equal blocks with dropout, wide enough that their inputs are worth a transfer."""

    def __init__(self, listed=True, by_hand=False):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64)) for _ in range(4)]
        if listed:
            self.blocks = nn.ModuleList(blocks)
        else:  # no list of blocks: nothing is checkpointed by itself
            self.first, self.second, self.third, self.fourth = blocks
        self.head = nn.Linear(64, 1)
        self.by_hand = by_hand

    def forward(self, x):
        for block in [module for module in self.modules() if isinstance(module, nn.Sequential)]:
            x = x + (zinf.checkpoint(block, x) if self.by_hand else block(x))
        return self.head(x).square().mean()


def losses(cfg, listed=True, by_hand=False, around=lambda model: contextlib.nullcontext(), steps=3):
    torch.manual_seed(0)
    model = zinf.shard(Blocks(listed, by_hand), cfg)
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    found, written = [], 0
    for step in range(steps):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
        torch.manual_seed(step)
        with around(model):
            loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        written = zinf.report(model)["bytes"]["by_kind"]["activations"]["written"]
    return found, written


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return losses(config(tmp_path_factory.mktemp("nvme")))[0]


@pytest.mark.parametrize("overlap", zinf.config.OVERLAPS)
@pytest.mark.parametrize("tier", TIERS)
def test_blocks_checkpointed_by_themselves_give_the_same_bits(nvme, tier, overlap, expected):
    found, written = losses(config(nvme, activations=tier, overlap_optimizer=overlap))
    assert found == expected
    assert written == (4 * 512 * 64 * 4 if tier == "nvme" else 0)  # the inputs of four blocks, once


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("params", ["device", "nvme"])
def test_every_saved_tensor_on_a_tier_gives_the_same_bits(nvme, tier, params, expected):
    found, written = losses(config(nvme, params=params, activations=tier), listed=False, around=zinf.offload_saved)
    assert found == expected
    assert (written > 8 * 512 * 64 * 4) == (tier == "nvme")


def test_checkpoint_by_hand_uses_the_running_model_s_tier(nvme, expected):
    found, written = losses(config(nvme, activations="nvme"), listed=False, by_hand=True)
    assert found == expected
    assert written == 4 * 512 * 64 * 4


def test_checkpoint_takes_the_place_of_torchs_function():
    x = torch.randn(3, requires_grad=True)
    zinf.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, x.cos())
    with pytest.raises(ValueError, match="use_reentrant"):
        zinf.checkpoint(torch.sin, x, use_reentrant=True)


def test_checkpoint_outside_of_any_model_is_torch_s():
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    zinf.checkpoint(layer, x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, 4))


class Moving(nn.Module):
    """Buffers that forward changes in place, replaces, makes, and uses before it does so; one is known twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)
        self.linear.register_buffer("also_calls", self.calls)
        self.register_buffer("last", None)

    def forward(self, x):
        y = self.norm(self.linear(x)) - self.mean * (1 + self.linear.also_calls)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.last = self.mean if self.last is None else self.last + self.mean
        return torch.tanh(y)


class MovingBlocks(nn.Module):
    def __init__(self, by_hand=False):
        super().__init__()
        blocks = [nn.Sequential(Moving(), Moving()) for _ in range(3)]
        self.blocks = (
            nn.ModuleDict({str(n): block for n, block in enumerate(blocks)}) if by_hand else nn.ModuleList(blocks)
        )
        self.by_hand = by_hand

    def forward(self, x):
        for number, block in enumerate(self.blocks.values() if self.by_hand else self.blocks):
            if not self.by_hand:
                x = x + block(x)
            else:  # of a module, and of a method
                x = x + zinf.checkpoint(block if number else block.forward, x)
        return x.square().mean()


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("tier", TIERS)
def test_buffers_of_a_block_that_runs_again_are_plain_torchs(nvme, tier, by_hand):
    torch.manual_seed(0)
    model = zinf.shard(MovingBlocks(by_hand), config(nvme, activations=tier))
    torch.manual_seed(0)
    plain = MovingBlocks()
    optimizers = zinf.AdamW(model.parameters(), **SETTINGS), CPUAdam(plain.parameters(), **SETTINGS)
    for step in range(3):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step))
        found = []
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            loss = one(x)
            loss.backward(retain_graph=step == 1)
            if step == 1:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert found[0] == found[1]
    assert_same(state_of(model), state_of(plain))
    for ours, its in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, its)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_its_transpose_a_slice_and_an_expanded_view_keep_apart(nvme, dtype):
    def products(square, row):
        expanded = row.expand(256, 256)
        return (square @ square.t()).sum() + (square[:200] @ expanded).sum() + (square.t() @ square).square().sum()

    def gradients(around):
        torch.manual_seed(1)
        square = torch.randn(256, 256).to(dtype).requires_grad_()
        row = torch.randn(1, 256).to(dtype).requires_grad_()
        with around:
            loss = products(square, row)
        return torch.autograd.grad(loss, [square, row])

    model = zinf.shard(nn.Linear(8, 8), config(nvme, activations="nvme"))
    for ours, plain in zip(gradients(zinf.offload_saved(model)), gradients(contextlib.nullcontext()), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("tier", TIERS)
def test_a_change_in_place_after_saving_is_refused(nvme, tier):
    model = zinf.shard(nn.Linear(8, 8), config(nvme, activations=tier))
    x = torch.randn(256, 256, requires_grad=True)
    with zinf.offload_saved(model):
        y = x.exp()
        loss = y.sum()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("tier", TIERS)
def test_a_block_that_is_stopped_while_it_runs_again(nvme, tier, error, expected):
    """Its unit, of which its hooks know, is held while it runs again; what comes after is as if nothing had been."""
    stops = []

    def stop(*_):
        if stops and torch._C._current_graph_task_id() != -1:
            raise stops.pop()

    def interrupted(model):
        if not stops and not seen:
            seen.append(model)
            model.blocks[1][1].register_forward_hook(stop)
            stops.append(error("stop"))
            torch.manual_seed(0)
            with pytest.raises(error, match="stop"):
                model(torch.randn(512, 64)).backward()
            assert zero3.hooks.running_model() is None
            assert not any(unit.holds for unit in zero3.units(model))
            model.zero_grad()
            torch.manual_seed(0)
        return contextlib.nullcontext()

    seen: list[nn.Module] = []
    cfg = config(nvme, activations=tier, overlap_optimizer=False, unit_size="40KiB", device_memory="160KiB")
    found, _ = losses(cfg, around=interrupted)
    assert {f"blocks.{i}" for i in range(4)} <= {unit.name for unit in zero3.units(seen[0])}
    assert found == expected


def rooms(model) -> set[str]:
    """Of saved tensors, on the drive."""
    engine, _ = zinf.offload_engine.engine_of(model)
    return {name for name in engine.tiers.of("nvme")._swap.names() if "activation" in name}


def test_rooms_are_kept_no_longer_than_a_step(nvme):
    model = zinf.shard(nn.Linear(512, 512), config(nvme, activations="nvme"))
    x = torch.randn(512, 512, requires_grad=True)
    with zinf.offload_saved(model):
        loss = (model(x) @ x).sigmoid().sum()
    assert len(rooms(model)) >= 3
    loss.backward()
    assert rooms(model) == set()
    with zinf.offload_saved(model):
        kept, dropped = (model(x) @ x).sigmoid().sum(), (model(x) @ x).sigmoid().sum()
    held = rooms(model)
    del dropped
    model(x)  # its hooks look for what nobody holds
    assert 3 <= len(rooms(model)) < len(held)
    kept.backward()
    assert rooms(model) == set()
    with zinf.offload_saved(model):
        dropped = (x @ x).sigmoid().sum()
        assert rooms(model)
        del dropped
        again = x.exp()  # saves one tensor, behind what nobody holds
    assert len(rooms(model)) == 1
    del again


def test_no_python_code_runs_when_a_graph_goes(nvme):
    """An interrupt that met a destructor would be lost."""
    model = zinf.shard(nn.Linear(8, 8), config(nvme, activations="nvme"))
    x = torch.randn(512, 512, requires_grad=True)
    with zinf.offload_saved(model):
        loss = (x @ x).sigmoid().sum()
    assert rooms(model)
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        del loss
    finally:
        sys.setprofile(None)
    assert called == []


def test_an_unheld_room_whose_read_ahead_is_on_its_way(nvme):
    """Backward stops behind its first fetch, which has read the others ahead; then the graph goes."""
    model = zinf.shard(nn.Linear(8, 8), config(nvme, activations="nvme"))
    engine, _ = zinf.offload_engine.engine_of(model)
    x = torch.randn(512, 512, requires_grad=True)

    def stop(grad):
        raise ValueError("stop")

    with zinf.offload_saved(model):
        y = x.exp().sin()
        z = y.sigmoid()
        z.register_hook(stop)
        loss = (z.exp()).sum()
    engine.activations._let_go(0)
    model(torch.randn(2, 8))  # its unit stays for the next one
    in_use = engine.tiers.device_pool.in_use
    with pytest.raises(ValueError, match="stop"):
        loss.backward()
    assert engine.tiers.device_pool.in_use > in_use
    del loss, y, z
    model(torch.randn(2, 8))
    assert rooms(model) == set()
    assert engine.tiers.device_pool.in_use <= in_use


def test_without_a_tier_offload_saved_says_what_to_set(nvme):
    model = zinf.shard(nn.Linear(8, 8), config(nvme))
    with pytest.raises(zinf.ConfigError, match="activations="), zinf.offload_saved(model):
        pass
