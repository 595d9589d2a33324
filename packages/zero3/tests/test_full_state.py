"""state_dict and load_state_dict: names, shapes, dtypes and values of the plain model, both ways."""

from __future__ import annotations

import copy
import pickle

import pytest
import safetensors.torch
import torch
from torch import nn
from zero3_models import MODELS, Convolutional, OddSizes, Perceptron, SmallGPT, random
from zero3_testing import (
    DistantStore,
    adamw,
    assert_same,
    full_gradients,
    pair,
    parts,
    plain_gradients,
    state_of,
    train_plain,
    train_sharded,
)

import zero3
from zero3 import full_state

every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
every_store = pytest.mark.parametrize("store", [DistantStore, lambda: None], ids=["distant", "default"])


@every_model
@every_store
def test_the_state_is_the_plain_models(make, store):
    plain, model = pair(make, store=store())
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(zero3.state_dict(model), plain.state_dict())
    assert_same(copy.deepcopy(model).state_dict(), plain.state_dict())


class Counting(nn.Linear):
    """Has a state of its own making, which is no tensor."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


@every_store
def test_extra_states_of_modules(store):
    def build():
        torch.manual_seed(1)
        return nn.Sequential(Counting(4, 4), nn.BatchNorm1d(4), nn.Sequential(Counting(4, 4)))

    plain, model = build(), zero3.shard(build(), store=store())
    for one in (plain, model):
        one(torch.ones(2, 4))
    for state in (zero3.state_dict(model), model.state_dict()):
        assert list(state) == list(plain.state_dict())
        assert state["2.0._extra_state"] == {"calls": 1}
    other = zero3.shard(build(), store=store())
    assert zero3.load_state_dict(other, plain.state_dict()) == ([], [])
    assert other[0].calls == other[2][0].calls == 1
    without = {name: value for name, value in plain.state_dict().items() if name != "0._extra_state"}
    with pytest.raises(RuntimeError, match=r"missing: 0\._extra_state"):
        zero3.load_state_dict(other, without)
    assert zero3.load_state_dict(other, without, strict=False).missing_keys == ["0._extra_state"]


@every_store
def test_the_state_is_a_copy(store):
    plain, model = pair(SmallGPT, store=store())
    state, lazy = model.state_dict(), zero3.state_dict(model)
    looked_up = lazy["embedding.weight"]
    wanted = {name: value.clone() for name, value in plain.state_dict().items()}
    train_sharded(model, 1)
    if store is DistantStore:
        assert_same(state, wanted)
        assert not torch.equal(model.state_dict()["embedding.weight"], state["embedding.weight"])
    assert torch.equal(looked_up, wanted["embedding.weight"])


def test_the_lazy_state_follows_the_model_and_is_a_mapping():
    _, model = pair(SmallGPT, store=DistantStore())
    state = zero3.state_dict(model)
    train_sharded(model, 1)
    assert_same(state, model.state_dict())
    assert "norm.weight" in state
    assert len(state) == len(dict(model.state_dict()))
    with pytest.raises(KeyError):
        state["no such name"]


def test_looking_for_a_name_gathers_nothing(monkeypatch):
    state = zero3.state_dict(zero3.shard(nn.Linear(3, 2), store=DistantStore()))
    monkeypatch.setattr(type(state), "__getitem__", lambda self, name: pytest.fail(f"{name} was looked up"))
    assert "weight" in state
    assert "weight" in state.keys()  # noqa: SIM118
    assert "other" not in state


def test_state_of_a_submodule_with_a_prefix_and_with_variables():
    plain, model = pair(SmallGPT, store=DistantStore())
    assert_same(model.blocks[1].state_dict(prefix="x."), plain.blocks[1].state_dict(prefix="x."))
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is param for name, param in model.named_parameters())


def test_tied_parameters_are_one_tensor_in_the_state():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
            self.head.weight = self.embedding.weight

    plain, model = pair(Tied, store=DistantStore())
    state = model.state_dict()
    assert_same(state, plain.state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()


@every_store
@every_model
def test_loading_a_mapping(make, store):
    torch.manual_seed(9)
    wanted = {name: value.clone() for name, value in make().state_dict().items()}
    for load in (zero3.load_state_dict, lambda model, state: model.load_state_dict(state)):
        _, model = pair(make, store=store())
        load(model, wanted)
        assert_same(model.state_dict(), wanted)
    plain = make()
    plain.load_state_dict(wanted)
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def saved_and_loaded(rank, world, path):
    """A file on disk goes into a partitioned model; what comes out is the file."""
    for make in (SmallGPT, Convolutional, OddSizes):
        file = f"{path}/{make.__name__}.safetensors"
        torch.manual_seed(9)
        wanted = {name: value.clone() for name, value in make().state_dict().items()}
        if rank == 0:
            safetensors.torch.save_file({n: v.contiguous() for n, v in wanted.items()}, file)
        if world > 1:
            torch.distributed.barrier()
        for state in (file, wanted):
            for dtype in (None, torch.bfloat16):
                model = zero3.shard(make(), dtype=dtype)
                assert zero3.load_state_dict(model, state) == ([], [])
                assert_same(model.state_dict(), wanted)
                assert_same(zero3.state_dict(model), wanted)
                model.load_state_dict(state if isinstance(state, dict) else wanted)
                assert_same(model.state_dict(), wanted)


def test_loading_a_safetensors_file(ranks, tmp_path):
    saved_and_loaded(0, 1, str(tmp_path))
    ranks(saved_and_loaded, 2, str(tmp_path))


def of_two_ranks(rank, world):
    for make in (SmallGPT, OddSizes, Convolutional):
        plain, model = pair(make)
        assert_same(model.state_dict(), plain.state_dict())
        assert_same(zero3.state_dict(model), plain.state_dict())


def test_the_state_on_two_ranks(ranks):
    ranks(of_two_ranks, 2)
    ranks(of_two_ranks, 3)


def test_a_state_in_other_dtypes_and_non_contiguous_tensors():
    plain, model = pair(Perceptron, store=DistantStore())
    state = {name: (value.double() * 2).t().contiguous().t() for name, value in plain.state_dict().items()}
    zero3.load_state_dict(model, state)
    assert_same(model.state_dict(), {name: value.float() for name, value in state.items()})


def test_names_that_do_not_agree_are_named():
    plain, model = pair(Perceptron, store=DistantStore())
    state = dict(plain.state_dict())
    del state["layers.1.bias"]
    state["surplus"] = torch.zeros(1)
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"missing.*layers\.1\.bias.*unexpected.*surplus"):
        zero3.load_state_dict(model, state)
    with pytest.raises(RuntimeError, match=r"layers\.1\.bias"):
        model.load_state_dict(state)
    missing, unexpected = zero3.load_state_dict(model, state, strict=False)
    assert (missing, unexpected) == (["layers.1.bias"], ["surplus"])
    assert_same(model.state_dict(), before)


def test_a_shape_that_does_not_fit_loads_nothing():
    plain, model = pair(Perceptron, store=DistantStore())
    state = {name: value + 1 for name, value in plain.state_dict().items()}
    state["layers.3.weight"] = torch.zeros(3, 3)
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"layers\.3\.weight.*\(3, 3\).*\(12, 12\)"):
        zero3.load_state_dict(model, state, strict=False)
    assert_same(model.state_dict(), before)


class RecordingFile:
    """Behaves like an opened safetensors file of one (100, 64) tensor; notes which rows are asked for."""

    def __init__(self):
        self.rows = []
        self.weight = random(0, 100, 64)

    def keys(self):
        return ["weight"]

    def get_slice(self, name):
        return self

    def get_shape(self):
        return [100, 64]

    def __getitem__(self, rows):
        self.rows.append(rows)
        return self.weight[rows]


@pytest.mark.parametrize(("start", "stop"), [(0, 3200), (3200, 6400), (100, 140), (63, 65), (6399, 6400)])
def test_each_rank_reads_only_the_rows_of_its_part(start, stop):
    file = RecordingFile()
    part = full_state.SafetensorsFile(file).flat_part("weight", start, stop)
    assert torch.equal(part, file.weight.reshape(-1)[start:stop])
    assert file.rows == [slice(start // 64, (stop + 63) // 64)]


def small_sizes(rank, world):
    """0 dims, 1, 2, 3 and 5 elements and a 7x3 matrix: padding is nowhere, not in values and not in the norm."""
    plain, model = pair(OddSizes, store=DistantStore())
    opt_plain, opt = (
        adamw(p for p in plain.parameters() if p.requires_grad),
        adamw(p for p in model.parameters() if p.requires_grad),
    )
    for step in range(3):
        _, wanted = plain_gradients(plain, plain.data(step, 6), world)
        model.loss(parts(model.data(step, 6), world)[rank]).backward()
        assert_same(full_gradients(model), wanted)
        norm = zero3.clip_grad_norm_(model, 1e9)
        assert torch.allclose(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1e9), rtol=1e-6)
        for optimizer in (opt_plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model.state_dict(), plain.state_dict())
    with zero3.gathered(model):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


def test_parameters_with_fewer_elements_than_ranks(ranks):
    small_sizes(0, 1)
    ranks(small_sizes, 2)
    ranks(small_sizes, 3)


def optimizer_state(rank, world):
    """An optimizer's own state_dict goes into another optimizer of an equal model: training goes on bit for bit."""
    _, model = pair(Perceptron)
    opt = adamw(model.parameters())
    for step in range(4):
        if step == 2:
            state, moments = state_of(model), pickle.loads(pickle.dumps(opt.state_dict()))
        model.loss(parts(model.data(step), world)[rank]).backward()
        opt.step()
        opt.zero_grad()
    other = zero3.shard(Perceptron())
    zero3.load_state_dict(other, state)
    opt = adamw(other.parameters())
    opt.load_state_dict(moments)
    for step in range(2, 4):
        other.loss(parts(other.data(step), world)[rank]).backward()
        opt.step()
        opt.zero_grad()
    assert_same(state_of(other), state_of(model))


def test_an_optimizers_state_can_be_saved_and_loaded(ranks):
    optimizer_state(0, 1)
    ranks(optimizer_state, 2)


def test_into_a_dict_of_ones_own():
    plain, model = pair(SmallGPT, store=DistantStore())
    found = model.state_dict(destination={}, prefix="model.")
    assert_same(found, plain.state_dict(destination={}, prefix="model."))


@pytest.mark.parametrize("store", [DistantStore, lambda: None], ids=["distant", "default"])
def test_a_pickled_model_is_a_plain_one(store):
    plain, model = pair(SmallGPT, store=store())
    copied = pickle.loads(pickle.dumps(model))
    assert_same(copied.state_dict(), plain.state_dict())
    assert_same(train_plain(copied, 1)[1], train_plain(plain, 1)[1])
