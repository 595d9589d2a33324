"""Parameters used outside the module that owns them, by all three routes."""

from __future__ import annotations

import copy
import ctypes
import io
import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zero3_models import Regression, random
from zero3_testing import (
    DistantStore,
    adamw,
    assert_same,
    full_gradients,
    gradients_of,
    plain_gradients,
    state_of,
    train_plain,
    train_sharded,
)

import zero3


class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(random(1, 12))
        self.weight = nn.Parameter(random(2, 12, 12))

    def forward(self, x):
        raise AssertionError("the child is never called")


class UsesItsChild(Regression):
    def __init__(self):
        super().__init__()
        self.child = Child()

    def forward(self, x):
        return (x + self.child.scale) @ self.child.weight.T


class ReturnsItsParameter(Regression):
    """One module returns its weight, another uses it."""

    class Keeper(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(random(2, 12, 12))

        def forward(self):
            return {"weight": self.weight, "rows": self.weight[:3]}

    def __init__(self):
        super().__init__()
        self.keeper = self.Keeper()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        kept = self.keeper()
        return self.layer(x @ kept["weight"]) + F.linear(x, kept["rows"]).sum(1, keepdim=True)


class UsesClosuresAndLists(Regression):
    """Weights reached through a closure, a dict and a list, from a module that does not own them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        weight = self.first.weight
        self.apply_first = lambda x: x @ weight
        self.found = {"bias": self.second.bias, "list": [self.second.weight]}

    def forward(self, x):
        return self.apply_first(self.second(x)) @ self.found["list"][0] + self.found["bias"]


EXTERNAL = [UsesItsChild, ReturnsItsParameter, UsesClosuresAndLists]


@pytest.mark.parametrize("make", EXTERNAL)
def test_without_registration_the_numbers_are_exact(make):
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    model = zero3.shard(make(), store=DistantStore())
    assert_same(train_sharded(model, 3)[1], train_plain(plain, 3)[1])


def registered_or_not(rank, world):
    for make in EXTERNAL:
        for register in (False, True):
            torch.manual_seed(3)
            plain = make()
            torch.manual_seed(3)
            model = zero3.shard(make())
            if register:
                for param in model.parameters():
                    zero3.register_external(model, param)
            assert_same(train_sharded(model, 3, rank, world)[1], train_plain(plain, 3, world)[1])


def test_on_two_ranks_with_and_without_registration(ranks):
    ranks(registered_or_not, 2)


def test_registration_holds_the_unit_while_the_module_runs():
    model = zero3.shard(UsesItsChild(), store=DistantStore())
    zero3.register_external(model, model.child.weight)
    unit = model.child.weight._zero3.unit
    states = []
    model.register_forward_pre_hook(lambda *_: states.append(str(unit.state)))
    model(model.data(0))
    assert states == ["READY"]
    assert str(unit.state) == "SHARDED"


def test_registering_what_is_not_partitioned_is_a_type_error():
    with pytest.raises(TypeError, match="partitioned"):
        zero3.register_external(nn.Linear(2, 2), torch.zeros(2))


READERS = {
    "matmul": lambda p: torch.ones(1, 6) @ p,
    "transpose": lambda p: p.t(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "index": lambda p: p[1:3],
    "stack": lambda p: torch.stack([p, p]),
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "foreach": lambda p: torch._foreach_norm([p])[0],
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "item": lambda p: torch.tensor(p[0, 0].item()),
    "iteration": lambda p: torch.stack(list(p)),
    "repr": lambda p: torch.tensor([float(word) for word in repr(p[0, :1].detach()).split("[")[1].split("]")[0:1]]),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "as_tensor": lambda p: torch.as_tensor(p) * 1,
    "Parameter of data": lambda p: nn.Parameter(p.data) * 1,
    "clone": lambda p: p.clone(),
    "double": lambda p: p.double(),
    "to": lambda p: p.to(torch.float64),
    "contiguous": lambda p: p.contiguous(),
    "out": lambda p: torch.add(p.detach(), 1, out=torch.empty(6, 6)),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).clone(),
    "any ops": lambda p: torch.ops.aten.relu(p),
    "compare": lambda p: torch.tensor(torch.equal(p, p) and torch.allclose(p, p)),
    "copy_ into another": lambda p: torch.empty(6, 6).copy_(p),
    "format": lambda p: torch.tensor(float(f"{p.sum():.4f}")),
    "flatten": lambda p: nn.utils.parameters_to_vector([p]),
    "untyped storage": lambda p: torch.tensor(p.detach().untyped_storage().nbytes() >= 144),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_way_to_read_a_parameter_gathers_it(read):
    plain = nn.Linear(6, 6)
    model = zero3.shard(copy.deepcopy(plain), store=DistantStore())
    found, wanted = read(model.weight), read(plain.weight)
    assert torch.equal(found.detach(), wanted.detach())


METADATA = {
    "shape": lambda p: (p.shape, p.size(), p.size(0), p.dim(), p.ndim, p.numel(), p.nelement(), len(p)),
    "type": lambda p: (p.dtype, p.device, p.layout, p.is_floating_point(), p.element_size(), p.itemsize, p.nbytes),
    "graph": lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p.grad),
    "hash": lambda p: hash(p) == id(p),
    "type string": lambda p: p.type(),
    "stride": lambda p: (p.stride(), p.is_contiguous()),
}


@pytest.mark.parametrize("ask", METADATA.values(), ids=METADATA)
def test_metadata_is_the_plain_models(ask):
    plain = nn.Linear(6, 4)
    model = zero3.shard(copy.deepcopy(plain), store=DistantStore())
    found, wanted = ask(model.weight), ask(plain.weight)
    assert found == wanted


def test_a_parameter_changed_in_place_is_kept():
    """Weight clipping, spectral rescaling and the like between steps, without gathered()."""
    torch.manual_seed(3)
    plain = UsesItsChild()
    torch.manual_seed(3)
    model = zero3.shard(UsesItsChild(), store=DistantStore())
    for one in (plain, model):
        with torch.no_grad():
            one.child.weight.clamp_(-0.5, 0.5)
            one.child.scale[2:5] = 3.0
        one.child.weight.data.mul_(2.0)
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(one.parameters()) + 1, one.parameters())
    assert_same(state_of(model), state_of(plain))
    assert_same(train_sharded(model, 2)[1], train_plain(plain, 2)[1])


def changed_on_two_ranks(rank, world):
    torch.manual_seed(3)
    plain = UsesItsChild()
    torch.manual_seed(3)
    model = zero3.shard(UsesItsChild())
    for step in range(2):
        for one in (plain, model):
            with torch.no_grad():
                one.child.weight.clamp_(-0.5 / (step + 1), 0.5)
            one.child.scale.data += 1
        assert_same(state_of(model), state_of(plain))


def test_a_parameter_changed_in_place_is_kept_on_two_ranks(ranks):
    ranks(changed_on_two_ranks, 2)


class Tied(nn.Module):
    def __init__(self, rows=50):
        super().__init__()
        self.embedding = nn.Embedding(rows, 8)
        self.head = nn.Linear(8, rows, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

    def loss(self, tokens):
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    @staticmethod
    def data(step, size=4):
        return torch.randint(0, 50, (size, 5), generator=torch.Generator().manual_seed(step))


def resize(model):
    """What `resize_token_embeddings` does: a new embedding, the old rows copied, the head tied to it."""
    new = nn.Embedding(53, 8)
    with torch.no_grad():
        new.weight[:50] = model.embedding.weight
    model.embedding = new
    model.head.weight = new.weight
    model.head.out_features = 53


def resized(rank, world):
    torch.manual_seed(3)
    plain = Tied()
    resize(plain)
    torch.manual_seed(3)
    with zero3.init():
        model = Tied()
        resize(model)
    assert zero3.full_shape(model.embedding.weight) == (53, 8)
    assert model.head.weight is model.embedding.weight
    assert_same(state_of(model), state_of(plain))
    assert_same(train_sharded(model, 3, rank, world)[1], train_plain(plain, 3, world)[1])


def test_a_resized_embedding_keeps_its_rows_and_its_tie(ranks):
    ranks(resized, 2)


def test_a_model_changed_after_partitioning_is_partitioned_anew():
    """New modules after shard(): call shard() again; the old rows and the tie are kept."""
    torch.manual_seed(3)
    plain = Tied()
    torch.manual_seed(3)
    model = zero3.shard(Tied(), store=DistantStore())
    torch.manual_seed(4)
    resize(plain)
    torch.manual_seed(4)
    resize(model)
    zero3.shard(model, store=DistantStore())
    assert_same(state_of(model), state_of(plain))
    assert_same(train_sharded(model, 3)[1], train_plain(plain, 3)[1])


def test_a_frozen_copy_beside_the_trained_model():
    """The teacher is a deep copy of a partitioned model; it is an ordinary model until it is partitioned."""
    torch.manual_seed(3)
    plain = Tied()
    torch.manual_seed(3)
    model = zero3.shard(Tied(), store=DistantStore())
    states = []
    for one in (plain, model):
        teacher = copy.deepcopy(one).requires_grad_(False)
        assert not any(hasattr(p, "_zero3") for p in teacher.parameters())
        if one is model:
            zero3.shard(teacher, store=DistantStore())
        opt = adamw(one.parameters())
        for step in range(3):
            tokens = one.data(step)
            (one.loss(tokens) + (one(tokens) - teacher(tokens)).square().mean()).backward()
            opt.step()
            opt.zero_grad()
        states.append({**state_of(one), **{"teacher." + k: v for k, v in state_of(teacher).items()}})
    assert_same(states[1], states[0])


def test_functional_call_with_own_and_with_other_values():
    torch.manual_seed(3)
    plain = UsesClosuresAndLists()
    torch.manual_seed(3)
    model = zero3.shard(UsesClosuresAndLists(), store=DistantStore())
    x = plain.data(0)
    for one in (plain, model):
        own = dict(one.named_parameters())
        loss = torch.func.functional_call(one, own, x).square().mean()
        loss.backward()
        doubled = {name: 2 * value for name, value in one.named_parameters()}
        torch.func.functional_call(one, doubled, x).square().mean().backward()
    assert_same(full_gradients(model), gradients_of(plain))


def test_gradients_through_the_untied_and_the_tied_use_are_added():
    torch.manual_seed(3)
    plain = Tied()
    torch.manual_seed(3)
    model = zero3.shard(Tied(), store=DistantStore())
    _, wanted = plain_gradients(plain, plain.data(0))
    model.loss(model.data(0)).backward()
    assert_same(full_gradients(model), wanted)
    assert list(dict(model.named_parameters())) == ["embedding.weight"]


def as_numpy(tensor):
    return torch.from_numpy(np.array(tensor))


READS = {
    "tolist": lambda w, s: torch.tensor(w.tolist()),
    "item": lambda w, s: torch.tensor(s.item()),
    "numbers": lambda w, s: torch.tensor([float(s), int(s), complex(s).real, bool(s), math.sqrt(s)]),
    "a list of scalars": lambda w, s: torch.tensor([s, s]),
    "format": lambda w, s: torch.tensor(float(f"{s.detach():.3f}")),
    "as an index": lambda w, s: torch.arange(9.0)[s.long()],
    "numpy": lambda w, s: torch.from_numpy(w.detach().numpy().copy()),
    "numpy by force": lambda w, s: torch.from_numpy(w.numpy(force=True).copy()),
    "np.array": lambda w, s: as_numpy(w.detach()),
    "np.asarray of a list": lambda w, s: as_numpy([s.detach(), s.detach()]),
    "np.from_dlpack": lambda w, s: torch.from_numpy(np.from_dlpack(w.detach()).copy()),
    "from_dlpack": lambda w, s: torch.from_dlpack(w.detach()).clone(),
    "the address": lambda w, s: torch.tensor(ctypes.c_float.from_address(w.data_ptr()).value),
    "storage": lambda w, s: torch.tensor(w.untyped_storage().tolist()[: w.nbytes]),
    "data": lambda w, s: w.data.clone(),
    "as_subclass": lambda w, s: w.as_subclass(torch.Tensor).detach().clone(),
    "as_tensor": lambda w, s: torch.as_tensor(w).detach().clone(),
    "membership": lambda w, s: torch.tensor([1.0 in w, 99.0 in w]),
    "rows": lambda w, s: torch.stack(list(w)).detach(),
    "largest": lambda w, s: torch.tensor([max(w.view(-1)), min(w.view(-1))]),
    "collate": lambda w, s: torch.utils.data.default_collate([w, w]).detach(),
    "foreach": lambda w, s: torch._foreach_add([w.detach()], 1.0)[0],
    "a slice assigned": lambda w, s: torch.zeros(2, 2, 2).index_copy(0, torch.tensor([1]), w.detach()[None]),
    "copy_": lambda w, s: torch.zeros(2, 2).copy_(w.detach()),
    "set_": lambda w, s: torch.zeros(0).set_(w.detach()).clone(),
    "equal": lambda w, s: torch.tensor([torch.equal(w, w.detach().clone()), torch.allclose(w, w)]),
    "saved": lambda w, s: saved_and_loaded(w),
    "autograd.Function": lambda w, s: Times.apply(w).detach(),
}


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class TwoParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.s = nn.Parameter(torch.tensor([[1.0, 2.0], [4.0, 8.0]])), nn.Parameter(torch.tensor(3.0))


def saved_and_loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False).detach()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_a_released_parameter_outside_of_any_forward(read):
    plain, model = TwoParameters(), zero3.shard(TwoParameters(), store=DistantStore())
    assert str(zero3.units(model)[0].state) == "SHARDED"
    assert torch.equal(read(model.w, model.s), read(plain.w, plain.s))


def test_memory_that_is_not_there_is_not_handed_out():
    """Routes on which torch asks no class, and which want memory to write or for any purpose (collectives do too)."""
    model = zero3.shard(TwoParameters(), store=DistantStore())
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(model.w)


def test_integers_that_are_not_there_look_like_none():
    class Integers(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.arange(4), requires_grad=False)

    model = zero3.shard(Integers(), store=DistantStore())
    assert torch.tensor(model.w).tolist() == [torch.iinfo(torch.int64).max] * 4
    assert model.w.tolist() == [0, 1, 2, 3]


def test_a_gather_inside_a_functional_transform_is_refused():
    _, model = TwoParameters(), zero3.shard(TwoParameters(), store=DistantStore())
    with pytest.raises(zero3.UnsupportedError, match=r"torch\.func.*zero3\.gathered"):
        torch.func.grad(lambda x: (x * model.s).sum())(torch.ones(2))
    with zero3.gathered(model):
        assert torch.func.grad(lambda x: (x * model.s).sum())(torch.ones(2)).tolist() == [3.0, 3.0]
