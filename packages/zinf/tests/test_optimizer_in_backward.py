"""Mode "backward": gradients are kept nowhere, micro-batches are told by `accumulate`."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import SETTINGS, config, make, offloaded, plain, train

import zinf
from cpu_adam.torch import CPUAdam


def backward(nvme, **changes):
    return zinf.shard(make(), config(nvme, overlap_optimizer="backward", **changes))


def test_no_gradient_waits_after_a_backward(nvme):
    model = backward(nvme)
    zinf.AdamW(model.parameters(), **SETTINGS)
    model.loss(model.data(0)).backward()
    engine = model._zero3_model.store
    assert not any(engine.waits(unit) for unit in model._zero3_model.units)
    assert engine.tiers.of("cpu").nbytes == 0


def test_gradients_cannot_be_looked_at(nvme):
    model = backward(nvme)
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    model.loss(model.data(0)).backward()
    for look in (lambda: model.norm.weight.grad, lambda: zinf.full_grad(model.norm.weight)):
        with pytest.raises(zinf.ConfigError, match="next-forward"):
            look()
    optimizer.step()
    optimizer.zero_grad()
    assert model.norm.weight.grad is None


def test_micro_batches_without_accumulate_are_refused(nvme):
    model = backward(nvme)
    zinf.AdamW(model.parameters(), **SETTINGS)
    model.loss(model.data(0)).backward()
    with pytest.raises(zinf.ConfigError, match="accumulate=K"):
        model(model.data(1))


def test_clipping_is_refused_when_the_optimizer_is_made(nvme):
    model = backward(nvme)
    with pytest.raises(zinf.ConfigError, match="next-forward"):
        zinf.AdamW(model.parameters(), grad_clip=1.0)


def test_a_graph_that_is_kept_for_a_second_backward(nvme):
    """The unit's values must stay until the last backward that needs them: both add up, as in plain torch."""

    def run(model, optimizer):
        loss = model.loss(model.data(0))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return train(model, optimizer, range(1, 3))

    wanted = run(*plain(optimizer=CPUAdam))
    assert run(*offloaded(config(nvme, overlap_optimizer="backward"))) == wanted


def test_a_closure_runs_within_step(nvme):
    model, optimizer = offloaded(config(nvme, overlap_optimizer=False))
    wanted = train(*plain(optimizer=CPUAdam), 3)

    steps = iter(range(3))

    def closure():
        optimizer.zero_grad()
        loss = model.loss(model.data(next(steps)))
        loss.backward()
        return loss.item()

    assert [optimizer.step(closure) for _ in range(3)] == wanted


def test_two_forwards_and_one_backward(nvme):
    def run(model, optimizer):
        losses = []
        for step in range(3):
            loss = model.loss(model.data(step)) + 0.5 * model.loss(model.data(step + 50))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    wanted = run(*plain(optimizer=CPUAdam))
    for overlap in ("backward", "next-forward", False):
        assert run(*offloaded(config(nvme, overlap_optimizer=overlap))) == wanted


def test_a_loss_that_is_thrown_away(nvme):
    def run(model, optimizer):
        losses = []
        for step in range(3):
            model.loss(model.data(step + 50))  # never differentiated
            losses += train(model, optimizer, [step])
        return losses

    wanted = run(*plain(optimizer=CPUAdam))
    for overlap in ("backward", "next-forward", False):
        assert run(*offloaded(config(nvme, overlap_optimizer=overlap))) == wanted
    assert torch.is_grad_enabled()
