"""torch.compile of an offloaded model: the numbers of the same model uncompiled."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import assert_same, config, offloaded, state_of, train

import zinf


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("overlap", ["next-forward", "backward"])
@pytest.mark.parametrize("changes", [{}, {"activations": "nvme"}, {"tile_bytes": 1024}], ids=["plain", "ckpt", "tiles"])
def test_training_on_nvme(nvme, changes, overlap):
    cfg = config(nvme, overlap_optimizer=overlap, **changes)
    eager, optimizer = offloaded(cfg)
    wanted = train(eager, optimizer, 3)
    model, optimizer = offloaded(cfg)
    model.compile(backend="eager")
    assert train(model, optimizer, 3) == wanted
    assert_same(state_of(model), state_of(eager))


def test_a_step_with_the_tiled_loss(nvme):
    model, _ = offloaded(config(nvme))

    def loss(tokens):
        hidden = model.norm(model.blocks[0](model.embedding(tokens)))
        return zinf.cross_entropy(hidden, model.head, tokens)

    tokens = model.data(0)
    assert torch.equal(torch.compile(loss, backend="eager")(tokens), loss(tokens))
