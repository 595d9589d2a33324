"""All-gather and reduce-scatter of flat tensors: values, identity, and bytes on the wire."""

from __future__ import annotations

import pytest
import torch
from zero3_models import SmallGPT
from zero3_testing import parts

import zero3
from zero3 import collectives
from zero3.collectives import Ranks


def gathered(rank, world, dtype):
    ranks = Ranks()
    whole = torch.arange(6 * world).to(dtype)
    flat = torch.zeros_like(whole)
    own = flat[6 * rank : 6 * rank + 6]
    own.copy_(whole[6 * rank : 6 * rank + 6])
    collectives.all_gather(ranks, flat, own, tag=1, what="a test")()
    assert torch.equal(flat, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_rank_gets_every_shard_whatever_the_dtype(ranks, dtype):
    ranks(gathered, 2, dtype)


def reduced(rank, world):
    """A narrow wire is summed in float32, in the order of the ranks."""
    ranks = Ranks()
    each = [torch.randn(8 * world, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world)]
    wait = collectives.reduce_scatter(
        ranks, each[rank].clone(), lambda numel: torch.empty(numel, dtype=torch.bfloat16), tag=1, what="a test"
    )
    total = each[0].float()
    for other in each[1:]:
        total = total + other.float()
    mine = (total / world)[8 * rank : 8 * rank + 8]
    found = wait()
    assert found.dtype == torch.float32
    assert torch.equal(found, mine)


def test_the_mean_of_narrow_gradients_is_exact_to_the_order_of_ranks(ranks):
    ranks(reduced, 2)
    ranks(reduced, 3)


def in_other_order(rank, world):
    """Two units of one size, gathered in another order on each rank: every message finds its unit."""
    ranks = Ranks()
    flats = {tag: torch.full((2, 4), -1.0) for tag in (1, 2)}
    waits = []
    for tag in (1, 2) if rank == 0 else (2, 1):
        flats[tag][rank] = 10 * tag + rank
        waits.append(collectives.all_gather(ranks, flats[tag].view(-1), flats[tag][rank], tag, "a test"))
    for wait in waits:
        wait()
    for tag, flat in flats.items():
        assert torch.equal(flat, torch.tensor([[10.0 * tag] * 4, [10.0 * tag + 1] * 4]))


def test_messages_carry_their_units_identity(ranks):
    ranks(in_other_order, 2)


def on_the_wire(rank, world):
    """Bytes sent in one step: each unit is gathered for forward and for backward, and reduced once."""
    model = zero3.shard(SmallGPT())
    sent = {0: 0, 1: 0}  # gathers, reductions
    send = Ranks.send

    def counting(self, tensor, to, tag):
        sent[tag % 2] += tensor.nbytes
        return send(self, tensor, to, tag)

    Ranks.send = counting
    try:
        model.loss(parts(model.data(0), world)[rank]).backward()
        assert model.norm.weight.grad is not None
    finally:
        Ranks.send = send
    shards = sum(unit.shard_numel * 4 for unit in zero3.units(model)) * (world - 1)
    assert sent[1] <= shards
    assert sent[0] <= 2 * shards


def test_a_step_sends_two_gathers_and_one_reduction(ranks):
    ranks(on_the_wire, 2)
