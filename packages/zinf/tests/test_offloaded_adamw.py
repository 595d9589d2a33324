"""zinf.AdamW of some of a model's parameters, of parameters that are thawed later, and with settings out of range."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from zinf_testing import SETTINGS, assert_same, config, make, state_of, train

import zinf
from cpu_adam.torch import CPUAdam
from zinf.config import OVERLAPS, TIERS


def own(model):
    """One whole unit, and a part of another."""
    return [*model.blocks[1].parameters(), model.norm.weight]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_others_parameters_stay_and_keep_their_gradients(nvme, tier, overlap):
    reference = make()
    wanted = train(reference, CPUAdam(own(reference), **SETTINGS), 3)
    model = zinf.shard(make(), config(nvme, tier, "cpu", tier, overlap_optimizer=overlap))
    optimizer = zinf.AdamW(own(model), **SETTINGS)
    assert train(model, optimizer, 3) == wanted
    assert_same(state_of(model), state_of(reference))
    foreign, its_reference = model.blocks[0].up.weight, reference.blocks[0].up.weight
    torch.testing.assert_close(zinf.full_grad(foreign), its_reference.grad)  # of three backwards, as in torch
    assert not model._zero3_model.store.has_moments(foreign._zero3.unit)
    model.zero_grad()
    assert zinf.full_grad(foreign) is None


@pytest.mark.parametrize("overlap", ["next-forward", False])
def test_grad_clip_measures_the_optimizers_own_parameters(nvme, overlap):
    reference = make()
    its_optimizer = CPUAdam(own(reference), **SETTINGS)
    norms = []
    for step in range(3):
        reference.loss(reference.data(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(own(reference), 0.01).item())
        its_optimizer.step()
        its_optimizer.zero_grad()
    model = zinf.shard(make(), config(nvme, overlap_optimizer=overlap))
    optimizer = zinf.AdamW(own(model), **SETTINGS, grad_clip=0.01)
    for step in range(3):
        train(model, optimizer, [step])
        assert zinf.report(model)["grad_norm"] == pytest.approx(norms[step], rel=1e-5)
    for name, value in state_of(reference).items():
        torch.testing.assert_close(model.state_dict()[name], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unit_size", ["1MiB", "3KiB"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_optimizer_of_torchs_trains_the_others(nvme, overlap, unit_size, dtype):
    """Parameters of the two lie in one unit, whose gradient is in the narrow dtype."""

    def run(model, adamw):
        others = [model.embedding.weight, model.blocks[0].up.weight, model.norm.bias]
        rest = [param for param in model.parameters() if all(param is not other for other in others)]
        optimizers = [adamw(rest, **SETTINGS), torch.optim.SGD(others, lr=0.1, momentum=0.9)]
        losses = []
        for step in range(4):
            loss = model.loss(model.data(step))
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return losses

    reference = make()
    wanted = run(reference, CPUAdam)
    cfg = config(nvme, "cpu", "cpu", "cpu", overlap_optimizer=overlap, unit_size=unit_size, dtype=dtype)
    model = zinf.shard(make(), cfg)
    found = run(model, zinf.AdamW)
    if dtype is torch.float32:
        assert found == wanted
        assert_same(state_of(model), state_of(reference))
    else:
        assert found == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_forward_writes_into_its_parameters_comes_before_the_update(nvme, tier, overlap, whole):
    """An embedding's max_norm, in a unit that stays gathered until backward and in one that does not."""

    def build():
        torch.manual_seed(0)
        layers = torch.nn.Embedding(30, 16, max_norm=0.5), torch.nn.Linear(16, 16), torch.nn.Linear(16, 1)
        return torch.nn.Sequential(*layers)

    reference = build()
    model = zinf.shard(build(), config(nvme, tier, "cpu", tier, overlap_optimizer=overlap,
                                       unit_size="1MiB" if whole else "1KiB"))  # fmt: skip
    optimizers = zinf.AdamW(model.parameters(), **SETTINGS), CPUAdam(reference.parameters(), **SETTINGS)
    for step in range(5):
        losses = []
        for one, optimizer in zip((model, reference), optimizers, strict=True):
            loss = one(torch.arange(step, step + 9)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1], step
    assert_same(state_of(model), state_of(reference))


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_is_thawed_later_gets_its_moments_then(nvme, tier, overlap):
    reference, model = make(), make()
    for one in (reference, model):
        one.blocks[0].requires_grad_(False)
    zinf.shard(model, config(nvme, tier, "cpu", tier, overlap_optimizer=overlap))
    optimizers = [CPUAdam(reference.parameters(), **SETTINGS), zinf.AdamW(model.parameters(), **SETTINGS)]
    losses = [train(one, optimizer, 2) for one, optimizer in zip((reference, model), optimizers, strict=True)]
    for one, optimizer, found in zip((reference, model), optimizers, losses, strict=True):
        one.blocks[0].requires_grad_(True)
        found += train(one, optimizer, range(2, 4))
    assert losses[1] == losses[0]
    assert_same(state_of(model), state_of(reference))


@pytest.mark.parametrize("grads", TIERS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_group_of_another_model_is_trained_too(nvme, grads, overlap):
    references, models = [make(seed) for seed in (1, 2)], [make(seed) for seed in (1, 2)]
    for model in models:
        zinf.shard(model, config(nvme, grads=grads, overlap_optimizer=overlap))
    losses = []
    for (first, second), kind in ((references, CPUAdam), (models, zinf.AdamW)):
        optimizer = kind(first.parameters(), **SETTINGS)
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 3e-3})
        for step in range(3):
            loss = first.loss(first.data(step)) + second.loss(second.data(step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[3:] == losses[:3]
    for model, reference in zip(models, references, strict=True):
        assert_same(state_of(model), state_of(reference))


def test_a_group_that_is_refused_adds_nothing(nvme):
    model, scaled = zinf.shard(make(), config(nvme)), zinf.shard(make(2), config(nvme, loss_scale=8.0))
    at_once = zinf.shard(make(3), config(nvme, overlap_optimizer="backward"))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS, grad_clip=1.0)
    with pytest.raises(zinf.ConfigError, match=r"loss_scale, which is None, 8\.0"):
        optimizer.add_param_group({"params": scaled.parameters()})
    with pytest.raises(zinf.ConfigError, match="norm"):
        optimizer.add_param_group({"params": at_once.parameters()})
    with pytest.raises(TypeError, match="partitioned"):
        optimizer.add_param_group({"params": make().parameters()})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, 1)
    for other in (scaled, at_once):
        zinf.AdamW(other.parameters())  # nobody has charge of them


@pytest.mark.parametrize("settings", [
    {"lr": -1.0}, {"lr": float("inf")}, {"lr": float("nan")}, {"lr": "fast"}, {"eps": None}, {"weight_decay": -0.1},
    {"betas": 0.9}, {"betas": (0.9,)}, {"betas": (0.9, 1.0)}, {"betas": ("a", "b")}, {"grad_clip": 0.0},
    {"accumulate": 0}, {"accumulate": 1.5}, {"accumulate": True}, {"grad_clip": "1.0"}, {"lr": "1e-3"}, {"lr": True},
])  # fmt: skip
def test_settings_out_of_range_are_named(nvme, settings):
    model = zinf.shard(make(), config(nvme))
    with pytest.raises(ValueError, match=next(iter(settings))):
        zinf.AdamW(model.parameters(), **settings)
    zinf.AdamW(model.parameters())  # the refused one has not taken charge


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_schedule_may_end_a_rounding_below_0(nvme, overlap):
    model = zinf.shard(make(), config(nvme, overlap_optimizer=overlap))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, end_factor=0.0, total_iters=5)
    for step in range(5):
        train(model, optimizer, [step])
        schedule.step()
    assert -1e-18 < optimizer.param_groups[0]["lr"] < 0
    before = state_of(model)
    train(model, optimizer, 2)
    assert_same(state_of(model), before)


@pytest.mark.parametrize("change", [{"lr": -0.1}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"eps": "small"}])
def test_a_group_that_was_changed_to_nonsense_is_refused_by_the_step(nvme, change):
    model = zinf.shard(make(), config(nvme))
    optimizer = zinf.AdamW([{"params": model.blocks.parameters()}, {"params": model.norm.parameters()}])
    train(model, optimizer, 1)
    group = optimizer.param_groups[1]
    before, sane = state_of(model), dict(group)
    model.loss(model.data(1)).backward()
    group.update(change)
    with pytest.raises(ValueError, match=next(iter(change))):
        optimizer.step()
    assert_same(state_of(model), before)
    group.update(sane)
    optimizer.step()
    assert zinf.full_state(model.blocks[0].up.weight)["step"] == 2


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_new_optimizer_of_the_same_parameters_begins_anew(nvme, tier, overlap):
    """As in torch, and as the cell of a notebook that runs again: what the first owes is done, its moments are gone."""
    reference, model = make(), make()
    zinf.shard(model, config(nvme, tier, "cpu", tier, overlap_optimizer=overlap))
    losses, firsts = [], []
    for one, kind in ((reference, CPUAdam), (model, zinf.AdamW)):
        optimizer = kind(one.parameters(), **SETTINGS)
        firsts.append(optimizer)
        found = train(one, optimizer, 2)
        optimizer = kind(one.parameters(), **{**SETTINGS, "lr": 1e-3})
        losses.append(found + train(one, optimizer, range(2, 5)))
    assert losses[1] == losses[0]
    assert_same(state_of(model), state_of(reference))
    assert zinf.full_state(model.norm.weight)["step"] == 3
    with pytest.raises(RuntimeError, match="trains these parameters"):
        firsts[1].step()


@pytest.mark.parametrize("grads", TIERS)
def test_a_gradient_that_waits_is_the_new_optimizers(nvme, grads):
    reference, model = make(), make()
    zinf.shard(model, config(nvme, grads=grads))
    losses = []
    for one, kind in ((reference, CPUAdam), (model, zinf.AdamW)):
        kind(one.parameters(), **SETTINGS)
        one.loss(one.data(0)).backward()
        optimizer = kind(one.parameters(), **SETTINGS)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(train(one, optimizer, range(1, 3)))
    assert losses[1] == losses[0]
    assert_same(state_of(model), state_of(reference))


def test_a_second_optimizer_beside_the_first_is_refused_and_changes_nothing(nvme):
    reference, model = make(), zinf.shard(make(), config(nvme))
    first = zinf.AdamW(model.parameters(), **SETTINGS)
    other = zinf.shard(make(2), config(nvme))
    second = zinf.AdamW(other.parameters(), **SETTINGS)
    with pytest.raises(ValueError, match="add a group to it"):
        zinf.AdamW(model.blocks.parameters())
    with pytest.raises(ValueError, match="add a group to it"):
        second.add_param_group({"params": list(model.parameters())})
    assert train(model, first, 2) == train(reference, CPUAdam(reference.parameters(), **SETTINGS), 2)
    train(other, second, 1)


def test_a_step_after_the_model_is_gone_says_so(nvme):
    model = zinf.shard(make(), config(nvme))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    blocks = model.blocks
    train(model, optimizer, 1)
    del model
    with pytest.raises(RuntimeError, match="gone"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="gone"):
        blocks[0].up(torch.ones(1, blocks[0].up.in_features))
    optimizer.zero_grad()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_that_would_train_nothing_is_refused(nvme, way):
    model = zinf.shard(make(), config(nvme))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    with pytest.raises(TypeError, match=r"zinf\.save"):
        way(optimizer)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), None, "1.0"])
def test_what_is_no_norm_clips_nothing(nvme, max_norm):
    """A negative one would turn the gradients round, as it does in torch."""
    model = zinf.shard(make(), config(nvme))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    twin = zinf.shard(make(), config(nvme))
    twins = zinf.AdamW(twin.parameters(), **SETTINGS)
    for one in (model, twin):
        one.loss(one.data(0)).backward()
    with pytest.raises(ValueError, match="max_norm"):
        zinf.clip_grad_norm_(model, max_norm)
    optimizer.step()
    twins.step()
    assert_same(state_of(model), state_of(twin))
