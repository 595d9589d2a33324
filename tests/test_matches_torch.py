"""Against plain torch over many steps: one process and two, with the same global batch."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import SETTINGS, config, make, offloaded, plain, state_of, train

import zinf
from cpu_adam.torch import CPUAdam
from zinf.config import OVERLAPS

# Against torch.optim.AdamW, which rounds otherwise than cpu_adam.
LOSS = 1e-5


def plain_two_ranks(steps, optimizer=torch.optim.AdamW):
    """Losses of both halves of each batch, and the model: each half's gradient, then their mean."""
    model, opt = plain(optimizer=optimizer)
    losses = []
    for step in range(steps):
        gradients = []
        for half in model.data(step).chunk(2):
            model.zero_grad()
            loss = model.loss(half)
            loss.backward()
            losses.append(loss.item())
            gradients.append([param.grad for param in model.parameters()])
        for param, *halves in zip(model.parameters(), *gradients, strict=True):
            param.grad = (halves[0] + halves[1]) / 2
        opt.step()
    return [losses[0::2], losses[1::2]], state_of(model)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_float32_losses_of_one_process(nvme, overlap):
    wanted = train(*plain(), 20)
    assert train(*offloaded(config(nvme, overlap_optimizer=overlap)), 20) == pytest.approx(wanted, rel=LOSS)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_float32_weights_bit_for_bit_where_the_same_kernel_updates_plain_torch(nvme, overlap):
    reference, optimizer = plain(optimizer=CPUAdam)
    wanted = train(reference, optimizer, 20)
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    assert train(model, optimizer, 20) == wanted
    for name, value in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def two_ranks(rank, world, nvme, overlap, steps):
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    return train(model, optimizer, steps, rank, world), state_of(model)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_float32_losses_of_two_processes(ranks, nvme, overlap):
    found = ranks(two_ranks, 2, nvme, overlap, 20)
    bitwise, weights = plain_two_ranks(20, CPUAdam)
    close, _ = plain_two_ranks(20)
    whole = train(*plain(), 20)
    for rank in range(2):
        assert found[rank][0] == bitwise[rank]
        assert found[rank][0] == pytest.approx(close[rank], rel=LOSS)
        for name, value in weights.items():
            assert torch.equal(found[rank][1][name], value), name
    means = [(one + other) / 2 for one, other in zip(found[0][0], found[1][0], strict=True)]
    assert means == pytest.approx(whole, rel=LOSS)


def test_bfloat16_is_torch_on_rounded_weights_with_an_exact_master(nvme):
    """Forward and backward are plain bfloat16 torch; the update is AdamW on a float32 master."""
    model, optimizer = offloaded(config(nvme, dtype=torch.bfloat16))
    reference = make().to(torch.bfloat16)
    masters = [param.detach().float() for param in make().parameters()]
    adam = CPUAdam(masters, **SETTINGS)
    for step in range(10):
        with torch.no_grad():
            for param, master in zip(reference.parameters(), masters, strict=True):
                bits = master.view(torch.int32)  # the rule of DESIGN.md 6a: ties away from zero
                param.copy_((((bits + 0x8000) >> 16) << 16).view(torch.float32).to(torch.bfloat16))
        batch = reference.data(step)
        loss = reference.loss(batch)
        loss.backward()
        assert train(model, optimizer, [step]) == [loss.item()]
        for param, master in zip(reference.parameters(), masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        adam.step()
    for (name, param), master in zip(model.named_parameters(), masters, strict=True):
        assert torch.equal(zinf.full_state(param)["param"], master), name


def test_parameter_groups_and_schedulers(nvme):
    """Decay by `ndim`, other learning rates and betas by group, and a schedule that edits them."""

    def grouped(model, make_optimizer):
        flat = [p for p in model.parameters() if p.ndim < 2]
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        groups = [{"params": matrices}, {"params": flat, "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.99)}]
        optimizer = make_optimizer(groups, **SETTINGS)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])

    def run(model, make_optimizer):
        optimizer, scheduler = grouped(model, make_optimizer)
        losses = []
        for step in range(8):
            losses += train(model, optimizer, [step])
            scheduler.step()
        return losses

    reference = make()
    wanted = run(reference, CPUAdam)
    for overlap in OVERLAPS:
        model = zinf.shard(make(), config(nvme, overlap_optimizer=overlap))
        assert run(model, zinf.AdamW) == wanted
        for name, value in reference.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.parametrize(("params", "optimizer"), [("device", "device"), ("cpu", "cpu"), ("nvme", "cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_optimizers_of_torch(nvme, params, optimizer, dtype):
    """They see float32 masters; in float32 they give plain torch's bits."""
    for kind, settings in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 1e-2})):
        reference = make()
        wanted = train(reference, kind(reference.parameters(), **settings), 5)
        model = zinf.shard(make(), config(nvme, params, "cpu", optimizer, dtype=dtype))
        losses = train(model, kind(model.parameters(), **settings), 5)
        if dtype is torch.float32:
            assert losses == wanted
            for name, value in reference.state_dict().items():
                assert torch.equal(model.state_dict()[name], value), name
        else:
            assert losses == pytest.approx(wanted, rel=0.02)  # bfloat16 has 8 bits; the path is what is checked
