"""Operators in tiles against the same operators whole (cases C36 and C45)."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import logging
import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zinf_testing import SETTINGS, assert_close, assert_same, config, full_states, make, plain, state_of, train
from zinf_tiles import COUNTS, Largest, gradients, in_tiles, mixtral, of_transformers, tile_all

import zero3
import zinf
from zinf.models.gpt import GPT, GPTConfig

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


class Sized(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of functions that give a new tensor of so many elements."""

    def __init__(self, numel: int):
        super().__init__()
        self.numel, self.names = numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.numel and not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("kind", ["linear", "Conv1D"])
def test_no_tile_makes_tensors_of_its_own_for_sums(nvme, kind):
    """Of a linear layer each tile has a part in the input's gradient, of Conv1D in the output."""
    module = nn.Linear(29, 23) if kind == "linear" else of_transformers("Conv1D")(29, 23)
    model = zinf.shard(zinf.tiled(module, 4), config(nvme))
    x = torch.randn(7, 23 if kind == "Conv1D" else 29, requires_grad=True)
    with Sized(7 * 29) as seen:
        out = model(x)
        out.square().sum().backward()
    sums = [name for name in seen.names if name in ("mm", "addmm", "addmm_", "add", "add_")]
    assert sums == ["addmm" if kind == "Conv1D" else "mm", *["addmm_"] * 3]


def test_a_second_derivative_of_the_input(nvme):
    found = []
    for count in (1, 3):
        torch.manual_seed(2)
        model = zinf.shard(zinf.tiled(nn.Linear(6, 9), count), config(nvme, "device", "device", "device"))
        x = torch.randn(4, 6, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        found.append((grad, *torch.autograd.grad(grad.square().sum(), x)))
    for tiled, whole in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-5)


def operators_on_ranks(rank, world, nvme, count, names):
    for name in names:
        module, twin, x = both(name, count, config(nvme))
        inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
        outputs = [one(given) for one, given in zip((module, twin), inputs, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-6, atol=1e-6)
        ramp = torch.arange(outputs[0].numel()).view(outputs[0].shape)
        (outputs[0] * ramp * (sum(range(1, world + 1)) / world)).sum().backward()  # the mean over the ranks
        (outputs[1] * ramp * (rank + 1)).sum().backward()
        assert_close(gradients(twin), gradients(module), 1e-6)
        if x.is_floating_point():
            own = inputs[0].grad * (2 * (rank + 1) / (world + 1))
            assert_close({"input": inputs[1].grad}, {"input": own}, 1e-5)


@pytest.mark.parametrize("count", COUNTS)
def test_operators_in_tiles_on_two_ranks(ranks, nvme, count):
    there = importlib.util.find_spec("transformers") is not None
    ranks(operators_on_ranks, 2, str(nvme), count, [name for name in OPERATORS if there or name != "Conv1D"])


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
    for count in COUNTS:
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
    for (name, found), (its_name, param) in zip(full_states(model).items(), reference.named_parameters(), strict=True):
        state = its_optimizer.state[param]
        assert name == its_name
        assert found["step"] == state["step"] == 3
        for kind in ("exp_avg", "exp_avg_sq"):
            assert_close({name: found[kind]}, {name: state[kind]}, 1e-3)


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


def lora_in_tiles(rank, world, nvme, count):
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
        losses.append(train(model, optimizer, 3, rank, world))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    assert len(in_tiles(models[1])) == (6 if count > 1 else 0)
    frozen = {n: v for n, v in state_of(models[1]).items() if n.endswith("base.weight")}
    assert_same(frozen, {n: v for n, v in state_of(models[0]).items() if n in frozen})
    assert zinf.full_grad(models[1].blocks[0].up.base.weight) is None


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("world", [1, 2])
def test_lora_on_layers_in_tiles(ranks, nvme, world, count):
    ranks(lora_in_tiles, world, str(nvme), count)


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


EXPERTS = ["eager", "batched_mm", "grouped_mm"]  # one by one, by a tensor of numbers, sorted by expert


def train_experts(rank, world, nvme, implementation, counts):
    """Three-dimensional weights; experts that nobody chose have zero gradients, as in the whole parameter."""
    for count in counts:
        reference, model = (mixtral(implementation, experts=16) for _ in range(2))
        for layer in model.model.layers:
            zinf.tiled(layer.mlp.experts, count)
        zinf.shard(model, config(nvme))
        assert len(in_tiles(model)) == (4 if count > 1 else 0)
        optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
        its_optimizer = torch.optim.AdamW(reference.parameters(), **SETTINGS)
        noise, largest, steps = 1e-7, {}, 3
        for step in range(steps):
            tokens = torch.randint(0, 31, (world, 6), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens[rank : rank + 1], labels=tokens[rank : rank + 1]).loss
            wanted = [reference(input_ids=own, labels=own).loss for own in tokens.split(1)]
            torch.testing.assert_close(loss, wanted[rank], rtol=1e-5, atol=1e-5)
            loss.backward()
            (sum(wanted) / world).backward()
            assert_close(gradients(model), gradients(reference), 1e-4, noise)
            for name, grad in [*gradients(model).items(), *gradients(reference).items()]:
                largest[name] = max(largest.get(name, 0.0), grad.abs().max().item())
            for one in (optimizer, its_optimizer):
                one.step()
                one.zero_grad()
        # The gates' gradients are of 1e-11, all of it rounding: what Adam makes of that at most, on either side.
        at_most = {k: 2 * steps * SETTINGS["lr"] * g / SETTINGS["eps"] for k, g in largest.items() if 0 < g <= noise}
        assert all(name.endswith("mlp.gate.weight") for name in at_most)
        found, wanted = state_of(model), state_of(reference)
        assert list(found) == list(wanted)
        for name in found:
            assert_close({name: found[name]}, {name: wanted[name]}, 1e-3, at_most.get(name, 0.0))


@pytest.mark.parametrize("implementation", EXPERTS)
def test_experts_in_tiles(nvme, caplog, implementation):
    with caplog.at_level(logging.WARNING, logger="zero3.tiles"):
        train_experts(0, 1, nvme, implementation, COUNTS)
    assert "in tiles" not in caplog.text  # no function gets all rows


@pytest.mark.parametrize("implementation", EXPERTS[1:])
def test_experts_in_tiles_on_two_ranks(ranks, nvme, implementation):
    of_transformers("MixtralConfig")
    ranks(train_experts, 2, str(nvme), implementation, COUNTS)


def experts_one_by_one(rank, world, nvme):
    model = mixtral()
    zinf.tiled(model.model.layers[0].mlp.experts, 3)
    zinf.shard(model, config(nvme))
    with pytest.raises(zero3.UnsupportedError, match=r"layers\.0\.mlp\.experts.*one by one.*grouped_mm"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_experts_that_are_picked_one_by_one_are_refused_on_several_ranks(ranks, nvme):
    of_transformers("MixtralConfig")
    ranks(experts_one_by_one, 2, str(nvme))


class Products(nn.Module):
    """grouped_mm with rows behind the last expert's and experts without rows, turned or not; bmm."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 8, 12))
        self.turned = nn.Parameter(torch.randn(16, 12, 8))
        self.rows = torch.tensor([0, 3, 1, 0, 0, 0, 2, 5, 1, 1, 0, 0, 0, 4, 0, 0])

    def forward(self, x, batch):
        offs, turned = self.rows.cumsum(0).to(torch.int32), self.turned.transpose(-2, -1)
        grouped = [F.grouped_mm(x, w, offs=offs)[: offs[-1]] for w in (self.w, turned)]
        return [*grouped, torch.bmm(batch, self.w), batch @ self.w, batch @ self.turned.transpose(1, 2)]


@pytest.mark.parametrize("count", COUNTS)
def test_products_of_experts(nvme, count):
    torch.manual_seed(3)
    module = Products()
    twin = zinf.shard(zinf.tiled(copy.deepcopy(module), count), config(nvme))
    taken = []
    for one in (module, twin):
        torch.manual_seed(4)
        x, batch = torch.randn(20, 8, requires_grad=True), torch.randn(16, 3, 8, requires_grad=True)
        outs = one(x, batch)
        sum(out.square().sum() for out in outs).backward()
        taken.append([*outs, x.grad[: module.rows.sum()], batch.grad])
    for found, wanted in zip(taken[1], taken[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)
    assert_close(gradients(twin), gradients(module), 1e-5)


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
