"""A graph that is older than a step: its backward is refused, as plain torch refuses it, wherever the states lie."""

from __future__ import annotations

import pytest
from zinf_testing import EVERYWHERE, SETTINGS, config, make, train

import zinf
from zinf.config import OVERLAPS

PLACED = [*EVERYWHERE, ("device", "nvme"), ("cpu", "nvme")]


@pytest.mark.parametrize(("params", "optimizer"), PLACED)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("unit_size", ["3KiB", "1MiB"])  # many units; one, of which nothing else reads ahead
def test_a_backward_through_weights_of_before_the_step_raises(nvme, params, optimizer, overlap, unit_size):
    cfg = config(nvme, params, "cpu", optimizer, overlap_optimizer=overlap, unit_size=unit_size)
    model = zinf.shard(make(), cfg)
    adamw = zinf.AdamW(model.parameters(), **SETTINGS)
    wanted_model = zinf.shard(make(), cfg)
    wanted = train(wanted_model, zinf.AdamW(wanted_model.parameters(), **SETTINGS), 3)

    losses = [model.loss(model.data(0)) for _ in range(2)]
    losses[0].backward()
    adamw.step()
    adamw.zero_grad()
    with pytest.raises(RuntimeError, match=r"changed|modified by an inplace operation"):
        losses[1].backward()
    adamw.zero_grad()
    assert [losses[0].item(), *train(model, adamw, range(1, 3))] == wanted
