"""shard() of what is sharded already: the whole model again, and what would leave two models in charge of a unit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zinf_testing import EVERYWHERE, SETTINGS, Block, assert_same, config, make, offloaded, plain, state_of, train

import zinf
from zinf.config import OVERLAPS


@pytest.mark.parametrize(("params", "tier"), EVERYWHERE)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_the_optimizer_of_before_says_that_it_has_no_charge(nvme, overlap, params, tier):
    """Its step() changed nothing, in silence. What it owed is done ahead of the new partition."""
    cfg = config(nvme, params, optimizer=tier, overlap_optimizer=overlap)
    model, optimizer = offloaded(cfg)
    twin, twins = offloaded(cfg)
    train(model, optimizer, 2)
    train(twin, twins, 2)
    model.blocks.append(Block(16))
    zinf.shard(model, cfg)
    found = {name: value for name, value in state_of(model).items() if not name.startswith("blocks.3")}
    assert_same(found, state_of(twin))
    with pytest.raises(RuntimeError, match="sharded again"):
        train(model, optimizer, 1)
    optimizer.zero_grad()
    train(model, zinf.AdamW(model.parameters(), **SETTINGS), 2)


class Around(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(("params", "tier"), EVERYWHERE)
@pytest.mark.parametrize("other", [lambda model: model.blocks[1], Around], ids=["a part", "what it is a part of"])
def test_a_part_or_what_it_is_a_part_of_is_refused_by_name(nvme, other, params, tier):
    """On a drive it ended in a KeyError; in memory the parts' optimizers stepped nothing."""
    cfg = config(nvme, params, optimizer=tier)
    model, optimizer = offloaded(cfg)
    reference, plain_optimizer = plain()
    losses = train(model, optimizer, 2)
    with pytest.raises(ValueError, match=r"parameter (norm|inner\.embedding)\.weight is one of another model"):
        zinf.shard(other(model), cfg)
    losses += train(model, optimizer, range(2, 4))
    assert losses == pytest.approx(train(reference, plain_optimizer, 4), rel=1e-5)


def test_a_part_that_was_sharded_cannot_be_built_into_another(nvme):
    cfg = config(nvme)
    with pytest.raises(ValueError, match="shard the whole"), zinf.init(cfg):
        _whole = Around(zinf.shard(make(), cfg))


def test_no_optimizer_is_made_while_the_model_is_built(nvme):
    with zinf.init(config(nvme)):
        model = make()
        with pytest.raises(RuntimeError, match="behind that block"):
            zinf.AdamW(model.parameters())
    train(model, zinf.AdamW(model.parameters()), 1)


@pytest.mark.parametrize("given", [None, "inf-nvme", {"params": "cpu"}, zinf.Config])
def test_what_is_no_config_is_refused(given):
    with pytest.raises(TypeError, match=r"expected a zinf\.Config"):
        zinf.shard(make(), given)
    with pytest.raises(TypeError, match=r"expected a zinf\.Config"), zinf.init(given):
        pass
