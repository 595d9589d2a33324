"""init(): built partitioned, with the plain constructor's values; what comes after the constructors is kept too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from zero3_models import MODELS, Perceptron, Regression, SmallGPT
from zero3_testing import DistantStore, assert_same, state_of, train_plain, train_sharded

import zero3

every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def built(make, **arguments):
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    with zero3.init(**arguments):
        model = make()
    return plain, model


@every_model
def test_values_are_the_plain_constructors_bit_for_bit(make):
    plain, model = built(make, store=DistantStore())
    assert_same(state_of(model), state_of(plain))
    assert all(hasattr(param, "_zero3") for param in model.parameters())
    assert torch.equal(torch.rand(1), (torch.manual_seed(3), make(), torch.rand(1))[2])


@every_model
def test_training_is_bit_equal(make):
    plain, model = built(make, store=DistantStore())
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def late_init(module):
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.02)
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding):
        with torch.no_grad():
            module.weight.uniform_(-1, 1)
            module.weight[0].fill_(0)
    if isinstance(module, nn.LSTM):
        for param in module.parameters():
            nn.init.orthogonal_(param) if param.ndim > 1 else param.data.fill_(0.5)


def late(rank, world):
    """Initialisation after construction, inside the context and after it, on each rank by itself."""
    for inside in (True, False):
        torch.manual_seed(3)
        plain = SmallGPT(layers=2).apply(late_init)
        torch.manual_seed(3)
        with zero3.init(store=DistantStore()):
            model = SmallGPT(layers=2)
            if inside:
                model.apply(late_init)
        if not inside:
            model.apply(late_init)
        assert_same(state_of(model), state_of(plain))
        assert_same(train_sharded(model, 1, rank, world)[1], train_plain(plain, 1, world)[1])


def test_initialisation_after_construction_is_kept(ranks):
    late(0, 1)
    ranks(late, 2)


class Symmetric(nn.Module):
    """A parametrization that changes what it is given: of the weight only the upper triangle counts."""

    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x):
        return x.triu()


class Parametrized(Regression):
    def __init__(self):
        super().__init__()
        self.orthogonal = parametrizations.orthogonal(nn.Linear(12, 12))
        self.symmetric = nn.Linear(12, 12)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())

    def forward(self, x):
        return self.symmetric(torch.tanh(self.orthogonal(x)))


def parametrized(rank, world, store=None):
    torch.manual_seed(3)
    plain = Parametrized()
    torch.manual_seed(3)
    with zero3.init(store=store):
        model = Parametrized()
    assert_same(state_of(model), state_of(plain))
    assert_same(train_sharded(model, 2, rank, world)[1], train_plain(plain, 2, world)[1])


def test_parametrizations_keep_what_they_make_of_a_weight(ranks):
    parametrized(0, 1, DistantStore())
    ranks(parametrized, 2)


def test_set_takes_values_and_no_memory():
    with zero3.init(store=DistantStore()):
        model = Perceptron()
    weight, values = model.layers[0].weight, torch.randn(12, 12)
    weight.set_(values)
    assert torch.equal(model.state_dict()["layers.0.weight"], values)
    with zero3.gathered(model, modify=True):
        weight.set_(3 * values)
    assert torch.equal(model.state_dict()["layers.0.weight"], 3 * values)
    for place in ((), (values[0],), (values.untyped_storage(),)):
        with pytest.raises(zero3.UnsupportedError, match="partitioned"):
            weight.set_(*place)


def test_nested_contexts_and_shard_inside_partition_once():
    constructor, linear, embedding = nn.Module.__init__, nn.Linear.__init__, nn.Embedding.__init__
    torch.manual_seed(3)
    plain = Perceptron()
    torch.manual_seed(3)
    with zero3.init(store=DistantStore()):
        with zero3.init(store=DistantStore()):
            model = Perceptron()
        zero3.shard(model, store=DistantStore())
    assert nn.Module.__init__ is constructor
    assert (nn.Linear.__init__, nn.Embedding.__init__) == (linear, embedding)
    assert "__init_subclass__" not in nn.Module.__dict__
    assert type(nn.Linear(2, 2).weight) is nn.Parameter
    assert len({id(param._zero3) for param in model.parameters()}) == 8
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def test_constructors_are_restored_after_an_exception():
    linear = nn.Linear.__init__
    with pytest.raises(ValueError, match="stop"), zero3.init():  # noqa: PT012
        Perceptron()
        raise ValueError("stop")
    assert nn.Linear.__init__ is linear
    with zero3.init(store=DistantStore()):
        model = Perceptron()
    train_sharded(model, 1)


def test_classes_defined_inside_the_context_and_calls_of_super():
    with zero3.init(store=DistantStore()):

        class Base(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(5))

        class Derived(Base):
            def __init__(self):
                super().__init__()
                assert type(self.weight) is nn.Parameter  # its own constructor still runs
                self.weight.data.mul_(2)
                self.bias = nn.Parameter(torch.zeros(3))

        model = Derived()
    assert_same(state_of(model), {"weight": torch.full((5,), 2.0), "bias": torch.zeros(3)})


def test_several_models_in_one_context():
    with zero3.init():
        first, second = Perceptron(), SmallGPT()
    for model in (first, second):
        train_sharded(model, 2)
        assert zero3.units(model)


def test_modules_added_after_the_context_are_plain_until_shard():
    with zero3.init(store=DistantStore()):
        model = Perceptron()
    model.head = nn.Linear(12, 3)
    assert type(model.head.weight) is nn.Parameter
    zero3.shard(model, store=DistantStore())
    assert all(hasattr(param, "_zero3") for param in model.parameters())
    train_sharded(model, 1)


def test_constructor_that_uses_and_ties_its_parameters():
    class Model(Perceptron):
        def __init__(self):
            super().__init__()
            self.layers[3].weight = self.layers[0].weight
            self.scale = nn.Parameter(self.layers[0].weight.detach().norm() * 0.1)
            with torch.no_grad():
                self.layers[1].weight.copy_(self.layers[2].weight.t())

        def forward(self, x):
            return super().forward(x) * self.scale

    plain, model = built(Model, store=DistantStore())
    assert model.layers[3].weight is model.layers[0].weight
    assert_same(state_of(model), state_of(plain))
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def test_a_model_on_the_meta_device_gets_its_values_when_it_is_partitioned():
    with torch.device("meta"):
        model = Perceptron()
    torch.manual_seed(3)
    zero3.shard(model, store=DistantStore())
    torch.manual_seed(3)
    assert_same(state_of(model), state_of(Perceptron()))
    train_sharded(model, 1)


def test_a_model_on_the_meta_device_whose_values_nobody_knows_is_refused():
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Unknown())
    with pytest.raises(RuntimeError, match=r"Unknown.*reset_parameters"):
        zero3.shard(model)


def meta(rank, world):
    with torch.device("meta"):
        model = Perceptron()
    torch.manual_seed(rank)
    zero3.shard(model)
    torch.manual_seed(0)
    assert_same(state_of(model), state_of(Perceptron()))


def test_meta_models_on_two_ranks_have_the_values_of_rank_0(ranks):
    ranks(meta, 2)
