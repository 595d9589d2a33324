"""Models of JaxModules, partitioned and offloaded: trained as in jax alone, and the same bits on every tier."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from zinf_testing import SETTINGS, assert_close, assert_same, config, full_states, state_of

import zero3
import zinf

jax = pytest.importorskip("jax", reason="jax is not installed")
jnp = jax.numpy

from zinf_jax_models import (  # noqa: E402
    BOTH_WAYS,
    WIDTH,
    Language,
    block,
    data,
    initial_params,
    jax_loss,
    layer,
    layer_params,
    named,
    normalised,
    offloaded,
    train,
)


@functools.cache
def trained_in_jax():
    """(losses of six steps, parameters after four and after six) of jax and optax alone."""
    optax = pytest.importorskip("optax", reason="optax is not installed")
    settings = {"b1": SETTINGS["betas"][0], "b2": SETTINGS["betas"][1]}
    adamw = optax.adamw(SETTINGS["lr"], eps=SETTINGS["eps"], weight_decay=SETTINGS["weight_decay"], **settings)

    @jax.jit
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(jax_loss)(params, tokens)
        updates, state = adamw.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    history, losses = [initial_params()], []
    state = adamw.init(history[0])
    for number in range(6):
        loss, params, state = step(history[-1], state, jnp.asarray(data(number).int().numpy()))
        history.append(params)
        losses.append(float(loss))
    return losses, history[4], history[6]


@BOTH_WAYS
@pytest.mark.parametrize("unit_size", ["auto", "1KiB"])
def test_trains_on_the_drive_as_jax_and_optax_do(nvme, recompute, unit_size):
    losses, _, params = trained_in_jax()
    model, optimizer = offloaded(config(nvme, unit_size=unit_size), recompute=recompute)
    np.testing.assert_allclose(train(model, optimizer, range(6)), losses, rtol=2e-6)
    assert_close(state_of(model), named(params), relative=2e-5)


def test_gradients_on_the_drive_are_jaxs_own(nvme):
    model, _ = offloaded(config(nvme))
    loss = model.loss(data(0))
    loss.backward()
    wanted_loss, grads = jax.value_and_grad(jax_loss)(initial_params(), jnp.asarray(data(0).int().numpy()))
    np.testing.assert_allclose(loss.item(), float(wanted_loss), rtol=1e-6)
    found = {name: zinf.full_grad(param) for name, param in model.named_parameters()}
    assert_close(found, named(grads), relative=2e-6)


def outcome(rank, world, cfg, recompute=True):
    """Losses of four steps, all states after them, and, where gradients are kept, those of a fifth."""
    model, optimizer = offloaded(cfg, recompute=recompute)
    losses = train(model, optimizer, range(4), rank, world)
    states, grads = full_states(model), None
    if cfg.overlap_optimizer != "backward":
        model.loss(data(4).chunk(world)[rank]).backward()
        grads = {name: zinf.full_grad(param) for name, param in model.named_parameters()}
    return losses, states, grads


def assert_same_outcome(found, wanted):
    assert found[0] == wanted[0]
    assert_same(found[1], wanted[1])
    if found[2] is not None:
        assert_same(found[2], wanted[2])


IN_MEMORY = {"params": "device", "grads": "device", "optimizer": "device"}


@pytest.mark.parametrize(
    ("world", "dtype", "recompute"),
    [
        (1, torch.float32, True),
        (1, torch.float32, False),
        (1, torch.bfloat16, True),
        (2, torch.bfloat16, False),
    ],
    ids=["1-float32-again", "1-float32-kept", "1-bfloat16-again", "2-bfloat16-kept"],
)
def test_every_tier_gives_the_same_bits(ranks, nvme, world, dtype, recompute):
    def run(**changes):
        return ranks(outcome, world, config(nvme, dtype=dtype, **changes), recompute, timeout=120)

    wanted = run(**IN_MEMORY)
    for changes in (
        {},
        {"grads": "nvme", "overlap_optimizer": False, "unit_size": "auto"},
        {"overlap_optimizer": "backward", "prefetch": False},
    ):
        for found, one in zip(run(**changes), wanted, strict=True):
            assert_same_outcome(found, one)


def test_the_ranks_together_train_as_one(ranks, nvme):
    wanted, params, _ = trained_in_jax()
    results = ranks(outcome, 2, config(nvme), timeout=120)
    np.testing.assert_allclose(np.mean([losses for losses, _, _ in results], axis=0), wanted[:4], rtol=5e-6)
    found = {name: state["param"] for name, state in results[0][1].items()}
    assert_close(found, named(params), relative=5e-5)


@BOTH_WAYS
def test_nothing_stays_gathered_between_forward_and_backward(nvme, recompute):
    """Every unit is released, and no array of jax lies on the memory that units are gathered into."""
    model, optimizer = offloaded(config(nvme, unit_size="auto", prefetch=False), recompute=recompute)
    pool = zero3.partition_model.model_of(model).pool

    def assert_released():
        assert {str(unit.state) for unit in zero3.units(model)} == {"SHARDED"}
        buffers = [(buffer.storage.data_ptr(), buffer.nbytes) for buffer in (*pool._free, *pool._retired)]
        assert buffers
        addresses = [array.unsafe_buffer_pointer() for array in jax.live_arrays() if array.nbytes]
        assert not [a for a in addresses for start, nbytes in buffers if start <= a < start + nbytes]

    for step in range(3):
        loss = model.loss(data(step))
        if step:  # where it has just compiled, frames of the tracing wait for the garbage collector
            assert_released()
        loss.backward()
        if step:
            assert_released()
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_kept_holds_no_parameter():
    model = Language(recompute=False)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append((t.data_ptr(), t.shape)) or t, lambda t: t):
        model.blocks[0](torch.randn(4, 6, WIDTH))
    own = {param.data_ptr() for param in model.parameters()}
    weights = {param.shape for param in model.blocks[0].parameters()}
    assert any(pointer in own for pointer, _ in shapes)
    assert not [shape for pointer, shape in shapes if shape in weights and pointer not in own]


@pytest.mark.parametrize("activations", ["cpu", "nvme"])
@BOTH_WAYS
def test_blocks_are_checkpointed_and_their_inputs_offloaded(nvme, activations, recompute):
    wanted = outcome(0, 1, config(nvme, **IN_MEMORY), recompute)
    assert_same_outcome(outcome(0, 1, config(nvme, activations=activations), recompute), wanted)


@BOTH_WAYS
def test_what_waits_for_backward_may_go_to_the_drive(nvme, recompute):
    cfg = config(nvme, activations="nvme")
    grads = []
    for offload in (False, True):
        model = zinf.shard(nn.Sequential(zinf.jax.JaxModule(lambda p, x: jnp.sin(x @ p) @ p.T, jnp.ones((64, 64)) / 9,
                                                            recompute=recompute)), cfg)  # fmt: skip
        x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        if offload:
            with zinf.offload_saved(model):
                loss = model(x).square().mean()
        else:
            loss = model(x).square().mean()
        loss.backward()
        grads.append([x.grad, zinf.full_grad(model[0].params)])
        if offload:
            assert zinf.report(model)["bytes"]["by_kind"]["activations"]["written"] >= x.nbytes
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_of_jax_modules_goes_on_bit_for_bit(nvme, tmp_path):
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, range(3))
    zinf.save(tmp_path / "run", model, optimizer, extra={"step": 3})
    wanted = train(model, optimizer, range(3, 6)), full_states(model)
    model, optimizer = offloaded(config(nvme, **IN_MEMORY), seed=2)
    assert zinf.load(tmp_path / "run", model, optimizer) == {"step": 3}
    assert train(model, optimizer, range(3, 6)) == wanted[0]
    assert_same(full_states(model), wanted[1])


def test_export_and_back_to_jax(nvme, tmp_path):
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, range(2))
    zinf.export(model, tmp_path)
    other = zinf.shard(Language(seed=3), config(nvme))
    zinf.load_pretrained(other, tmp_path)
    trees = [[part.to_pytree() for part in (m.embed, *m.blocks, m.head)] for m in (model, other)]
    jax.tree.map(np.testing.assert_array_equal, *trees)
    assert_same(named(trees[0]), state_of(model))


def test_built_on_the_drive(nvme):
    with zinf.init(config(nvme)):
        model = Language()
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    assert not [unit for unit in zero3.units(model) if str(unit.state) != "SHARDED"]
    other, other_optimizer = offloaded(config(nvme))
    assert train(model, optimizer, range(3)) == train(other, other_optimizer, range(3))
    assert_same(state_of(model), state_of(other))


def test_a_shared_parameter_on_the_drive(nvme):
    """The head's weight is the embedding's: used from outside the module that owns it."""

    def build():
        table = zinf.jax.JaxModule(lambda p, ids: p["table"][ids], {"table": initial_params()[0]["tokens"]})
        last = zinf.jax.JaxModule(lambda p, x: normalised(x) @ p["table"].T, {"table": table.params.table})
        middle = [zinf.jax.JaxModule(block, params) for params in initial_params()[1:-1]]
        return nn.Sequential(table, *middle, last)

    def step(model):
        F.cross_entropy(model(data(0)[:, :-1]).flatten(0, 1), data(0)[:, 1:].flatten()).backward()

    plain, ours = build(), zinf.shard(build(), config(nvme))
    step(plain)
    step(ours)
    for (name, param), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(zinf.full_grad(mine), param.grad), name


def test_beside_layers_of_torch_and_updates_of_torch(nvme):
    """In one model with torch's own layers, and with an optimizer of torch's."""

    def build():
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Linear(6, 6), zinf.jax.JaxModule(lambda p, x: layer(p, x)["out"], layer_params()), nn.Linear(3, 1)
        )

    plain, ours = build(), zinf.shard(build(), config(nvme, optimizer="cpu"))
    for model in (plain, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            model(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(state_of(ours), state_of(plain))
