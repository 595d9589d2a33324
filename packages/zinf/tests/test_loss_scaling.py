"""Loss scales against torch.amp.GradScaler's rule, and in a float16 run."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import SETTINGS, config, make, offloaded

import zinf
from zinf.loss_scaling import LossScale


def test_the_dynamic_scale_is_gradscalers():
    ours, theirs = LossScale("dynamic"), torch.amp.GradScaler("cpu", init_scale=65536.0, backoff_factor=0.5)
    param = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    overflows = {0, 1, 5}
    for step in range(2010):
        param.grad = torch.tensor([float("inf") if step in overflows else 1.0])
        theirs.scale(torch.ones(1))
        theirs.step(optimizer)
        theirs.update()
        ours.stepped(overflow=step in overflows)
        assert ours.value == theirs.get_scale(), step


def test_a_state_goes_on():
    scale = LossScale("dynamic")
    scale.stepped(overflow=True)
    other = LossScale("dynamic")
    other.load(scale.state())
    assert other.state() == scale.state()
    assert LossScale(128).value == 128.0
    assert LossScale(None).value == 1.0


@pytest.mark.parametrize("overlap", ["next-forward", False])
@pytest.mark.parametrize("clip", [None, "setting", "function"])
def test_a_float16_run_finds_its_scale(nvme, overlap, clip):
    """It begins too high, skips, halves, and then steps; also where clip_grad_norm_ is what meets the infinity."""
    model = zinf.shard(make(), config(nvme, dtype=torch.float16, loss_scale="dynamic", overlap_optimizer=overlap))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS, grad_clip=1.0 if clip == "setting" else None)
    start = zinf.full_state(model.norm.weight)["param"]
    skipped = []
    losses = []
    for step in range(12):
        loss = model.loss(model.data(step))
        optimizer.scale(loss).backward()
        if clip == "function":
            zinf.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.skipped)
        losses.append(loss.item())
    assert skipped[0]
    assert not skipped[-1]
    assert optimizer.loss_scale.value == 65536.0 / 2 ** sum(skipped)
    assert zinf.full_state(model.norm.weight)["step"] == 12 - sum(skipped)
    assert not torch.equal(zinf.full_state(model.norm.weight)["param"], start)
    assert all(loss == loss for loss in losses)


def test_torchs_gradscaler_is_refused_by_name(nvme):
    model, optimizer = offloaded(config(nvme))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model.loss(model.data(0))).backward()
    with pytest.raises(zinf.ConfigError, match="GradScaler"):
        scaler.step(optimizer)
