"""Gradients that user code keeps, changes or gives where no backward runs: behind step(), and without a backward."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import EVERYWHERE, SETTINGS, config, make, offloaded, state_of

import zinf
from cpu_adam.torch import CPUAdam
from zinf.config import OVERLAPS

WITH_GRADIENTS = [overlap for overlap in OVERLAPS if overlap != "backward"]  # which keeps none


def backward(model, step: int) -> None:
    model.loss(model.data(step)).backward()


def zeroed_by_the_model(model, optimizer, step):
    backward(model, step)
    optimizer.step()
    model.zero_grad(set_to_none=False)


def kept_from_before_the_step(model, optimizer, step):
    backward(model, step)
    grads = [param.grad for param in model.parameters()]
    optimizer.step()
    torch._foreach_zero_(grads)


def kept_until_behind_a_forward(model, optimizer, step):
    backward(model, step)
    grads = [param.grad for param in model.parameters()]
    optimizer.step()
    with torch.no_grad():
        model(model.data(step))
    torch._foreach_mul_(grads, 0.5)


def halved(model, optimizer, step):
    backward(model, step)
    optimizer.step()
    for param in model.parameters():
        param.grad.mul_(0.5)


def replaced(model, optimizer, step):
    backward(model, step)
    optimizer.step()
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)


def given_for_no_backward(model, optimizer, step):
    for number, param in enumerate(model.parameters()):
        if number % 3:
            param.grad = torch.full_like(param, 1e-3 * (number - step))
    optimizer.step()
    optimizer.zero_grad()


def given_ahead_of_backward(model, optimizer, step):
    for number, param in enumerate(model.parameters()):
        if number % 3:
            param.grad = torch.full_like(param, 1e-3 * (number - step))
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def assert_as_torch(nvme, run, overlap, params, grads, optimizer):
    found, reference = offloaded(config(nvme, params, grads, optimizer, overlap_optimizer=overlap)), make()
    for model, optim in (found, (reference, CPUAdam(reference.parameters(), **SETTINGS))):
        for step in range(4):
            run(model, optim, step)
    wanted = state_of(reference)
    for name, value in state_of(found[0]).items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("run", [
    zeroed_by_the_model, kept_from_before_the_step, kept_until_behind_a_forward, halved, replaced,
    given_for_no_backward, given_ahead_of_backward,
])  # fmt: skip
@pytest.mark.parametrize("grads", ["cpu", "nvme"])
@pytest.mark.parametrize(("params", "optimizer"), EVERYWHERE)
@pytest.mark.parametrize("overlap", WITH_GRADIENTS)
def test_as_in_torch(nvme, run, grads, overlap, params, optimizer):
    """The step has used the gradients of its call, also where it is made later."""
    assert_as_torch(nvme, run, overlap, params, grads, optimizer)


@pytest.mark.parametrize("run", [given_for_no_backward, given_ahead_of_backward])
@pytest.mark.parametrize(("params", "optimizer"), EVERYWHERE)
def test_given_ones_wait_for_step(nvme, run, params, optimizer):
    assert_as_torch(nvme, run, "backward", params, "cpu", optimizer)


def test_one_that_was_used_up_cannot_be_replaced(nvme):
    model, optimizer = offloaded(config(nvme, overlap_optimizer="backward"))
    backward(model, 0)
    with pytest.raises(zinf.ConfigError, match="is gone"):
        model.norm.weight.grad = torch.zeros_like(model.norm.weight)
    optimizer.step()
