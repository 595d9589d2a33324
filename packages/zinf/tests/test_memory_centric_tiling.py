"""Operators in tiles against the same operators whole (cases C36 and C45)."""

from __future__ import annotations

import copy
import itertools
import logging
import os

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from zinf_testing import SETTINGS, assert_close, assert_same, config, full_states, make, plain, state_of, train

import zero3
import zinf
from zero3 import tiled_draws
from zero3.tiles import tiles_of
from zinf.models.gpt import GPT, GPTConfig
from zinf.safetensors_stream import export_checkpoint
from zinf.step_report import memory_bandwidth

COUNTS = [1, 2, 3, 4, 16]


def of_transformers(name: str):
    """A class of transformers; without that package the test is skipped."""
    package = pytest.importorskip("transformers", reason="its models are what is put in tiles")
    return getattr(package.pytorch_utils if name == "Conv1D" else package, name)


def tile_all(model: nn.Module, count: int) -> nn.Module:
    """Every operator whose weight has so many rows."""
    for module in model.modules():
        own = [param for param in module.parameters(recurse=False) if param.ndim >= 2]
        if own and min(len(param) for param in own) >= count:
            zinf.tiled(module, count)
    return model


def in_tiles(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if tiles_of(param) is not None]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    sharded = hasattr(model, "_zero3_model")
    return {n: zinf.full_grad(p) if sharded else p.grad for n, p in model.named_parameters()}


# -- one operator ---------------------------------------------------------------------------------------------

OPERATORS = {
    "linear": lambda: (nn.Linear(29, 23), torch.randn(4, 29)),
    "linear without bias": lambda: (nn.Linear(29, 23, bias=False), torch.randn(4, 3, 29)),
    "linear, transposed input": lambda: (nn.Linear(29, 23), torch.randn(29, 7).t()),
    "linear, one dimension": lambda: (nn.Linear(29, 23), torch.randn(29)),
    "embedding": lambda: (nn.Embedding(23, 5), torch.randint(0, 23, (4, 6))),
    "embedding with padding": lambda: (nn.Embedding(23, 5, padding_idx=-2), torch.arange(23)),
    "embedding by frequency": lambda: (nn.Embedding(23, 5, scale_grad_by_freq=True), torch.randint(0, 9, (40,))),
    "embedding, few used": lambda: (nn.Embedding(23, 5), torch.tensor([[20, 20]])),
    "conv1d": lambda: (nn.Conv1d(3, 19, 3, padding="same"), torch.randn(2, 3, 8)),
    "conv2d": lambda: (nn.Conv2d(3, 17, (2, 3), stride=2, bias=False), torch.randn(2, 3, 8, 9)),
    "conv3d, no batch": lambda: (nn.Conv3d(2, 16, 2, dilation=2), torch.randn(2, 5, 5, 6)),
    "grouped conv": lambda: (nn.Conv1d(4, 16, 3, groups=2), torch.randn(2, 4, 8)),
    "Conv1D": lambda: (of_transformers("Conv1D")(24, 18), torch.randn(3, 5, 18)),
    "output head": lambda: (nn.Linear(8, 101, bias=False), torch.randn(6, 8)),
}


def both(name: str, count: int, cfg: zinf.Config):
    """(plain module, the same one in tiles, input)"""
    torch.manual_seed(5)
    module, x = OPERATORS[name]()
    twin = copy.deepcopy(module)
    assert zinf.tiled(twin, count) is twin
    return module, zinf.shard(twin, cfg), x


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_in_tiles_equals_the_whole_one(nvme, name, count):
    module, twin, x = both(name, count, config(nvme))
    outputs, inputs = [], []
    for one in (module, twin):
        inputs.append(x.detach().clone().requires_grad_(x.is_floating_point()))
        outputs.append(one(inputs[-1]))
        (outputs[-1] * torch.arange(outputs[-1].numel()).view(outputs[-1].shape)).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
    assert_close(gradients(twin), gradients(module), 1e-6)
    if x.is_floating_point():
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-5, atol=1e-4)
    assert (in_tiles(twin) == ["weight"]) == (count > 1)


def linears_on_ranks(rank, world, nvme):
    for inner, outer, count, bias in itertools.product((23, 29), (29, 23), range(1, 6), (True, False)):
        if inner != outer:
            linear_on_ranks(rank, world, nvme, inner, outer, count, bias)


def linear_on_ranks(rank, world, nvme, inner, outer, count, bias):
    module = nn.Linear(inner, outer, bias=bias)
    twin = zinf.shard(zinf.tiled(copy.deepcopy(module), count), config(nvme))
    x = torch.randn(2 * world, 3, inner)
    out = twin(x.chunk(world)[rank])
    out.square().sum().backward()
    module(x).square().sum().div(world).backward()  # the gradient is the mean over the ranks
    torch.testing.assert_close(out, module(x.chunk(world)[rank]), rtol=1e-6, atol=1e-6)
    assert_close(gradients(twin), gradients(module), 1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_sizes_that_do_not_divide(ranks, nvme, world):
    """Case C45: 23 to 29 and 29 to 23, 1 to 5 tiles, with and without bias."""
    ranks(linears_on_ranks, world, str(nvme))


@pytest.mark.parametrize("count", [0, -1, 24, 1.5, True, "3", None])
def test_nonsense_counts(count):
    with pytest.raises(ValueError, match="1 to 23"):
        zinf.tiled(nn.Linear(29, 23), count)


@pytest.mark.parametrize("module", [nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)), nn.LSTM(3, 4)])
def test_modules_without_anything_to_cut(module):
    with pytest.raises(ValueError, match="no parameter that can be cut"):
        zinf.tiled(module, 2)


def test_too_late_and_no_module(nvme):
    model = zinf.shard(nn.Linear(4, 4), config(nvme))
    with pytest.raises(ValueError, match=r"before zinf\.shard"):
        zinf.tiled(model, 2)
    with pytest.raises(TypeError, match="Module"):
        zinf.tiled(torch.zeros(4, 4), 2)


def test_an_index_out_of_range(nvme):
    model = zinf.shard(zinf.tiled(nn.Embedding(8, 4), 3), config(nvme))
    with pytest.raises(IndexError):
        model(torch.tensor([8]))


# -- training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "overlap"), [(1, False), (2, "backward"), (3, "next-forward"), (4, False), (16, "next-forward")]
)
def test_training_with_a_tied_head(nvme, count, overlap):
    """Losses and weights of plain torch, and its names, shapes and parameter groups."""
    reference, its_optimizer = plain()
    model = zinf.shard(tile_all(make(), count), config(nvme, overlap_optimizer=overlap))
    assert [(n, p.shape, p.ndim) for n, p in model.named_parameters()] == [
        (n, p.shape, p.ndim) for n, p in reference.named_parameters()
    ]
    groups = [[p for p in model.parameters() if p.ndim >= 2], [p for p in model.parameters() if p.ndim < 2]]
    optimizer = zinf.AdamW([{"params": group} for group in groups], **SETTINGS)
    torch.testing.assert_close(train(model, optimizer, 4), train(reference, its_optimizer, 4), rtol=1e-6, atol=1e-6)
    assert_close(state_of(model), state_of(reference), 1e-4)
    assert {state["step"] for state in optimizer.state.values()} == {4}
    assert list(model.state_dict()) == list(reference.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", ["device", "cpu", "nvme"])
def test_tiers_change_no_number(nvme, params, dtype):
    found = []
    for tier, overlap in (("device", False), (params, "next-forward"), (params, "backward")):
        cfg = config(nvme, tier, "cpu", tier, dtype=dtype, overlap_optimizer=overlap)
        model = zinf.shard(tile_all(make(), 3), cfg)
        optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
        found.append((train(model, optimizer, 3), full_states(model)))
    for losses, states in found[1:]:
        assert losses == found[0][0]
        assert_same(states, found[0][1])


def train_on_ranks(rank, world, nvme, activations):
    for count in (2, 3, 16):
        train_in_tiles(rank, world, nvme, count, activations)


def train_in_tiles(rank, world, nvme, count, activations):
    reference, its_optimizer = plain()
    cfg = config(nvme, activations=activations)
    model = zinf.shard(tile_all(make(), count), cfg)
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    losses = torch.tensor([train(model, optimizer, 3, rank, world)])
    if world > 1:
        torch.distributed.all_reduce(losses)
    wanted = torch.tensor(train(reference, its_optimizer, 3))
    torch.testing.assert_close(losses[0] / world, wanted, rtol=1e-5, atol=1e-5)
    assert_close(state_of(model), state_of(reference), 1e-3)


@pytest.mark.parametrize(("world", "activations"), [(1, "device"), (1, "nvme"), (2, None), (2, "nvme")])
def test_ranks_and_checkpointed_activations(ranks, nvme, world, activations):
    ranks(train_on_ranks, world, str(nvme), activations)


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero-offload", "zero3"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_of_torch(nvme, preset, kind):
    settings = {"lr": 1e-2}
    reference = make()
    model = zinf.shard(tile_all(make(), 3), zinf.Config.preset(preset, dtype=torch.float32, nvme=[nvme]))
    found, wanted = (train(one, kind(one.parameters(), **settings), 3) for one in (model, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert_close(state_of(model), state_of(reference), 1e-4)


class Lora(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize("count", COUNTS)
def test_lora_on_layers_in_tiles(nvme, count):
    models = []
    for tiles in (1, count):
        model = make(width=16)
        for block in model.blocks:
            block.up = Lora(zinf.tiled(block.up, tiles))
            block.down = Lora(zinf.tiled(block.down, tiles))
        for name, param in model.named_parameters():
            param.requires_grad = "Lora" in name or param.ndim == 1 or name.endswith((".down", ".up"))
        models.append(zinf.shard(model, config(nvme)))
    losses = []
    for model in models:
        optimizer = zinf.AdamW([p for p in model.parameters() if p.requires_grad], **SETTINGS)
        losses.append(train(model, optimizer, 3))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    frozen = {n: v for n, v in state_of(models[1]).items() if n.endswith("base.weight")}
    assert_same(frozen, {n: v for n, v in state_of(models[0]).items() if n in frozen})
    assert zinf.full_grad(models[1].blocks[0].up.base.weight) is None


def test_thawing(nvme):
    model = zinf.shard(zinf.tiled(nn.Linear(6, 9), 2), config(nvme))
    model.requires_grad_(False)
    assert not model(torch.ones(2, 6)).requires_grad
    model.weight.requires_grad = True
    model(torch.ones(2, 6)).sum().backward()
    torch.testing.assert_close(zinf.full_grad(model.weight), torch.full((9, 6), 2.0))


def test_clipping_and_accumulation(nvme):
    reference, its_optimizer = plain()
    model = zinf.shard(tile_all(make(), 3), config(nvme))
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    norms = []
    for step in range(3):
        for one in (model, reference):
            for half in one.data(step).chunk(2):
                one.loss(half).backward()
        norms.append((zinf.clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)))
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    for found, wanted in norms:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert_close(state_of(model), state_of(reference), 1e-4)


def test_torchs_own_clipping_reaches_the_tiles(nvme):
    model = zinf.shard(tile_all(make(), 3), zinf.Config.preset("zero3", dtype=torch.float32))
    reference = make()
    for one in (model, reference):
        one.loss(one.data(0)).backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
    assert_close(gradients(model), gradients(reference), 1e-5)


# -- experts --------------------------------------------------------------------------------------------------


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(2)
    return of_transformers("MixtralForCausalLM")(
        of_transformers("MixtralConfig")(
            **sizes, vocab_size=31, num_hidden_layers=2, num_local_experts=6, num_experts_per_tok=1,
            experts_implementation="eager",
        )
    )  # fmt: skip


def test_experts_are_gathered_by_what_is_used(nvme):
    """Three-dimensional weights; experts that nobody chose have zero gradients, as in the whole parameter."""
    reference = mixtral()
    model = mixtral()
    for layer in model.model.layers:
        zinf.tiled(layer.mlp.experts, 3)
    zinf.shard(model, config(nvme))
    assert len(in_tiles(model)) == 4
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    its_optimizer = torch.optim.AdamW(reference.parameters(), **SETTINGS)
    for step in range(3):
        tokens = torch.randint(0, 31, (1, 4), generator=torch.Generator().manual_seed(step))
        losses = [one(input_ids=tokens, labels=tokens).loss for one in (model, reference)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
        for loss in losses:
            loss.backward()
        assert_close(gradients(model), gradients(reference), 1e-4, 1e-7)
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    assert_close(state_of(model), state_of(reference), 1e-3)


def experts_on_ranks(rank, world, nvme):
    model = mixtral()
    zinf.tiled(model.model.layers[0].mlp.experts, 3)
    with pytest.raises(zinf.ConfigError, match="experts"):
        zinf.shard(model, config(nvme))


def test_experts_on_several_ranks_are_refused(ranks, nvme):
    ranks(experts_on_ranks, 2, str(nvme))


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


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of any floating-point result: buffers of the I/O are bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, torch.Tensor) and one.is_floating_point() and not one.is_meta:
                self.nbytes = max(self.nbytes, min(one.nbytes, one.untyped_storage().nbytes()))
        return result


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


def tiled_model(nvme, count, seed=1, **changes):
    model = zinf.shard(tile_all(make(seed), count), config(nvme, **changes))
    return model, zinf.AdamW(model.parameters(), **SETTINGS)


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


# -- when operators are cut by themselves ---------------------------------------------------------------------


class BigEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50_000, 100)
        self.head = nn.Linear(100, 4)

    def forward(self, tokens):
        return self.head(self.words(tokens)).mean(1)


def test_a_parameter_larger_than_the_budget_is_handled_in_pieces(nvme):
    """Case C36: 5 M elements, budgets that hold 1 M at a time."""
    torch.manual_seed(1)
    reference = BigEmbedding()
    torch.manual_seed(1)
    budgets = {"device_memory": "4MiB", "host_memory": "128MiB"}
    with zinf.init(config(nvme, grads="nvme", unit_size="auto", **budgets)):
        model = BigEmbedding()
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    its_optimizer = torch.optim.AdamW(reference.parameters(), **SETTINGS)
    tokens = torch.arange(0, 48_000, 4_000).view(3, 4)
    for _ in range(2):
        losses = [net(tokens).square().mean() for net in (model, reference)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
        for loss in losses:
            loss.backward()
        for one in (optimizer, its_optimizer):
            one.step()
            one.zero_grad()
    assert zinf.report(model)["peak"]["device"] <= 4 << 20
    assert in_tiles(model) == ["words.weight"]
    assert_close(state_of(model), state_of(reference), 1e-5)
    assert os.listdir(nvme) == []


def test_what_fits_stays_whole(nvme):
    for device_memory, expected in (("32KiB", []), ("31KiB", ["weight"])):  # 16 KiB, and a gradient as large
        model = zinf.shard(nn.Linear(64, 64), config(nvme, "device", "device", "device", device_memory=device_memory))
        assert in_tiles(model) == expected
    model = zinf.shard(zinf.tiled(nn.Linear(64, 64), 1), config(nvme, "device", "device", "device", tile_bytes=4096))
    assert in_tiles(model) == []


def test_a_refusal_leaves_the_plain_model(nvme):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(4, 20_000))
    values = state_of(model)
    with pytest.raises(zinf.ConfigError, match="host_memory"):
        zinf.shard(model, config(nvme, device_memory="128KiB", host_memory="128KiB"))
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert_same(state_of(model), values)


def test_the_trainers_model_with_a_head_in_tiles(nvme):
    """Its loss is taken over tiles of the vocabulary: logits never exist whole."""
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "vocab": 403, "positions": 8}
    tokens = torch.randint(0, 403, (3, 8))
    for tied in (True, False):
        torch.manual_seed(4)
        reference = GPT(GPTConfig(**sizes, tied=tied))
        torch.manual_seed(4)
        with zinf.init(config(nvme, tile_bytes=1 << 12)):
            model = GPT(GPTConfig(**sizes, tied=tied))
        assert "token_embedding.weight" in in_tiles(model)
        with Largest() as seen:
            loss = model(tokens, tokens)
            loss.backward()
        torch.testing.assert_close(loss, reference(tokens, tokens), rtol=1e-6, atol=1e-6)
        reference(tokens, tokens).backward()
        assert_close(gradients(model), gradients(reference), 1e-5, 1e-8)
        assert seen.nbytes < 3 * 8 * 403 * 4
        torch.testing.assert_close(model(tokens), reference(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_loss_of_a_head_in_tiles(nvme, count, bias):
    torch.manual_seed(0)
    head = nn.Linear(8, 101, bias=bias)
    twin = zinf.shard(zinf.tiled(copy.deepcopy(head), count), config(nvme))
    hidden, targets = torch.randn(5, 3, 8), torch.randint(0, 101, (5, 3))
    targets[2, 1] = -100
    loss = zinf.cross_entropy(hidden, twin, targets)
    plain_loss = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=1e-6)
    (3 * loss).backward()
    (3 * plain_loss).backward()
    assert_close(gradients(twin), gradients(head), 1e-5)
