"""Fixtures of this package. Test files are imported one by one, so what they share is put on the path here."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

from zero3.buffer_pool import BufferPool
from zero3.testing import RankPools

sys.path.insert(0, str(Path(__file__).parent))

# A shell starts background jobs with SIGINT ignored, and their children inherit that: the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

torch.set_num_threads(1)  # tiny models: threads only wait for one another


@pytest.fixture(scope="session")
def _pools():
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(_pools):
    """Run `function(rank, world, *args)` on `world` gloo ranks; returns the results; failures' text wins."""
    return _pools.run


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch):
    """Gathered memory is filled with NaN when it is given back: a view that outlived its unit shows."""
    give_back = BufferPool.give_back

    def poisoning(self, buffer):
        if not buffer.viewed_elsewhere():
            buffer.storage.fill_(255)
        give_back(self, buffer)

    monkeypatch.setattr(BufferPool, "give_back", poisoning)
