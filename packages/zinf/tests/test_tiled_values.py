"""Values of parameters in tiles: initial, in checkpoints and exports, and as user code writes them."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from zinf_testing import SETTINGS, assert_same, config, full_states, make, state_of, train
from zinf_tiles import Largest, in_tiles, mixtral, of_transformers, tile_all, tiled_model

import zero3
import zinf
from zero3 import tiled_draws
from zinf.safetensors_export import export_checkpoint
from zinf.step_report import memory_bandwidth

# -- construction ---------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """Initialisers of all sorts, on sizes that are no multiple of 16."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(13, 37)
        self.words = nn.Embedding(41, 7, padding_idx=3)
        self.conv = nn.Conv2d(3, 11, 3)
        self.layers = nn.ModuleDict({name: nn.Linear(13, 37, bias=False) for name in INITIALISERS})
        for name, layer in self.layers.items():
            INITIALISERS[name](layer.weight)
        self.tied = nn.Linear(7, 41, bias=False)
        self.tied.weight = self.words.weight
        self.buffer = nn.Buffer(torch.empty(64, 64))
        self.buffer[::2] = 1.0
        self.buffer[1::2] = 2.0


INITIALISERS = {
    "normal": lambda w: nn.init.normal_(w, std=0.02),
    "uniform": lambda w: nn.init.uniform_(w, -2, 3),
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "orthogonal": nn.init.orthogonal_,
    "eye": nn.init.eye_,
    "constant": lambda w: nn.init.constant_(w, 0.3),
    "data": lambda w: w.data.normal_(1, 2),
    "scaled": lambda w: w.data.mul_(0.5).add_(1),
}


def plain_state(build, seed=3):
    torch.manual_seed(seed)
    model = build()
    return state_of(model), torch.rand(3)


@pytest.mark.parametrize(("tile_bytes", "piece"), [(256, 16), (512, 64), (512, 1 << 20)])
@pytest.mark.parametrize(
    "build", [Drawn, mixtral, lambda: of_transformers("GPT2LMHeadModel")(tiny_gpt2())], ids=["all", "mixtral", "gpt2"]
)
def test_initial_values_are_the_plain_ones(nvme, monkeypatch, build, tile_bytes, piece):
    monkeypatch.setattr(tiled_draws, "_PIECE", piece)
    wanted, next_draw = plain_state(build)
    torch.manual_seed(3)
    with zinf.init(config(nvme, tile_bytes=tile_bytes)):
        model = build()
    assert torch.equal(torch.rand(3), next_draw)
    assert in_tiles(model)
    assert_same(state_of(model), wanted)


def tiny_gpt2():
    return of_transformers("GPT2Config")(vocab_size=61, n_positions=8, n_embd=12, n_layer=2, n_head=2)


def init_on_ranks(rank, world, nvme):
    torch.manual_seed(3 + rank)  # rank 0's numbers count
    with zinf.init(config(nvme, tile_bytes=256)):
        model = Drawn()
    return {name: value.numpy() for name, value in state_of(model).items()}


def test_initial_values_on_two_ranks(ranks, nvme):
    wanted, _ = plain_state(Drawn)
    for found in ranks(init_on_ranks, 2, str(nvme)):
        assert_same({name: torch.from_numpy(value) for name, value in found.items()}, wanted)


def test_the_whole_weight_never_exists(nvme, tmp_path):
    """Construction, a step, a checkpoint, a load and an export of a layer of 16 tiles."""
    whole = 512 * 256 * 4
    memory_bandwidth()  # measured once, on buffers of its own
    cfg = config(nvme, tile_bytes=whole // 16, unit_size="4KiB", device_memory=whole // 2)
    with Largest() as seen:
        with zinf.init(cfg):
            model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
        optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
        for _ in range(2):
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        zinf.save(tmp_path / "saved", model, optimizer)
        zinf.load(tmp_path / "saved", model, optimizer)
        zinf.export(model, tmp_path / "weights")
    assert len(model[0].weight._zero3_tiles.params) == 16
    assert 0 < seen.nbytes <= whole // 4
    assert zinf.report(model)["peak"]["device"] <= whole // 2


# -- states come and go ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 4), (4, 2), (2, 16)])
def test_a_checkpoint_fits_any_number_of_tiles(nvme, tmp_path, before, after):
    saved, optimizer = tiled_model(nvme, before)
    train(saved, optimizer, 2)
    zinf.save(tmp_path, saved, optimizer)
    model, other = tiled_model(nvme, after, seed=9)
    zinf.load(tmp_path, model, other)
    assert_same(full_states(model), full_states(saved))
    goes_on = train(saved, optimizer, [2, 3])
    torch.testing.assert_close(train(model, other, [2, 3]), goes_on, rtol=1e-6, atol=1e-6)


def reshard_over_ranks(rank, world, nvme, folder):
    model, optimizer = tiled_model(nvme, 5, seed=7)
    zinf.load(folder, model, optimizer)
    return {name: state["exp_avg"].numpy() for name, state in full_states(model).items()}


def test_a_checkpoint_fits_another_number_of_ranks(ranks, nvme, tmp_path):
    saved, optimizer = tiled_model(nvme, 3)
    train(saved, optimizer, 2)
    zinf.save(tmp_path, saved, optimizer)
    wanted = {name: state["exp_avg"] for name, state in full_states(saved).items()}
    for found in ranks(reshard_over_ranks, 2, str(nvme), str(tmp_path)):
        assert_same({name: torch.from_numpy(value) for name, value in found.items()}, wanted)


def test_an_export_is_the_plain_models(nvme, tmp_path):
    model, optimizer = tiled_model(nvme, 3)
    train(model, optimizer, 1)
    zinf.export(model, tmp_path / "weights")
    exported = load_file(tmp_path / "weights" / "model.safetensors")
    state = state_of(model)
    assert_same(dict(sorted(exported.items())), {n: state[n] for n in sorted(exported)})
    other = make(seed=8)
    other.load_state_dict(exported, strict=False)
    for again in (zinf.shard(tile_all(make(4), 4), config(nvme)), zinf.shard(make(4), config(nvme))):
        zinf.load_pretrained(again, tmp_path / "weights")
        assert_same(state_of(again), state_of(other))
    zinf.save(tmp_path / "saved", model, optimizer)
    export_checkpoint(tmp_path / "saved", tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert_same(dict(sorted(again.items())), dict(sorted(exported.items())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_state_dict_and_full_state(nvme, dtype):
    model = zinf.shard(tile_all(make(), 4), config(nvme, dtype=dtype))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 1)
    other = make(5)
    model.load_state_dict(other.state_dict())
    assert_same(state_of(model), state_of(other))
    zero3.load_state_dict(model, make(6).state_dict())
    assert_same(state_of(model), state_of(make(6)))
    weight = model.blocks[0].up.weight
    values = torch.randn(weight.shape)
    zinf.set_full_state(weight, exp_avg=values, param=values * 2, step=7)
    state = zinf.full_state(weight)
    assert torch.equal(state["exp_avg"], values)
    assert torch.equal(state["param"], values * 2)
    assert state["step"] == 7
    with pytest.raises(ValueError, match="expected"):
        zinf.set_full_state(weight, exp_avg=values[1:])


def test_sharding_again_keeps_the_values(nvme):
    model = zinf.shard(tile_all(make(), 3), config(nvme))
    wanted = state_of(model)
    zinf.shard(model, config(nvme, "cpu", "cpu", "cpu"))
    assert_same(state_of(model), wanted)
    assert len(model.embedding.weight._zero3_tiles.params) == 3


def test_by_hand_inside_init(nvme):
    wanted, _ = plain_state(make)
    with zinf.init(config(nvme)):
        torch.manual_seed(1)
        model = tile_all(make(), 3)
    assert len(in_tiles(model)) == 7
    assert_same(state_of(model), state_of(make()))
    assert list(wanted) == list(state_of(model))


# -- what else user code does with a weight -------------------------------------------------------------------


def test_functions_without_a_tiled_form_get_all_rows(nvme, caplog):
    layer = nn.Linear(6, 9)
    values = layer.weight.detach().clone()
    model = zinf.shard(zinf.tiled(layer, 4), config(nvme))
    x = torch.randn(3, 6)
    with caplog.at_level(logging.WARNING, logger="zero3.tiles"):
        out = x @ model.weight.t()
    assert "in tiles" in caplog.text
    assert torch.equal(out, x @ values.t())
    out.sum().backward()
    torch.testing.assert_close(zinf.full_grad(model.weight), x.sum(0).expand(9, 6))
    assert model.weight.detach().norm() == values.norm()
    assert torch.equal(model.weight[2:7].detach(), values[2:7])
    assert torch.equal(model.weight[torch.tensor([[8, -1], [0, 3]])].detach(), values[torch.tensor([[8, 8], [0, 3]])])
    mask = torch.arange(9) % 2 == 0
    assert torch.equal(model.weight[mask].detach(), values[mask])
    assert torch.equal(copy.deepcopy(model).weight, values)


def test_writing_through_every_door(nvme):
    layer = nn.Linear(6, 9)
    values = layer.weight.detach().clone()
    model = zinf.shard(zinf.tiled(layer, 4), config(nvme))
    weight = model.weight
    with torch.no_grad():
        weight.mul_(2).add_(torch.arange(9.0).view(9, 1))
        weight[4].fill_(7)
        weight.view(-1)[:3] = -1
    weight.data.clamp_(max=8)
    weight.data.numpy()[8, 5] = 3
    wanted = values * 2 + torch.arange(9.0).view(9, 1)
    wanted[4] = 7
    wanted.view(-1)[:3] = -1
    wanted.clamp_(max=8)
    wanted[8, 5] = 3
    assert torch.equal(model.state_dict()["weight"], wanted)
    with zero3.gathered(model, modify=True), torch.no_grad():
        assert torch.equal(weight, wanted)
        weight.neg_()
    assert torch.equal(zinf.full_state(weight)["param"], -wanted)
    with pytest.raises(zero3.UnsupportedError, match="changed inside"), zero3.gathered(model), torch.no_grad():
        weight.zero_()
    assert torch.equal(zinf.full_state(weight)["param"], -wanted)
    with pytest.raises(RuntimeError, match="leaf"):
        weight.zero_()


def test_an_autograd_function_that_knows_no_tiles_is_refused(nvme):
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            return None, grad.t() @ ctx.saved_tensors[0]

    model = zinf.shard(zinf.tiled(nn.Linear(6, 9), 4), config(nvme))
    out = Times.apply(torch.randn(3, 6), model.weight)
    with pytest.raises(zero3.UnsupportedError, match="in tiles"):
        out.sum().backward()
