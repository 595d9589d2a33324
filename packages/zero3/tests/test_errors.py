"""What cannot be supported ends in an error that names the object and the remedy, on every rank, within `timeout`."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero3_models import Perceptron
from zero3_testing import (
    DistantStore,
    assert_same,
    full_gradients,
    gradients_of,
    pair,
    parts,
    state_of,
    train_plain,
    train_sharded,
)

import zero3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shard": ("params",)}, "shard"),
        ({"shard": ("grads", "weights")}, "shard"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"dtype": torch.int8}, "dtype"),
        ({"reduce_dtype": torch.int64}, "reduce_dtype"),
        ({"unit_size": "1 MB"}, "unit_size"),
        ({"unit_size": -1}, "unit_size"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "long"}, "timeout='long'"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        zero3.shard(Perceptron(), **arguments)
    with pytest.raises(ValueError, match=words), zero3.init(**arguments):
        Perceptron()


def test_what_is_no_module():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module.*list"):
        zero3.shard([nn.Linear(2, 2)])
    for function in (zero3.units, zero3.missing_grads, lambda model: zero3.clip_grad_norm_(model, 1.0)):
        with pytest.raises(TypeError, match=r"not partitioned.*shard"):
            function(nn.Linear(2, 2))


def test_a_post_accumulate_optimizer_is_refused_before_and_after():
    _, model = pair(Perceptron, store=DistantStore())
    with pytest.raises(zero3.UnsupportedError, match=r"layers\.0\.weight.*unreduced"):
        model.layers[0].weight.register_post_accumulate_grad_hook(lambda param: None)
    with zero3.gathered(model), pytest.raises(zero3.UnsupportedError, match=r"layers\.0\.weight"):
        model.layers[0].weight.register_post_accumulate_grad_hook(lambda param: None)
    plain = Perceptron()
    plain.layers[1].bias.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(zero3.UnsupportedError, match=r"layers\.1\.bias"):
        zero3.shard(plain, store=DistantStore())


def test_gradients_by_autograd_grad_on_one_rank():
    plain, model = pair(Perceptron, store=DistantStore())
    found, wanted = (torch.autograd.grad(one.loss(one.data(0)), list(one.parameters())) for one in (model, plain))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def refused(rank, world):
    _, model = pair(Perceptron)
    loss = model.loss(parts(model.data(0), world)[rank])
    with pytest.raises(zero3.UnsupportedError, match=r"layers\.0\.weight.*backward"):
        torch.autograd.grad(loss, list(model.parameters()))
    with pytest.raises(zero3.UnsupportedError, match="DistributedDataParallel"):
        DistributedDataParallel(model)
    with pytest.raises(TypeError, match=r"model\.module"):
        zero3.shard(DistributedDataParallel(Perceptron()))
    for optimizer in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(zero3.UnsupportedError, match=optimizer.__name__):
            optimizer(model.parameters()).step(lambda: None)
    train_sharded(model, 1, rank, world)  # the model is as before


def test_what_needs_whole_gradients_is_refused_on_two_ranks(ranks):
    ranks(refused, 2)


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.bfloat16()])
def test_converting_a_partitioned_model_is_refused_with_the_remedy(convert):
    plain, model = pair(Perceptron, store=DistantStore())
    with pytest.raises(zero3.UnsupportedError, match=r"layers\.0\.weight.*dtype"):
        convert(model)
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def test_conversions_that_change_nothing():
    plain, model = pair(Perceptron, store=DistantStore())
    model.float().to("cpu").to(torch.float32).cpu()
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def test_one_rank_with_all_in_memory_is_an_ordinary_model():
    plain, model = pair(Perceptron)
    for one in (plain, model):
        one.double()
    assert_same(model.state_dict(), plain.state_dict())
    x = plain.data(0).double()
    for one in (plain, model):
        one.loss(x).backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_same(full_gradients(model), gradients_of(plain))
    assert_same(model.state_dict(), plain.state_dict())
    assert_same(zero3.state_dict(model), plain.state_dict())
    state = {name: value.clone() + 1 for name, value in plain.state_dict().items()}
    zero3.load_state_dict(model, state)
    assert_same(model.state_dict(), state)


def touched_on_one_rank(rank, world, touch):
    model = zero3.shard(Perceptron(), timeout=2)
    started = time.monotonic()
    try:
        if touch == "parameter" and rank == 0:
            model.layers[2].weight.sum()
        elif touch == "state_dict" and rank == 0:
            model.state_dict()
        elif touch == "deepcopy" and rank == 0:
            __import__("copy").deepcopy(model)
        model.loss(parts(model.data(0), world)[rank]).backward()
        full_gradients(model)
        train_sharded(model, 1, rank, world)
    except zero3.RankMismatchError as error:
        return str(error), time.monotonic() - started
    raise AssertionError("the other rank was not missed")


@pytest.mark.parametrize("touch", ["parameter", "state_dict", "deepcopy"])
def test_what_one_rank_does_alone_ends_in_an_error_that_names_it(ranks, touch):
    answers = ranks(touched_on_one_rank, 2, touch, fresh=True)
    assert "layers." in answers[0][0]
    for message, seconds in answers:
        assert "rank" in message
        assert seconds < 30


def stops(rank, world):
    """One rank raises in the middle of a step; the other must not wait for ever."""
    model = zero3.shard(Perceptron(), timeout=2)
    if rank == 1:
        return "left"
    with pytest.raises(zero3.RankMismatchError, match=r"unit layers\.0"):
        model.loss(model.data(0)).backward()
    return "told"


def test_a_rank_that_leaves_is_missed(ranks):
    assert ranks(stops, 2, fresh=True) == ["told", "left"]


def test_a_dropped_model_gives_its_memory_back():
    import gc
    import weakref

    _, model = pair(Perceptron, store=DistantStore())
    train_sharded(model, 1)
    machinery, param = weakref.ref(model._zero3_model), weakref.ref(model.layers[0].weight)
    del model
    gc.collect()
    assert machinery() is None
    assert param() is None


def test_the_state_after_refusals_is_whole():
    plain, model = pair(Perceptron, store=DistantStore())
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 5))
    assert_same(state_of(model), state_of(plain))
    assert all(str(unit.state) == "SHARDED" for unit in zero3.units(model))


def stepped_by_hand(rank, world, write):
    """A whole parameter and a part of a gradient: an error on every rank, where some would broadcast."""
    model = zero3.shard(nn.Linear(2, 64))
    model(torch.ones(3, 2)).sum().backward()
    before = state_of(model)
    for param in model.parameters():
        with pytest.raises(zero3.UnsupportedError, match=r"whole outside of an optimizer's step"):
            write(param)
    assert_same(state_of(model), before)


@torch.no_grad()
def by_operator(param):
    param -= 0.1 * param.grad


def by_data(param):
    param.data.add_(param.grad.data, alpha=-0.1)


@torch.no_grad()
def by_foreach(param):
    torch._foreach_add_([param], [param.grad], alpha=-0.1)


@torch.no_grad()
def inside_gathered(param):
    with zero3.gathered(param, modify=True):
        param.sub_(param.grad)


@pytest.mark.parametrize("write", [by_operator, by_data, by_foreach, inside_gathered])
def test_a_step_by_hand_is_refused_on_two_ranks(ranks, write):
    ranks(stepped_by_hand, 2, write)


class OwnLBFGS(torch.optim.LBFGS):
    """By another name it looks at all parameters together just so."""


def steps_that_would_differ(rank, world):
    model = zero3.shard(Perceptron(), store=DistantStore())
    with pytest.raises(zero3.UnsupportedError, match="OwnLBFGS is not element-wise"):
        OwnLBFGS(model.parameters()).step(lambda: model.loss(model.data(0)))
    shape = model.layers[3].weight.shape
    model.layers[3] = nn.Linear(shape[1], shape[0])
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(model.data(rank)).backward()
    with pytest.raises(
        zero3.UnsupportedError, match=r"layers\.3\.weight came into the model.*zero3\.shard"
    ):
        opt.step()
    zero3.shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    opt.zero_grad()
    model.loss(model.data(rank)).backward()
    opt.step()
    return model.layers[3].weight.detach().clone()


def test_steps_after_which_ranks_would_differ_are_refused(ranks):
    one, other = ranks(steps_that_would_differ, 2)
    assert torch.equal(one, other)


class Shares(nn.Module):
    """Two tensors of one memory; `where` says which."""

    def __init__(self, where):
        super().__init__()
        self.first, both = nn.Linear(4, 6), torch.randn(8, 6)
        if where == "parameter":
            self.second = nn.Parameter(self.first.weight.data)
        elif where == "buffer":
            self.register_buffer("second", self.first.weight.data[1:3])
        elif where == "columns":
            self.columns = nn.ParameterList([both[:, :4], both[:, 3:]])
        elif where == "apart":
            self.columns = nn.ParameterList([both[:, ::2], both[:, 1::2], both.new_ones(3)])
        elif where == "frozen":
            self.second = nn.Parameter(self.first.requires_grad_(False).weight.data, requires_grad=False)


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("parameter", "first.weight and second|second and first.weight"),
        ("buffer", "first.weight and second"),
        ("columns", "columns.0 and columns.1"),
    ],
)
def test_parameters_that_share_memory_are_refused(where, names):
    with pytest.raises(zero3.UnsupportedError, match=f"({names}) share memory"):
        zero3.shard(Shares(where))


@pytest.mark.parametrize("where", ["apart", "frozen"])
def test_what_lies_beside_one_another_or_never_changes_is_no_harm(where):
    plain, model = pair(lambda: Shares(where), store=DistantStore())
    assert_same(state_of(model), state_of(plain))


@pytest.mark.parametrize("store", [None, DistantStore()], ids=["resident", "distant"])
def test_memory_that_serves_many_units_is_not_shared_with_other_processes(store):
    plain, model = pair(Perceptron, store=store, unit_size=1, dtype=None)
    if store is None:
        model.share_memory()  # ordinary parameters
    else:
        with pytest.raises(zero3.UnsupportedError, match=r"layers\.0\.weight.*copy\.deepcopy\(model\)"):
            model.share_memory()
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


@pytest.mark.parametrize("record", [torch.jit.trace, torch.export.export], ids=["torch.jit.trace", "torch.export"])
def test_recording_a_graph_is_refused_and_a_copy_can_be_recorded(record):
    plain, model = pair(Perceptron, store=DistantStore(), unit_size=1)
    data = plain.data(0)
    with pytest.raises(zero3.UnsupportedError, match=r"copy\.deepcopy\(model\)"):
        record(model, (data,))
    recorded = record(copy.deepcopy(model), (data,))
    recorded = recorded.module() if hasattr(recorded, "module") else recorded
    assert torch.equal(recorded(data), plain(data))
    assert_same(state_of(model), state_of(plain))


def test_a_parameter_keeps_its_identity():
    """torch.utils.swap_tensors, and `Module.to` where it works by that, would give the unit another's parameter."""
    plain, model = pair(Perceptron, store=DistantStore(), unit_size=1)
    param = next(model.parameters())
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(param, nn.Parameter(torch.zeros(param.shape)))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="swap"):
            model.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(model(plain.data(0)), plain(plain.data(0)))
