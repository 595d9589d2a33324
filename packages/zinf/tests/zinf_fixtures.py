"""Fixtures of this package's tests and of the whole's: ranks, a drive, a fresh interpreter."""

from __future__ import annotations

import signal

import pytest
import torch
from zinf_testing import run_script

from zero3.testing import RankPools

# A shell starts background jobs with SIGINT ignored, and their children inherit that: the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def rank_pools():
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(rank_pools):
    """Run `function(rank, world, *args)` on `world` gloo ranks; returns the results; failures' text wins."""

    def run(function, world, *args, **options):
        if world == 1:  # this process will do
            return [function(0, 1, *args)]
        return rank_pools.run(function, world, *args, **options)

    return run


@pytest.fixture(autouse=True)
def same_seed_one_thread():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small models; several processes share the cores


@pytest.fixture
def nvme(tmp_path):
    """A directory for the tier nvme."""
    folder = tmp_path / "nvme"
    folder.mkdir()
    return folder


@pytest.fixture
def small_pieces(monkeypatch):
    """Units of a few thousand elements stream in several pieces, as large ones do."""
    for module in ("zinf.tiers.nvme", "zinf.offload_engine", "zinf.checkpoint_writer", "zinf.ring_copy"):
        monkeypatch.setattr(f"{module}.PIECE", 4096)


@pytest.fixture
def run_python(tmp_path):
    """Run a script in a fresh interpreter, in tmp_path; returns what it printed. See zinf_testing.run_script."""

    def run(script: str, *arguments, **options) -> str:
        return run_script(script, *arguments, folder=tmp_path, **options)

    return run


__all__ = ["nvme", "rank_pools", "ranks", "run_python", "same_seed_one_thread", "small_pieces"]
