"""What would give one rank's own gradients as everybody's is refused, also while a unit is kept gathered."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import config, offloaded, train

import zero3


def refused(rank, world, nvme, changes):
    model, optimizer = offloaded(config(nvme, **changes))
    for _ in range(2):
        loss = model.loss(model.data(0).chunk(world)[rank])
        with pytest.raises(zero3.UnsupportedError, match="this rank's own gradient"):
            torch.autograd.grad(loss, list(model.parameters()))
        train(model, optimizer, 1, rank, world)


@pytest.mark.parametrize("changes", [{}, {"params": "cpu", "optimizer": "cpu"}, {"unit_size": 200}], ids=str)
def test_autograd_grad_on_two_ranks(ranks, nvme, changes):
    ranks(refused, 2, str(nvme), changes)
