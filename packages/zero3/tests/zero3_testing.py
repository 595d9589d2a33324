"""What the tests of this package share: a store that is never resident, and plain training."""

from __future__ import annotations

import torch
import torch.distributed as dist

import zero3
from zero3.shard_store import InMemoryStore


class DistantStore(InMemoryStore):
    """Shards are never viewed in place, and nothing is torch's own: one rank goes through the whole machinery."""

    plain_gradients = False

    def __init__(self):
        super().__init__(torch.device("cpu"))

    def resident(self, unit):
        return None


def pair(make, **arguments):
    """(plain model, the same one partitioned): equal values to begin with."""
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    return plain, zero3.shard(make(), **arguments)


def parts(data, world):
    """The batch of each rank."""
    return data.chunk(world)


def plain_gradients(model, data, world=1):
    """Gradients of the plain model: each rank's on its part of the batch, then their mean. Returns (loss, grads)."""
    losses, sums = [], {}
    for part in parts(data, world):
        model.zero_grad()
        loss = model.loss(part)
        loss.backward()
        losses.append(loss.item())
        for name, param in model.named_parameters():
            if param.grad is not None:
                grad = param.grad.clone()
                sums[name] = grad if name not in sums else sums[name] + grad
    for name, param in model.named_parameters():
        param.grad = sums[name] / world if name in sums else None
    return losses, {name: grad.clone() for name, grad in gradients_of(model).items()}


def gradients_of(model):
    """A plain model's own gradients."""
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train_plain(model, steps, world=1, optimizer=adamw, size=4):
    """Plain training; returns (losses of every rank and step, final state)."""
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        losses.append(plain_gradients(model, model.data(step, size), world)[0])
        opt.step()
        opt.zero_grad()
    return losses, state_of(model)


def train_sharded(model, steps, rank=0, world=1, optimizer=adamw, size=4):
    """The ordinary loop on a partitioned model; returns (this rank's losses, final state)."""
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        loss = model.loss(parts(model.data(step, size), world)[rank])
        loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return losses, state_of(model)


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found, wanted):
    """Bit-equal tensors under the same names in the same order."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), f"{name} differs by {_difference(found[name], value)}"


def assert_close(found, wanted, relative=1e-5, floor=1e-8):
    """Largest difference at most `relative` of that tensor's largest entry, or `floor` of the largest of all."""
    assert list(found) == list(wanted)
    largest = max((value.abs().max().item() for value in wanted.values() if value.numel()), default=0.0)
    for name, value in wanted.items():
        if value.numel():
            bound = max(relative * value.abs().max().item(), floor * largest)
            assert _difference(found[name], value) <= bound, f"{name} differs by {_difference(found[name], value)}"


def _difference(one, other):
    return (one.detach().to(torch.complex128) - other.detach().to(torch.complex128)).abs().max().item()


def at_rest(model):
    """Nothing is gathered and nothing is in flight."""
    import zero3

    return all(str(unit.state) == "SHARDED" and unit.holds == 0 for unit in zero3.units(model))


def full_gradients(model):
    """Every parameter's whole gradient on every rank, by summing the ranks' pieces in place. Collective."""
    full = {}
    for name, param in model.named_parameters():
        grad = param.grad
        if grad is None:
            continue
        slot = getattr(param, "_zero3", None)
        if slot is None or slot.unit.plain or slot.unit.model.shard_ranks == 1:
            full[name] = grad.as_subclass(torch.Tensor).clone()
            continue
        whole = torch.zeros(slot.numel, dtype=grad.dtype)
        begin = slot.unit.rank * slot.unit.shard_numel + slot.start - slot.offset
        whole[begin : begin + grad.numel()] = grad.as_subclass(torch.Tensor).reshape(-1)
        dist.all_reduce(whole)
        full[name] = whole.view(slot.shape)
    return full


def one_and_two(ranks, function, *args):
    """The function on one rank here, with shards that are never resident, and on two ranks."""
    function(0, 1, *args)
    ranks(function, 2, *args)
