"""CPUAdam beside torch's own Adam and AdamW."""

import copy
import io
import pickle

import pytest

import cpu_adam

torch = pytest.importorskip("torch", reason="torch is not installed")

from cpu_adam.torch import CPUAdam  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # last-bit differences come back through the gradients of later steps


def model(seed=0, dtype=torch.float32):
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    built = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LayerNorm(288), torch.nn.Linear(288, 5)
    )
    torch.random.set_rng_state(generator_state)
    return built.to(dtype)


def batch(step, dtype=torch.float32):
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(net, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        net(batch(step, next(net.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def assert_models_close(a, b, **tolerance):
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **(tolerance or CLOSE), msg=lambda text, name=name: f"{name}: {text}")


def assert_states_close(a, b):
    for p, q in zip(a.param_groups[0]["params"], b.param_groups[0]["params"], strict=True):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a.state[p][key], b.state[q][key], rtol=1e-4, atol=1e-7)


# ---- arithmetic ----


@pytest.mark.parametrize("settings", [
    {}, {"lr": 1e-2, "weight_decay": 0.1}, {"betas": (0.8, 0.9), "eps": 1e-4}, {"maximize": True, "weight_decay": 0.1},
    {"lr": torch.tensor(1e-2)}, {"foreach": False}, {"fused": True},
])  # fmt: skip
def test_adamw(settings):
    ours, theirs = model(), model()
    a, b = CPUAdam(ours.parameters(), **settings), torch.optim.AdamW(theirs.parameters(), **settings)
    train(ours, a, 10)
    train(theirs, b, 10)
    assert_models_close(ours, theirs)
    assert_states_close(a, b)


def test_the_two_kinds_of_decay_from_moments_that_are_not_zero():
    """Each equals torch's of its kind to 1e-6 in parameters and moments, and they differ from one another."""
    finals = []
    for decoupled, theirs in [(True, torch.optim.AdamW), (False, torch.optim.Adam)]:
        generator = torch.Generator().manual_seed(0)
        start = [torch.randn(500, generator=generator) for _ in range(3)]
        p, q = (torch.nn.Parameter(start[0].clone()) for _ in range(2))
        a = CPUAdam([p], lr=1e-2, weight_decay=0.1, decoupled=decoupled)
        b = theirs([q], lr=1e-2, weight_decay=0.1)
        for parameter, optimizer in ((p, a), (q, b)):
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0), "exp_avg": start[1].clone(), "exp_avg_sq": start[2].square(),
            }  # fmt: skip
        for _ in range(10):
            grad = torch.randn(500, generator=generator)
            for parameter, optimizer in ((p, a), (q, b)):
                parameter.grad = grad.clone()
                optimizer.step()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a.state[p][key], b.state[q][key], rtol=1e-6, atol=1e-7)
        finals.append((p.detach().clone(), a.state[p]["exp_avg"].clone(), a.state[p]["exp_avg_sq"].clone()))
    assert all((x - y).abs().max() > 1e-3 for x, y in zip(*finals, strict=True))


def test_master_of_bf16_parameters_is_the_fp32_run():
    """The remainder in the state makes bf16 parameters train exactly as fp32 ones given the same gradients."""
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(50, 7, generator=generator).to(torch.bfloat16))
    q = torch.nn.Parameter(p.detach().float())
    a, b = CPUAdam([p], lr=1e-3), CPUAdam([q], lr=1e-3)
    for _ in range(50):
        p.grad = torch.randn(50, 7, generator=generator).to(torch.bfloat16)
        q.grad = p.grad.float()
        a.step()
        b.step()
    assert torch.equal(cpu_adam.join(p, a.state[p]["param_lo"]), q)


def test_master_of_fp16_parameters_is_the_fp32_run():
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(50, 7, generator=generator).half())
    q = torch.nn.Parameter(p.detach().float())
    a, b = CPUAdam([p], lr=1e-3), CPUAdam([q], lr=1e-3)
    for _ in range(50):
        p.grad = torch.randn(50, 7, generator=generator).half()
        q.grad = p.grad.float()
        a.step()
        b.step()
    assert torch.equal(a.state[p]["param_fp32"], q)
    assert torch.equal(p, q.half())


def test_without_master_small_decay_vanishes_and_with_it_does_not():
    with_master, without = (torch.nn.Parameter(torch.ones(10, dtype=torch.bfloat16)) for _ in range(2))
    a, b = CPUAdam([with_master], lr=1e-4), CPUAdam([without], lr=1e-4, master=False)
    for parameter, optimizer in ((with_master, a), (without, b)):
        parameter.grad = torch.zeros(10, dtype=torch.bfloat16)
        for _ in range(10_000):
            optimizer.step()
    assert torch.all(without == 1)
    assert torch.all(with_master == 0.98828125)
    assert set(b.state[without]) == {"step", "exp_avg", "exp_avg_sq"}


# ---- layouts: by logical index, never by memory order ----


def test_channels_last():
    ours, theirs = model().to(memory_format=torch.channels_last), model()
    a, b = CPUAdam(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    train(ours, a, 5)
    train(theirs, b, 5)
    assert_models_close(ours, theirs)
    weight = ours[0].weight
    assert weight.stride() == a.state[weight]["exp_avg"].stride() != weight.contiguous().stride()


def test_a_parameter_whose_memory_order_changes_in_between():
    ours, theirs = model(), model()
    a, b = CPUAdam(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    train(ours, a, 3)
    ours.to(memory_format=torch.channels_last)
    train(ours, a, 3, first=3)
    train(theirs, b, 6)
    assert_models_close(ours, theirs)


@pytest.mark.parametrize("layout", [
    lambda g: g.t().contiguous().t(),
    lambda g: g[:, :1].expand(20, 5),
    lambda g: torch.stack([g, g], dim=2)[:, :, 0],
    lambda g: g,
], ids=["transposed", "expanded", "strided", "contiguous"])  # fmt: skip
@pytest.mark.parametrize("param_layout", [
    lambda p: p, lambda p: p.t().contiguous().t(), lambda p: torch.stack([p, p], dim=2)[:, :, 0],
], ids=["contiguous", "transposed", "strided"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradient_and_parameter_of_any_strides(layout, param_layout, dtype):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20, 5, generator=generator).to(dtype)
    p, q = torch.nn.Parameter(param_layout(values.clone())), torch.nn.Parameter(values.float())
    a, b = CPUAdam([p], lr=1e-2), torch.optim.AdamW([q], lr=1e-2)
    for _ in range(3):
        p.grad = layout(torch.randn(20, 5, generator=generator).to(dtype))
        q.grad = p.grad.float().contiguous()
        a.step()
        b.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2.0**-7, "atol": 2.0**-8}
    torch.testing.assert_close(p.float(), q, **tolerance)
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(a.state[p][key], b.state[q][key], rtol=1e-4, atol=1e-7)


def test_scalars_and_empty_parameters():
    scalar, empty = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.empty(0, 3))
    optimizer = CPUAdam([scalar, empty])
    (scalar.square() + empty.sum()).backward()
    optimizer.step()
    assert scalar.item() == pytest.approx(2.0 * (1 - 1e-5) - 1e-3)
    assert optimizer.state[empty]["step"] == 1


# ---- as an Optimizer ----


def test_it_is_an_optimizer_and_schedulers_take_it():
    for scheduler in [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, end_factor=0.0, total_iters=5),  # ends a rounding below 0
    ]:
        ours, theirs = model(), model()
        a, b = CPUAdam(ours.parameters()), torch.optim.AdamW(theirs.parameters())
        assert isinstance(a, torch.optim.Optimizer)
        for net, optimizer in ((ours, a), (theirs, b)):
            schedule = scheduler(optimizer)
            for step in range(6):
                train(net, optimizer, 1, first=step)
                schedule.step()
        assert_models_close(ours, theirs)


def test_a_rate_set_by_hand_counts_at_the_very_next_step():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([p], lr=1e-3)
    p.grad = torch.ones(3)
    optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p, before)


def test_frozen_parameters_are_untouched():
    ours, theirs = model(), model()
    for net in (ours, theirs):
        for parameter in list(net.parameters())[::2]:
            parameter.requires_grad_(False)
    a, b = CPUAdam(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    frozen = [parameter.detach().clone() for parameter in list(ours.parameters())[::2]]
    train(ours, a, 3)
    train(theirs, b, 3)
    assert_models_close(ours, theirs)
    assert all(torch.equal(x, y) for x, y in zip(frozen, list(ours.parameters())[::2], strict=True))
    assert len(a.state) == len(list(ours.parameters())) // 2


def test_groups_and_add_param_group():
    def groups(net):
        matrices = [p for p in net.parameters() if p.ndim >= 2]
        vectors = [p for p in net.parameters() if p.ndim < 2]
        return [{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0, "lr": 1e-2}]

    ours, theirs = model(), model()
    extra = [torch.nn.Parameter(torch.ones(5)) for _ in range(2)]
    a, b = CPUAdam(groups(ours)), torch.optim.AdamW(groups(theirs))
    for optimizer, parameter in zip((a, b), extra, strict=True):
        optimizer.add_param_group({"params": [parameter], "betas": (0.5, 0.5)})
        parameter.grad = torch.ones(5)
        optimizer.step()
    train(ours, a, 3)
    train(theirs, b, 3)
    assert_models_close(ours, theirs)
    torch.testing.assert_close(*extra)


def test_closure():
    p = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = CPUAdam([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses[0] == 9.0
    assert losses == sorted(losses, reverse=True)


def test_parameters_without_gradient_keep_their_counter():
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = CPUAdam([p, q])
    p.grad = torch.ones(3)
    optimizer.step()
    q.grad = torch.ones(3)
    optimizer.step()
    assert (optimizer.state[p]["step"], optimizer.state[q]["step"]) == (2, 1)


def test_a_graph_that_needs_the_old_values_notices():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([p])
    loss = p.square().sum()
    p.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_torch_run():
    seen = []
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = CPUAdam([p])
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    p.grad = torch.ones(3)
    optimizer.step()
    assert seen == ["before", "after"]


# ---- state dicts ----


def reloaded(state_dict):
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("first", [CPUAdam, torch.optim.AdamW])
@pytest.mark.parametrize("second", [CPUAdam, torch.optim.AdamW])
def test_a_run_switches_between_the_two(first, second):
    straight, switched = model(), model()
    train(straight, torch.optim.AdamW(straight.parameters(), lr=1e-2, weight_decay=0.1), 10)
    optimizer = first(switched.parameters(), lr=1e-2, weight_decay=0.1)
    train(switched, optimizer, 5)
    resumed = second(switched.parameters())  # settings come with the state dict
    resumed.load_state_dict(reloaded(optimizer.state_dict()))
    train(switched, resumed, 5, first=5)
    assert_models_close(straight, switched)


def test_keys_are_those_of_torch():
    ours, theirs = model(), model()
    a, b = CPUAdam(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    train(ours, a, 1)
    train(theirs, b, 1)
    mine, torchs = a.state_dict(), b.state_dict()
    assert mine["state"].keys() == torchs["state"].keys()
    assert all(mine["state"][i].keys() == torchs["state"][i].keys() for i in torchs["state"])
    assert mine["param_groups"][0].keys() >= torchs["param_groups"][0].keys()
    for index, state in torchs["state"].items():
        for key, value in state.items():
            assert (mine["state"][index][key].dtype, mine["state"][index][key].shape) == (value.dtype, value.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_resume_of_16_bit_parameters_is_exact(dtype):
    straight, resumed = model(dtype=dtype), model(dtype=dtype)
    a, b = CPUAdam(straight.parameters(), lr=1e-3), CPUAdam(resumed.parameters(), lr=1e-3)
    train(straight, a, 6)
    train(resumed, b, 3)
    c = CPUAdam(resumed.parameters())
    c.load_state_dict(reloaded(b.state_dict()))
    train(resumed, c, 3, first=3)
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == c.state[q].keys()
        for key in a.state[p]:
            assert a.state[p][key].dtype == c.state[q][key].dtype
            assert torch.equal(a.state[p][key], c.state[q][key])


def test_loading_copies():
    ours = model()
    a = CPUAdam(ours.parameters())
    train(ours, a, 2)
    b = CPUAdam(ours.parameters())
    b.load_state_dict(a.state_dict())
    p = next(ours.parameters())
    assert a.state[p]["exp_avg"].data_ptr() != b.state[p]["exp_avg"].data_ptr()
    train(ours, b, 1)
    assert a.state[p]["step"] == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_and_pickles(duplicate):
    ours = model()
    optimizer = CPUAdam(ours.parameters(), threads=1)
    train(ours, optimizer, 2)
    net, other = duplicate((ours, optimizer))
    train(ours, optimizer, 2, first=2)
    train(net, other, 2, first=2)
    assert_models_close(ours, net, rtol=0, atol=0)


# ---- GradScaler ----


def test_grad_scaler_unscales_and_skips():
    ours, theirs = model(), model()
    a, b = CPUAdam(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        for net, optimizer, scaler in zip((ours, theirs), (a, b), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(net(batch(step)).square().mean()).backward()
            if step == 3:
                next(net.parameters()).grad.view(-1)[0] = float("inf")
            if step == 4:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_models_close(ours, theirs)
    assert_states_close(a, b)


HALVES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("first", HALVES)
@pytest.mark.parametrize("second", HALVES)
@pytest.mark.parametrize("loaded", [False, True])
def test_a_parameter_may_change_its_dtype(first, second, loaded):
    """From then on it is as one of that dtype with these moments and no master yet."""
    start = torch.randn(50, generator=torch.Generator().manual_seed(1))
    p = torch.nn.Parameter(start.to(first))
    p.grad = torch.full_like(p, 0.5)
    optimizer = CPUAdam([p], lr=1e-2)
    optimizer.step()
    moments = [optimizer.state[p][key].clone() for key in ("exp_avg", "exp_avg_sq")]
    lo = optimizer.state[p].get("param_lo") if first is second else None
    master = optimizer.state[p].get("param_fp32") if first is second else None
    if lo is not None:
        master = cpu_adam.join(p.detach(), lo)
    expected = (p.detach().to(second).float() if master is None else master).clone()
    if loaded:
        state = optimizer.state_dict()
        p = torch.nn.Parameter(p.detach().to(second))
        optimizer = CPUAdam([p])
        optimizer.load_state_dict(state)
    else:
        p.grad = None
        p.data = p.data.to(second)
    p.grad = torch.full_like(p, -0.25)
    optimizer.step()
    cpu_adam.step(expected, torch.full((50,), -0.25), *moments, step=2, lr=1e-2, weight_decay=1e-2)
    if second is torch.bfloat16:
        assert torch.equal(cpu_adam.join(p.detach(), optimizer.state[p]["param_lo"]), expected)
    else:
        assert torch.equal(p.detach(), expected.to(second))
    keys = {torch.float32: set(), torch.bfloat16: {"param_lo"}, torch.float16: {"param_fp32"}}[second]
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"} | keys


# ---- refusals ----


@pytest.mark.parametrize("setting", ["amsgrad", "capturable", "differentiable"])
def test_what_is_not_implemented_is_refused(setting):
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=f"{setting}=True"):
        CPUAdam([p], **{setting: True})
    theirs = torch.optim.AdamW([p], amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True"):
        CPUAdam([p]).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("settings", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}])
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CPUAdam([torch.nn.Parameter(torch.ones(3))], **settings)


def check_refused(parameter, match):
    good = torch.nn.Parameter(torch.ones(3))
    good.grad = torch.ones(3)
    optimizer = CPUAdam([good, parameter])
    with pytest.raises(TypeError, match=match):
        optimizer.step()
    assert torch.all(good == 1), "another parameter was touched before the refusal"
    assert not optimizer.state[good]


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    check_refused(embedding.weight, "parameter 1 of group 0 is sparse")


def test_complex_double_and_foreign_devices_are_refused():
    for values, match in [
        (torch.ones(3, dtype=torch.complex64), "parameter 1 of group 0 is complex"),
        (torch.ones(3, dtype=torch.float64), "parameter 1 of group 0 has dtype torch.float64"),
        (torch.ones(3, device="meta"), "parameter 1 of group 0 is on device meta"),
    ]:
        parameter = torch.nn.Parameter(values)
        parameter.grad = torch.ones_like(values)
        check_refused(parameter, match)


def test_a_group_that_makes_no_sense_stops_the_step_before_anything_is_touched():
    first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    first.grad = second.grad = torch.ones(3)
    optimizer = CPUAdam([{"params": [first]}, {"params": [second]}])
    for key, value, error in [("lr", float("nan"), ValueError), ("eps", -1.0, ValueError), ("lr", None, TypeError)]:
        before = optimizer.param_groups[1][key]
        optimizer.param_groups[1][key] = value
        with pytest.raises(error, match=key):
            optimizer.step()
        optimizer.param_groups[1][key] = before
        assert torch.all(first == 1)
        assert not optimizer.state[first]
    optimizer.step()
    assert torch.equal(first, second)


def test_state_of_another_shape_is_refused_and_nothing_is_loaded():
    p, q = (torch.nn.Parameter(torch.ones(numel)) for numel in (3, 1))
    for parameter in (p, q):
        parameter.grad = torch.ones_like(parameter)
    ours, theirs = CPUAdam([p], lr=0.5), torch.optim.AdamW([q], lr=0.25)
    ours.step()
    theirs.step()
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has shape \(1,\), the parameter \(3,\)"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5
    assert torch.equal(ours.state[p]["exp_avg"], before["state"][0]["exp_avg"])


def test_tensors_that_stand_for_others_are_refused():
    released = torch.nn.Parameter(torch.ones(3))
    released.grad = torch.ones(3)
    released.untyped_storage().resize_(0)
    check_refused(released, "parameter 1 of group 0 is a Parameter without memory")
