"""The optimizer's state dict: what it holds, and that moments are never lost in silence."""

from __future__ import annotations

import copy

import pytest
import torch
from zinf_testing import SETTINGS, assert_close, assert_same, config, full_states, offloaded, plain, state_of, train

import zinf


def test_it_holds_settings_and_counters_only(nvme):
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, 3)
    found = optimizer.state_dict()
    assert {tuple(state.items()) for state in found["state"].values()} == {(("step", 3),)}
    assert found["param_groups"][0]["lr"] == SETTINGS["lr"]


def test_loading_one_without_moments_is_refused_and_changes_nothing(nvme):
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 9.0
    before = full_states(model)
    with pytest.raises(RuntimeError, match=r"no moments.*zinf\.save"):
        optimizer.load_state_dict(state)
    assert_same(full_states(model), before)
    assert optimizer.param_groups[0]["lr"] == SETTINGS["lr"]


def test_one_of_an_optimizer_that_has_not_stepped_is_taken(nvme):
    _, optimizer = offloaded(config(nvme))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 9.0
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 9.0


@pytest.mark.parametrize(("params", "optimizer"), [("device", "device"), ("cpu", "cpu"), ("nvme", "nvme")])
def test_a_run_of_torchs_adamw_goes_on(nvme, params, optimizer):
    reference, plain_optimizer = plain()
    train(reference, plain_optimizer, 3)
    model, adamw = offloaded(config(nvme, params=params, optimizer=optimizer), seed=5)
    model.load_state_dict(reference.state_dict())
    saved = copy.deepcopy(plain_optimizer.state_dict())
    saved["param_groups"][0]["lr"] = plain_optimizer.param_groups[0]["lr"] = 3e-3
    adamw.load_state_dict(saved)
    for name, param in model.named_parameters():
        state, wanted = zinf.full_state(param), plain_optimizer.state[dict(reference.named_parameters())[name]]
        assert torch.equal(state["exp_avg"], wanted["exp_avg"]), name
        assert torch.equal(state["exp_avg_sq"], wanted["exp_avg_sq"]), name
        assert state["step"] == 3
    wanted = train(reference, plain_optimizer, range(3, 6))
    assert train(model, adamw, range(3, 6)) == pytest.approx(wanted, rel=1e-5)
    assert_close(state_of(model), state_of(reference), relative=1e-4)


def test_other_groups_are_refused(nvme):
    reference, _ = plain()
    params = list(reference.parameters())
    state = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}]).state_dict()
    _, optimizer = offloaded(config(nvme))
    with pytest.raises(ValueError, match="parameter groups of"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(torch.optim.AdamW(params, amsgrad=True).state_dict())
