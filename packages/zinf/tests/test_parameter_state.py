"""Looking at and setting whole states, on every tier and on several ranks."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import SETTINGS, ManyDtypes, assert_same, config, full_states, make, offloaded, plain, state_of, train

import zero3
import zinf
from cpu_adam.torch import CPUAdam
from zinf.config import OVERLAPS, TIERS


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("small", [False, True], ids=["", "in pieces"])
def test_states_are_plain_torchs(nvme, overlap, small, request):
    if small:
        request.getfixturevalue("small_pieces")
    reference, its_optimizer = plain(optimizer=CPUAdam)
    train(reference, its_optimizer, 3)
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    train(model, optimizer, 3)
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        found, wanted = zinf.full_state(param), its_optimizer.state[other]
        assert torch.equal(found["param"], other), name
        assert torch.equal(found["exp_avg"], wanted["exp_avg"]), name
        assert torch.equal(found["exp_avg_sq"], wanted["exp_avg_sq"]), name
        assert found["step"] == 3


def everything(rank, world, nvme, dtype):
    """Set on two ranks what one rank had: everybody sees it, and training goes on with it."""
    torch.manual_seed(5)
    model, optimizer = offloaded(config(nvme, dtype=dtype), width=18)
    train(model, optimizer, 1, rank, world)
    for name, param in model.named_parameters():
        shape = zero3.full_shape(param)
        state = {kind: torch.rand(shape) for kind in ("param", "exp_avg", "exp_avg_sq")} | {"step": 41}
        zinf.set_full_state(param, **state)
        assert_same(zinf.full_state(param), state)
        assert model.state_dict()[name].shape == shape
    model.loss(model.data(0).chunk(world)[rank]).backward()
    whole = [zinf.full_grad(param) for param in model.parameters()]
    optimizer.step()
    assert zinf.full_state(model.norm.weight)["step"] == 42
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_setting_and_looking_on_two_ranks(ranks, nvme, dtype):
    everything(0, 1, str(nvme), dtype)
    one, other = ranks(everything, 2, str(nvme), dtype)
    for grad, its in zip(one, other, strict=True):
        assert torch.equal(grad, its)


@pytest.mark.parametrize(("change", "error"), [
    ({"step": -1}, ValueError), ({"step": 1.5}, ValueError), ({"step": "3"}, ValueError), ({"step": True}, ValueError),
    ({"step": float("nan")}, ValueError), ({"step": float("inf")}, ValueError),
    ({"exp_avg": [1.0]}, TypeError), ({"param": 0.0}, TypeError),
    ({"exp_avg": torch.ones(16, dtype=torch.complex64)}, TypeError),
    ({"param": torch.ones(16, dtype=torch.complex64)}, TypeError),
    ({"exp_avg_sq": torch.ones(16, device="meta"), "param": torch.ones(16)}, TypeError),
])  # fmt: skip
def test_states_that_make_no_sense_are_refused_by_name(nvme, change, error):
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, 1)
    before = zinf.full_state(model.norm.weight)
    with pytest.raises(error, match=rf"{next(iter(change))}.*norm\.weight"):
        zinf.set_full_state(model.norm.weight, change)
    assert_same(zinf.full_state(model.norm.weight), before)


def other_dtypes(rank, world, nvme, tier):
    """What float32 does not hold is whole, and stays what it is when it is set."""
    plain, model = ManyDtypes(3), zinf.shard(ManyDtypes(3), config(nvme, tier, optimizer=tier))
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = zinf.full_state(param)["param"]
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found, wanted), name
        zinf.set_full_state(param, param=wanted.detach().flip(0))
        assert torch.equal(zinf.full_state(param)["param"], wanted.flip(0)), name


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_that_float32_cannot_hold(ranks, nvme, tier, world):
    ranks(other_dtypes, world, str(nvme), tier)


def test_a_complex_gradient_is_whole(nvme):
    class Phases(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.phases = torch.nn.Parameter(torch.complex(torch.ones(4), torch.arange(4.0)))

        def forward(self):
            return (self.phases * torch.arange(1.0, 5.0)).abs().square().sum()

    reference, model = Phases(), zinf.shard(Phases(), config(nvme, "cpu", optimizer="cpu"))
    reference().backward()
    model().backward()
    assert torch.equal(zinf.full_grad(model.phases), reference.phases.grad)


def test_gradients_are_plain_torchs(nvme):
    reference, _ = plain()
    reference.loss(reference.data(0)).backward()
    for grads in TIERS:
        model, _ = offloaded(config(nvme, grads=grads, overlap_optimizer=False))
        assert zinf.full_grad(model.norm.weight) is None
        model.loss(model.data(0)).backward()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(zinf.full_grad(param), other.grad)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_changes_inside_gathered_keep_the_same_numbers_on_every_tier(nvme, dtype, overlap):
    """Between steps and right after one: a pending update is settled first, what is written is what is there."""

    def run(place):
        model, optimizer = offloaded(config(nvme, place, place, place, dtype=dtype, overlap_optimizer=overlap))
        losses = train(model, optimizer, 2)
        with zero3.gathered([model.blocks[0].up.weight, model.norm.weight], modify=True), torch.no_grad():
            model.blocks[0].up.weight[1].mul_(2)
            model.norm.weight.clamp_(max=1.0)
        losses += train(model, optimizer, range(2, 4))
        zero3.load_state_dict(model, {name: value * 0.5 for name, value in model.state_dict().items()})
        losses += train(model, optimizer, range(4, 6))
        return losses, full_states(model)

    losses, states = run("device")
    for place in ("cpu", "nvme"):
        found, its_states = run(place)
        assert found == losses
        assert_same(its_states, states)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_change_of_a_unit_whose_states_were_read_ahead(nvme, overlap):
    """The order of before says the unit is next; it is changed instead, then used: the change counts."""

    def run(model, optimizer, modify):
        losses = train(model, optimizer, 2)
        part = model.blocks[1]
        model.blocks[1] = torch.nn.Identity()  # skipped in this step, though expected
        losses += train(model, optimizer, [2])
        model.blocks[1] = part
        with modify(part.up.weight), torch.no_grad():
            part.up.weight.add_(0.25)
        return losses + train(model, optimizer, range(3, 5))

    import contextlib

    wanted = run(*plain(optimizer=CPUAdam), lambda param: contextlib.nullcontext())
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    assert run(model, optimizer, lambda param: zero3.gathered(param, modify=True)) == wanted


def test_wrong_shapes_and_missing_optimizers_are_refused(nvme):
    model = zinf.shard(make(), config(nvme))
    with pytest.raises(ValueError, match="shape"):
        zinf.set_full_state(model.norm.weight, param=torch.ones(3))
    with pytest.raises(RuntimeError, match=r"zinf\.AdamW"):
        zinf.set_full_state(model.norm.weight, exp_avg=torch.ones(16))
    with pytest.raises(TypeError):
        zinf.full_state(torch.nn.Parameter(torch.ones(1)))


def test_frozen_parameters_have_values_and_no_moments_until_they_are_thawed(nvme):
    """No room, no reads, no writes; thawed later, they train like plain torch's."""
    reference = make()
    reference.blocks[0].requires_grad_(False)
    its_optimizer = CPUAdam(reference.parameters(), **SETTINGS)
    wanted = train(reference, its_optimizer, 2)
    reference.blocks[0].requires_grad_(True)
    wanted += train(reference, its_optimizer, range(2, 4))
    for overlap in OVERLAPS:
        model = make()
        model.blocks[0].requires_grad_(False)
        zinf.shard(model, config(nvme, overlap_optimizer=overlap))
        optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
        engine = model._zero3_model.store
        frozen = [unit for unit in model._zero3_model.units if not unit.trainable]
        assert frozen
        assert not any(engine.has_moments(unit) for unit in frozen)
        losses = train(model, optimizer, 2)
        assert zinf.full_state(model.blocks[0].up.weight)["step"] == 0
        model.blocks[0].requires_grad_(True)
        assert losses + train(model, optimizer, range(2, 4)) == wanted
        assert_same(state_of(model), state_of(reference))
