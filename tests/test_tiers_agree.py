"""The same numbers, bit for bit, wherever the states lie and whenever they move."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from zinf_testing import SETTINGS, config, full_states, make, train

import zinf
from zinf.config import OVERLAPS, TIERS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(cfg, steps, **settings):
    """Losses, and every master weight, moment and counter afterwards."""
    model = zinf.shard(make(), cfg)
    optimizer = zinf.AdamW(model.parameters(), **{**SETTINGS, **settings})
    return train(model, optimizer, steps), _bits(full_states(model))


def _bits(states):
    return {
        name: {
            kind: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for kind, value in of.items()
        }
        for name, of in states.items()
    }


@functools.cache
def in_memory(dtype, steps, **settings):
    """What everything in memory, fetched at need and updated inside step(), gives."""
    cfg = zinf.Config.preset("zero3", dtype=dtype, prefetch=False, overlap_optimizer=False, unit_size="3KiB")
    return run(cfg, steps, **settings)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no prefetch"])
@pytest.mark.parametrize("preset", ["zero3", "inf-cpu", "inf-nvme"])
def test_twenty_steps_on_every_preset(nvme, preset, prefetch, overlap, dtype):
    cfg = zinf.Config.preset(
        preset, nvme=[nvme], dtype=dtype, prefetch=prefetch, overlap_optimizer=overlap, unit_size="3KiB", resident=0
    )
    losses, states = run(cfg, 20)
    wanted_losses, wanted = in_memory(dtype, 20)
    assert losses == wanted_losses
    assert states == wanted


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("params", "grads", "optimizer"), list(itertools.product(TIERS, TIERS, TIERS)))
def test_every_placement(nvme, params, grads, optimizer, overlap):
    cfg = config(nvme, params, grads, optimizer, dtype=torch.bfloat16, overlap_optimizer=overlap)
    assert run(cfg, 4) == in_memory(torch.bfloat16, 4)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(
    "changes",
    [
        {"resident": None},
        {"resident": "40KiB"},
        {"device_memory": "16KiB"},
        {"device_memory": "24KiB"},
        {"device_memory": "1MiB"},
        {"checksum": False},
        {"unit_size": "auto"},
        {"unit_size": 0},
        {"unit_size": "1GiB"},
        {"host_memory": "64MiB"},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_budgets_and_settings_change_no_number(nvme, changes, overlap):
    cfg = config(nvme, grads=None, dtype=torch.bfloat16, overlap_optimizer=overlap, **changes)
    assert run(cfg, 6) == in_memory(torch.bfloat16, 6)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_states_that_stream_in_several_pieces(nvme, overlap, monkeypatch):
    for module in ("zinf.tiers.nvme", "zinf.offload_engine", "zinf.checkpoint_writer"):
        monkeypatch.setattr(f"{module}.PIECE", 2048)
    cfg = config(nvme, grads="nvme", dtype=torch.bfloat16, overlap_optimizer=overlap, unit_size="1GiB")
    assert run(cfg, 6) == in_memory(torch.bfloat16, 6)


@pytest.mark.parametrize("grads", TIERS)
def test_clipping_on_every_tier(nvme, grads):
    cfg = config(nvme, grads=grads, dtype=torch.bfloat16)
    assert run(cfg, 6, grad_clip=0.5) == in_memory(torch.bfloat16, 6, grad_clip=0.5)


def offload_with(rank, world, nvme, preset, dtype, overlap, steps):
    cfg = zinf.Config.preset(
        preset, nvme=[nvme], dtype=DTYPES[dtype], unit_size="3KiB", resident=0, overlap_optimizer=overlap
    )
    model = zinf.shard(make(), cfg)
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    return train(model, optimizer, steps, rank, world), _bits(full_states(model))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_ranks_on_every_preset(ranks, nvme, dtype):
    wanted = ranks(offload_with, 2, nvme, "zero3", dtype, False, 20)
    assert wanted[0][1] == wanted[1][1]
    for preset in ("ddp", "zero1", "zero2", "zero-offload"):
        assert ranks(offload_with, 2, nvme, preset, dtype, False, 20) == wanted, preset
    for preset, overlap in itertools.product(("inf-cpu", "inf-nvme"), OVERLAPS):
        assert ranks(offload_with, 2, nvme, preset, dtype, overlap, 20) == wanted, (preset, overlap)


IO_URING_FORBIDDEN = """
import sys, torch, zinf
from zinf_testing import config, offloaded, train
model, optimizer = offloaded(config(sys.argv[1], grads="nvme", dtype=torch.bfloat16))
losses = train(model, optimizer, 20)
print(zinf.report(model)["io"]["backend"], *(loss.hex() for loss in losses))
"""


def test_io_uring_forbidden_gives_the_same_losses(nvme, run_python):
    wanted = in_memory(torch.bfloat16, 20)[0]
    for forbidden in (["io_uring_setup=EPERM"], ["io_uring_setup=ENOSYS", "io_setup=ENOSYS"]):
        backend, *losses = run_python(IO_URING_FORBIDDEN, nvme, forbid=forbidden).split()
        assert backend != "io_uring"
        assert [float.fromhex(loss) for loss in losses] == wanted
