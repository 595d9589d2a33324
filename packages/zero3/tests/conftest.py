"""Fixtures of this package. Test files are imported one by one, so what they share is put on the path here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from zero3_testing import RankPools

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
