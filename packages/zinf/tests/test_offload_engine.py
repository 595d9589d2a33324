"""Where each state lies, what is kept of changes, and what is left on the drive."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from zinf_testing import SETTINGS, config, make, offloaded, plain, train

import zero3
import zinf
from cpu_adam.torch import CPUAdam
from zinf.config import TIERS


@pytest.mark.parametrize(("params", "grads", "optimizer"), list(itertools.product(TIERS, TIERS, TIERS)))
def test_bytes_lie_where_the_placement_says(nvme, params, grads, optimizer):
    """float32: 4 bytes of parameter, 4 of gradient, 8 of moments, each on its tier."""
    model, opt = offloaded(config(nvme, params, grads, optimizer, overlap_optimizer=False))
    model.loss(model.data(0)).backward()
    opt.step()
    tiers = model._zero3_model.store.tiers
    numel = sum(unit.shard_numel for unit in zero3.units(model))
    wanted = dict.fromkeys(TIERS, 0)
    for tier, nbytes in ((params, 4), (grads, 4), (optimizer, 8)):
        wanted[tier] += nbytes * numel
    for name in TIERS:
        if name != "nvme" or tiers.nvme is not None:
            assert tiers.of(name).nbytes == wanted[name], name
    assert (tiers.nvme is not None) == ("nvme" in (params, grads, optimizer))


@pytest.mark.parametrize("resident", [0, 40_000, None])
def test_resident_units_take_what_they_may(nvme, resident):
    model, opt = offloaded(config(nvme, grads="cpu", resident=resident))
    train(model, opt, 2)
    numel = {unit.name: unit.shard_numel for unit in zero3.units(model)}
    tiers = {unit.name: zinf.report(model)["placement"][unit.slots[0].name] for unit in zero3.units(model)}
    kept = sum(numel[name] * 12 for name, of in tiers.items() if of["params"] == of["optimizer"] == "cpu")
    if resident is None:
        assert kept > 0  # as much as is left over, or as the states need without padding
    else:
        assert kept <= resident
        assert (kept > 0) == (resident > 0)


def test_the_drive_is_empty_when_the_model_is_gone(nvme):
    import os

    model, opt = offloaded(config(nvme, grads="nvme"))
    train(model, opt, 1)
    fds = len(os.listdir("/proc/self/fd"))
    del model, opt
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < fds
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_of_models_made_in_one_init_each_lives_and_goes_by_itself(nvme, tier):
    with zinf.init(config(nvme, tier, "cpu", tier)):
        first, second = make(1), make(2)
        nn.Linear(30, 30)  # thrown away at once
    tiers = first._zero3_model.store.tiers
    kept = tiers.of(tier).nbytes
    del first
    gc.collect()
    assert 0 < tiers.of(tier).nbytes <= kept * 0.6
    reference = make(2)
    opt = zinf.AdamW(second.parameters(), **SETTINGS)
    assert train(second, opt, 2) == train(reference, CPUAdam(reference.parameters(), **SETTINGS), 2)
    del second, opt
    gc.collect()
    assert tiers.nvme is None or tiers.nvme._closed


@pytest.mark.parametrize("halve", [
    lambda grad: grad.mul_(0.5),
    lambda grad: grad.data.mul_(0.5),
    lambda grad: np.multiply(grad.numpy(), 0.5, out=grad.numpy()),
    lambda grad: torch.from_dlpack(grad.detach()).mul_(0.5),
], ids=["itself", "data", "numpy", "dlpack"])  # fmt: skip
@pytest.mark.parametrize("grads", TIERS)
def test_gradients_that_user_code_changes(nvme, grads, halve):
    """In place by any way, replaced, and taken away: as in plain torch, on every tier."""

    def run(model, optimizer):
        for step in range(3):
            model.loss(model.data(step)).backward()
            for number, param in enumerate(model.parameters()):
                if number % 4 == 0:
                    halve(param.grad)
                elif number % 4 == 1:
                    param.grad = torch.full_like(param.grad, 0.25)
                elif number % 4 == 2 and step == 1:
                    param.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    from cpu_adam.torch import CPUAdam

    reference = make()
    wanted = run(reference, CPUAdam(reference.parameters(), **SETTINGS))
    for overlap in ("next-forward", False):
        found = run(*offloaded(config(nvme, grads=grads, overlap_optimizer=overlap)))
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (overlap, name)


@pytest.mark.parametrize("resident", [0, None])
def test_other_optimizers_are_refused_on_nvme_by_name(nvme, resident):
    model = zinf.shard(make(), config(nvme, resident=resident))
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(model.data(0)).backward()
    with pytest.raises(zero3.UnsupportedError, match=r"zinf\.AdamW"):
        optimizer.step()


def test_an_optimizer_of_plain_parameters_is_refused():
    with pytest.raises(TypeError):
        zinf.AdamW(make().parameters())


def test_a_complex_parameter_is_refused_by_name_unless_it_is_frozen(nvme):
    def phases(frozen):
        net = nn.Linear(4, 4)
        net.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=not frozen)
        return zinf.shard(net, config(nvme))

    with pytest.raises(TypeError, match=r"phase is torch\.complex64"):
        zinf.AdamW(phases(frozen=False).parameters())
    model = phases(frozen=True)
    zinf.AdamW(model.parameters())


def test_a_read_for_another_device_passes_through_host_memory(nvme):
    """The meta device stands for one that the drive cannot reach: the bytes arrive in the pool, which gets it back."""
    model, _ = offloaded(config(nvme))
    store, unit = model._zero3_model.store, zero3.units(model)[0]
    pool = store.tiers.host_pool
    before = pool.in_use
    wait = store.start_read(unit, torch.empty(unit.shard_numel, dtype=unit.dtype, device="meta"))
    assert pool.in_use >= before + unit.shard_numel * unit.dtype.itemsize
    staged = wait._buffer.flat(unit.shard_numel, unit.dtype)
    wait()
    assert wait.done()
    assert torch.equal(staged, store.master(unit))
    del staged
    assert pool.in_use == before
    assert [span.stage for span in store.tiers.spans.take() if span.stage == "cg"] == ["cg"]


@pytest.mark.parametrize("grads", TIERS)
def test_full_gradients_of_no_sync_wait_on_the_tier_of_gradients(nvme, grads):
    """Three micro-batches of which two are not reduced: seen inside as the plain sum, and stepped with as that."""
    model, opt = offloaded(config(nvme, grads=grads))
    reference, plain_opt = plain(optimizer=CPUAdam)
    tiers = model._zero3_model.store.tiers
    numel = sum(unit.padded_numel for unit in zero3.units(model))
    with zinf.no_sync(model):
        for step in range(2):
            model.loss(model.data(step)).backward()
            reference.loss(reference.data(step)).backward()
        if grads == "nvme":
            assert tiers.of("cpu").nbytes == tiers.of("device").nbytes == 0
            assert tiers.nvme.traffic.written["gradients"] >= 2 * 4 * numel
        else:
            assert tiers.of(grads).nbytes == 4 * numel
        for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert torch.equal(param.grad.as_subclass(torch.Tensor), whole.grad), name
    for net, optimizer in ((model, opt), (reference, plain_opt)):
        net.loss(net.data(2)).backward()
        optimizer.step()
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_a_gradient_dropped_inside_no_sync_does_not_come_back(nvme, grads):
    model, _ = offloaded(config(nvme, grads=grads))
    reference, _ = plain()
    with zinf.no_sync(model):
        model.loss(model.data(0)).backward()
        next(iter(model.parameters())).grad = None
    model.loss(model.data(1)).backward()
    for step in range(2):
        reference.loss(reference.data(step)).backward()
        if step == 0:
            next(iter(reference.parameters())).grad = None
    for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(zinf.full_grad(param), whole.grad), name


def test_bfloat16_gradients_of_no_sync_add_up_in_float32(nvme):
    model, _ = offloaded(config(nvme, grads="nvme", dtype=torch.bfloat16))
    singles = []
    for step in range(8):
        model.loss(model.data(step)).backward()
        singles.append([zinf.full_grad(param).double() for param in model.parameters()])
        model.zero_grad()
    with zinf.no_sync(model):
        for step in range(8):
            model.loss(model.data(step)).backward()
        for param, *grads in zip(model.parameters(), *singles, strict=True):
            wanted = sum(grads)
            assert (param.grad.as_subclass(torch.Tensor) - wanted).abs().max() <= 1e-6 * wanted.abs().max()
