"""Fixtures of the whole's tests. What they share with the packages' own tests is put on the path here."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

PACKAGES = Path(__file__).parent.parent / "packages"
sys.path[:0] = [str(Path(__file__).parent), str(PACKAGES / "zinf" / "tests"), str(PACKAGES / "zero3" / "tests")]

from zinf_ranks import RankPools
from zinf_testing import run_script

# A shell starts background jobs with SIGINT ignored, and their children inherit that: the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
def _same_seed_one_thread():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small models; several processes share the cores


@pytest.fixture
def nvme(tmp_path):
    """A directory for the tier nvme."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@pytest.fixture
def run_python(tmp_path):
    """Run a script in a fresh interpreter, in tmp_path; returns what it printed. See zinf_testing.run_script."""

    def run(script: str, *arguments, **options) -> str:
        return run_script(script, *arguments, folder=tmp_path, **options)

    return run
