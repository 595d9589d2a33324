"""Faults that users of such software have met (shared/cases), as scenarios for ours."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from zinf_testing import SETTINGS, config, full_states, make, offloaded, plain, state_of, train

import zero3
import zinf
from cpu_adam.torch import CPUAdam
from zinf.config import OVERLAPS

KEEPING = [overlap for overlap in OVERLAPS if overlap != "backward"]  # modes in which gradients can be looked at


def same_weights(model, wanted):
    state = model.state_dict()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


# -- accumulation ---------------------------------------------------------------------------------------------


def plain_accumulating(world, steps, micro_batches):
    """Each rank's micro-batches one after the other; their gradients' mean over the ranks, summed; full norms."""
    model, optimizer = plain(optimizer=CPUAdam)
    norms = []
    for step in range(steps):
        total = None
        for number in range(micro_batches):
            mean = None
            for part in model.data(step, 8).chunk(micro_batches)[number].chunk(world):
                model.zero_grad()
                (model.loss(part) / micro_batches).backward()
                gradients = [param.grad for param in model.parameters()]
                mean = gradients if mean is None else [one + other for one, other in zip(mean, gradients, strict=True)]
            mean = [grad / world for grad in mean]
            total = mean if total is None else [one + other for one, other in zip(total, mean, strict=True)]
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad
        norms.append(torch.stack([grad.double().square().sum() for grad in total]).sum().sqrt().item())
        optimizer.step()
    return state_of(model), norms


def accumulating(rank, world, nvme, optimizer_tier, grads, overlap, accumulate):
    model = zinf.shard(make(), config(nvme, grads=grads, optimizer=optimizer_tier, overlap_optimizer=overlap))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS, accumulate=accumulate)
    wanted, norms = plain_accumulating(world, 3, 4)
    for step in range(3):
        for part in model.data(step, 8).chunk(4):
            (model.loss(part.chunk(world)[rank]) / 4).backward()
        if overlap != "backward":
            assert zinf.clip_grad_norm_(model, 1e9).item() == pytest.approx(norms[step], rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
    same_weights(model, wanted)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_four_micro_batches_are_summed_on_every_tier(ranks, nvme, overlap, world):
    for tier, grads in (("cpu", "cpu"), ("nvme", "nvme"), ("nvme", "cpu")):
        for accumulate in (4,) if overlap == "backward" else (1, 4):
            arguments = (str(nvme), tier, grads, overlap, accumulate)
            if world == 1:
                accumulating(0, 1, *arguments)
            else:
                ranks(accumulating, 2, *arguments)


def test_micro_batches_sum_to_the_gradient_of_the_whole_batch(nvme):
    model, _ = offloaded(config(nvme, grads="nvme"))
    reference = make()
    reference.loss(reference.data(0, 8)).backward()
    for part in model.data(0, 8).chunk(4):
        (model.loss(part) / 4).backward()
    for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        found = zinf.full_grad(param)
        assert (found - whole.grad).abs().max() <= 1e-6 * whole.grad.abs().max(), name


def unsynced(rank, world, nvme, overlap):
    model, optimizer = offloaded(config(nvme, grads="nvme", overlap_optimizer=overlap))
    reference, plain_optimizer = plain(optimizer=CPUAdam)
    for step in range(3):
        first, second = model.data(step, 8).chunk(2)
        with zinf.no_sync(model):
            (model.loss(first.chunk(world)[rank]) / 2).backward()
        (model.loss(second.chunk(world)[rank]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        sums = []
        for part in range(world):
            reference.zero_grad()
            (reference.loss(first.chunk(world)[part]) / 2).backward()
            (reference.loss(second.chunk(world)[part]) / 2).backward()
            sums.append([param.grad for param in reference.parameters()])
        for param, *grads in zip(reference.parameters(), *sums, strict=True):
            param.grad = sum(grads) / world
        plain_optimizer.step()
    for name, value in reference.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_no_sync(ranks, nvme, overlap):
    ranks(unsynced, 2, str(nvme), overlap)


# -- clipping -------------------------------------------------------------------------------------------------


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(12, 24), nn.Linear(12, 12), nn.Linear(24, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def batch(step, rank=0, world=1):
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]


def clipped(rank, world, nvme, tier, grads, overlap, how):
    """Every way of clipping; the update equals the plain clipped one up to the rounding of the factor."""
    torch.manual_seed(1)
    reference = WithUnused()
    torch.manual_seed(1)
    model = zinf.shard(WithUnused(), config(nvme, grads=grads, optimizer=tier, overlap_optimizer=overlap, unit_size=0))
    plain_optimizer = CPUAdam(reference.parameters(), **SETTINGS)
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS, grad_clip=0.1 if how == "engine" else None)
    for step in range(3):
        gradients = []
        for part in range(world):
            reference.zero_grad()
            reference(batch(step, part, world)).square().mean().backward()
            gradients.append([param.grad for param in reference.parameters()])
        for param, *grads_of in zip(reference.parameters(), *gradients, strict=True):
            param.grad = None if grads_of[0] is None else sum(grads_of) / world
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain_optimizer.step()
        model(batch(step, rank, world)).square().mean().backward()
        if how == "zinf":
            found = zinf.clip_grad_norm_(model, 0.1)
        elif how == "zero3":
            found = zero3.clip_grad_norm_(model, 0.1)
        elif how == "torch":
            found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        found = zinf.report(model)["grad_norm"] if how == "engine" else found
        assert float(found) == pytest.approx(wanted.item(), rel=1e-5)
        optimizer.zero_grad()
    for name, value in reference.state_dict().items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-5, atol=1e-6), name
    return float(found)


@pytest.mark.parametrize("how", ["zinf", "engine", "zero3", "torch"])
@pytest.mark.parametrize(("tier", "grads"), [("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")])
def test_clipping_with_an_unused_parameter(ranks, nvme, tier, grads, how):
    for overlap in KEEPING:
        clipped(0, 1, str(nvme), tier, grads, overlap, how)
        one, other = ranks(clipped, 2, str(nvme), tier, grads, overlap, how)
        assert one == other


@pytest.mark.parametrize("clip", [zinf.clip_grad_norm_, zero3.clip_grad_norm_])
def test_clipping_after_an_update_in_backward_is_refused_with_the_alternatives(nvme, clip):
    model, _ = offloaded(config(nvme, overlap_optimizer="backward"))
    model.loss(model.data(0)).backward()
    with pytest.raises((zinf.ConfigError, zero3.UnsupportedError), match="grad_clip"):
        clip(model, 1.0)


def test_torchs_helper_never_clips_nothing_in_silence(nvme):
    model, _ = offloaded(config(nvme, overlap_optimizer="backward"))
    model.loss(model.data(0)).backward()
    with pytest.raises((zinf.ConfigError, zero3.UnsupportedError), match="backward"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


# -- skipped steps --------------------------------------------------------------------------------------------


def overflowing(rank, world, nvme, overlap, settings, per_rank):
    """An inf gradient at step 2 of 5 (on one rank only): the end is that of 4 steps."""

    def run(steps):
        cfg = config(nvme, grads="nvme", overlap_optimizer=overlap, **settings)
        model = zinf.shard(make(), cfg)
        optimizer = zinf.AdamW(model.parameters(), **SETTINGS, grad_clip=None if "loss_scale" in settings else 1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)
        for step in steps:
            before = full_states(model)
            loss = model.loss(model.data(step).chunk(world)[rank])
            infinite = step == 2 and len(steps) == 5 and rank in per_rank
            optimizer.scale(loss * float("inf") if infinite else loss).backward()
            optimizer.step()
            assert optimizer.skipped == (step == 2 and len(steps) == 5)
            if optimizer.skipped:
                after = full_states(model)
                for name, state in before.items():
                    for kind, value in state.items():
                        same = torch.equal(value, after[name][kind]) if kind != "step" else value == after[name][kind]
                        assert same, (name, kind)
            else:
                scheduler.step()
            optimizer.zero_grad()
        return full_states(model), optimizer.param_groups[0]["lr"]

    (found, lr), (wanted, wanted_lr) = run([0, 1, 2, 3, 4]), run([0, 1, 3, 4])
    assert lr == wanted_lr
    for name, state in wanted.items():
        assert found[name]["step"] == state["step"] == 4
        assert all(torch.equal(found[name][kind], state[kind]) for kind in ("param", "exp_avg", "exp_avg_sq")), name


@pytest.mark.parametrize("overlap", KEEPING)
@pytest.mark.parametrize("settings", [{}, {"dtype": torch.float16, "loss_scale": 64.0}], ids=["clipped", "fp16"])
def test_an_overflow_skips_the_step_and_says_so(ranks, nvme, overlap, settings):
    overflowing(0, 1, str(nvme), overlap, settings, per_rank=(0,))
    ranks(overflowing, 2, str(nvme), overlap, settings, (1,))


# -- schedules ------------------------------------------------------------------------------------------------

SCHEDULES = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "by hand": None,
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_new_rate_is_used_on_the_very_next_step_and_what_is_frozen_stays(nvme, overlap, name):
    """All parameters go into the optimizer, half of them frozen; the rate changes after every step."""

    def run(model, optimizer):
        assert isinstance(optimizer, torch.optim.Optimizer)
        scheduler = SCHEDULES[name](optimizer) if SCHEDULES[name] else None
        for step in range(5):
            train(model, optimizer, [step])
            if scheduler:
                scheduler.step()
            else:
                optimizer.param_groups[0]["lr"] = 0.01 / (2 + step)
        return state_of(model)

    def frozen_half(model):
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        return model

    reference, start = frozen_half(make()), state_of(make())
    wanted = run(reference, CPUAdam(reference.parameters(), **SETTINGS))
    for tier in ("cpu", "nvme"):
        model = zinf.shard(frozen_half(make()), config(nvme, tier, tier, tier, overlap_optimizer=overlap))
        found = run(model, zinf.AdamW(model.parameters(), **SETTINGS))
        for key, value in wanted.items():
            assert torch.equal(found[key], value), (tier, key)
            assert torch.equal(found[key], start[key]) == key.startswith(("blocks.0", "blocks.1", "seen")), key


# -- one path, several models ---------------------------------------------------------------------------------


def test_two_models_on_one_path(nvme):
    """One trains, one is frozen; each gives what it gives alone."""
    alone = train(*offloaded(config(nvme)), 4)
    teacher = make(seed=2, width=24)
    wanted = [teacher(teacher.data(step)).sum().item() for step in range(4)]
    model, optimizer = offloaded(config(nvme))
    frozen = zinf.shard(make(seed=2, width=24).requires_grad_(False), config(nvme))
    losses, seen = [], []
    for step in range(4):
        seen.append(frozen(frozen.data(step)).sum().item())
        losses += train(model, optimizer, [step])
    assert (losses, seen) == (alone, wanted)


SEPARATE = """
import sys
from zinf_testing import config, offloaded, train
print(*train(*offloaded(config(sys.argv[1]), seed=int(sys.argv[2])), 6))
"""


def test_two_processes_on_one_path(nvme, run_python):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as both:
        found = list(both.map(lambda seed: run_python(SEPARATE, nvme, seed), (1, 2)))
    for seed, text in zip((1, 2), found, strict=True):
        assert [float(loss) for loss in text.split()] == train(*offloaded(config(nvme), seed=seed), 6)
    assert os.listdir(nvme) == []


# -- a model that was built before ----------------------------------------------------------------------------


def test_a_model_built_without_init_is_partitioned_on_the_spot(nvme):
    wanted = train(*plain(optimizer=CPUAdam), 4)
    model, optimizer = offloaded(config(nvme))
    assert train(model, optimizer, 4) == wanted
    placement = zinf.report(model)["placement"]
    for name, _ in model.named_parameters():
        assert placement[name] == {"params": "nvme", "grads": "cpu", "optimizer": "nvme"}, name


def test_a_model_built_under_init_with_another_configuration(nvme):
    wanted = train(*plain(optimizer=CPUAdam), 4)
    with zinf.init(config(nvme, "cpu", "cpu", "cpu")):
        model = make()
    model = zinf.shard(model, config(nvme))
    assert train(model, zinf.AdamW(model.parameters(), **SETTINGS), 4) == wanted
    assert {tuple(tiers.values()) for tiers in zinf.report(model)["placement"].values()} == {("nvme", "cpu", "nvme")}


# -- losses made outside the model ----------------------------------------------------------------------------


def losses_outside(rank, world, nvme, overlap):
    data = [torch.randn(4, 12, generator=torch.Generator().manual_seed(step)) for step in range(3)]

    def pair(offload):
        models = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))
            models.append(zinf.shard(net, config(nvme, overlap_optimizer=overlap, unit_size=0)) if offload else net)
        make_optimizer = zinf.AdamW if offload else CPUAdam
        return models, [make_optimizer(model.parameters(), **SETTINGS) for model in models]

    def run(models, optimizers):
        seen = []
        for x in data:
            first, second = models
            out = first(x)
            out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))  # of a non-scalar
            optimizers[0].step()
            optimizers[0].zero_grad()
            loss = (first(x) - second(x)).square().mean() + second(x).abs().mean()  # over two engines
            loss.backward()
            seen.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return seen, [state_of(model) for model in models]

    losses, states = run(*pair(True))
    wanted_losses, wanted = run(*pair(False))
    assert losses == wanted_losses
    for found, of in zip(states, wanted, strict=True):
        for name, value in of.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_ordinary_losses_of_any_kind(ranks, nvme, overlap):
    losses_outside(0, 1, str(nvme), overlap)
    ranks(losses_outside, 2, str(nvme), overlap)  # both ranks the same data: the mean is the plain gradient


# -- budgets that cannot hold a parameter ---------------------------------------------------------------------


class BigEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50_000, 100)
        self.head = nn.Linear(100, 4)

    def forward(self, tokens):
        return self.head(self.words(tokens)).mean(1)


def test_a_parameter_larger_than_the_budgets(nvme):
    """On the device in tiles; in a host's memory that is too small even for those, refused at construction with the
    parameter, the need, the setting, and a value that works."""
    budgets = {"device_memory": "4MiB", "host_memory": "4MiB"}
    with pytest.raises(zinf.ConfigError) as refusal:
        zinf.shard(BigEmbedding(), config(nvme, grads="nvme", unit_size="auto", **budgets))
    text = str(refusal.value)
    assert "words.weight" in text
    assert "(now '4096KiB')" in text
    assert "device_memory" not in text
    budgets["host_memory"] = text.split("host_memory='")[1].split("'")[0]
    torch.manual_seed(1)
    reference = BigEmbedding()
    torch.manual_seed(1)
    model = zinf.shard(BigEmbedding(), config(nvme, grads="nvme", unit_size="auto", **budgets))
    tokens = torch.arange(12).view(3, 4)
    found, wanted = [], []
    for net, make_optimizer, losses in ((model, zinf.AdamW, found), (reference, CPUAdam, wanted)):
        optimizer = make_optimizer(net.parameters(), **SETTINGS)
        for _ in range(2):
            loss = net(tokens).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert found == wanted
    assert os.listdir(nvme) == []


# -- buffers that are never freed -----------------------------------------------------------------------------


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_memory_does_not_grow_over_200_steps(nvme, overlap):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(20)])
    # On a CPU one pool has the gathered units too, of which this lets eight be there at once; the bound below allows
    # for sixteen. All twenty, beside a stream that reads gradients with the states and fills its budget, are more.
    budgets = {"resident": 0, "device_memory": "16MiB"}
    cfg = zinf.Config.preset("inf-nvme", nvme=[nvme], grads="nvme", overlap_optimizer=overlap, **budgets)
    model = zinf.shard(net, cfg)
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    x = torch.ones(1, 1000, dtype=torch.bfloat16)
    pool = model._zero3_model.store.tiers.host_pool
    seen = []
    for step in range(200):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 20 and step % 20 == 19:
            optimizer.settle()
            seen.append((resident_bytes(), pool.nbytes, pool.in_use))
    assert {in_use for _, _, in_use in seen} == {0}
    stream, unit = model._zero3_model.store.updates.stream, 2 * 1000 * 1000
    assert seen[-1][1] <= stream.budget + 2 * 8 * unit  # how many writes are on their way at once varies, up to this
    beside = [rss - pooled for rss, pooled, _ in seen]
    assert beside[-1] - beside[0] < 0.02 * stream.budget
