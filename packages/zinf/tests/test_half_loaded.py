"""A load that fails half-way: values of two sources are never taken for one model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from zinf_testing import EVERYWHERE, assert_same, config, full_states, offloaded, state_of, train

import zinf
from zinf.config import OVERLAPS


def damage(file: Path, at: int) -> None:
    with open(file, "r+b") as bytes_of:
        bytes_of.seek(at)
        changed = bytes_of.read(1)[0] ^ 1
        bytes_of.seek(at)
        bytes_of.write(bytes([changed]))


@pytest.mark.parametrize(("params", "optimizer"), EVERYWHERE)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_of_a_damaged_checkpoint_a_whole_one_helps(nvme, tmp_path, overlap, params, optimizer):
    cfg = config(nvme, params, optimizer=optimizer, overlap_optimizer=overlap)
    model, adamw = offloaded(cfg)
    train(model, adamw, 2)
    whole = zinf.save(tmp_path / "run", model, adamw).path
    wanted = train(model, adamw, range(2, 4))
    damaged = Path(shutil.copytree(whole, tmp_path / "damaged"))
    damage(damaged / "rank-0.bin", os.path.getsize(damaged / "rank-0.bin") // 2)

    model, adamw = offloaded(cfg, seed=3)
    train(model, adamw, 1)
    with pytest.raises(zinf.CheckpointError, match="damaged"):
        zinf.load(damaged, model, adamw)
    with torch.no_grad(), pytest.raises(zinf.CheckpointError, match=str(damaged)):
        model(model.data(0))
    with pytest.raises(zinf.CheckpointError, match="half-way"):
        train(model, adamw, 1)
    with pytest.raises(zinf.CheckpointError, match="half-way"):
        zinf.save(tmp_path / "run", model, adamw)
    with pytest.raises(zinf.CheckpointError, match="half-way"):
        zinf.export(model, tmp_path / "export")
    zinf.load(tmp_path / "run", model, adamw)
    assert train(model, adamw, range(2, 4)) == wanted


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_file_that_cannot_be_opened_changes_nothing(nvme, tmp_path, monkeypatch, overlap):
    """Nor is an update forgotten that was committed, and has not run."""
    cfg = config(nvme, overlap_optimizer=overlap)
    twin, twins = offloaded(cfg)
    train(twin, twins, 2)
    model, adamw = offloaded(cfg)
    path = zinf.save(tmp_path, model, adamw).path
    train(model, adamw, 2)

    def no_permission(file, *_, **__):
        raise PermissionError(13, "Permission denied", str(file))

    with monkeypatch.context() as patch:
        patch.setattr("zinf.checkpoint_files.deepnvme.File", no_permission)
        with pytest.raises(PermissionError, match=r"rank-0\.bin"):
            zinf.load(path, model, adamw)
    assert_same(full_states(model), full_states(twin))
    assert train(model, adamw, range(2, 4)) == train(twin, twins, range(2, 4))


def test_of_weights_the_same_weights_help(nvme, tmp_path, monkeypatch):
    source, _ = offloaded(config(nvme))
    zinf.export(source, tmp_path)
    model, adamw = offloaded(config(nvme), seed=3)

    def fails(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("zinf.offload_engine.OffloadEngine.start_clear", fails)
        patch.setattr("zinf.offload_engine.OffloadEngine.start_write", fails)
        with pytest.raises(OSError, match="Input/output"):
            zinf.load_pretrained(model, tmp_path)
    with pytest.raises(zinf.CheckpointError, match=str(tmp_path)):
        train(model, adamw, 1)
    zinf.load_pretrained(model, tmp_path)
    assert_same(state_of(model), state_of(source))
    train(model, adamw, 1)


def test_weights_do_not_make_up_for_a_damaged_checkpoint(nvme, tmp_path):
    """They bring no moments."""
    source, sources = offloaded(config(nvme))
    train(source, sources, 2)
    path = Path(zinf.save(tmp_path / "run", source, sources).path)
    zinf.export(source, tmp_path / "weights")
    damage(path / "rank-0.bin", os.path.getsize(path / "rank-0.bin") // 2)
    model, adamw = offloaded(config(nvme), seed=3)
    with pytest.raises(zinf.CheckpointError, match="damaged"):
        zinf.load(path, model, adamw)
    zinf.load_pretrained(model, tmp_path / "weights")
    with pytest.raises(zinf.CheckpointError, match="half-way"):
        train(model, adamw, 1)
