"""What cannot be written whole is named: every file that zinf writes through Python's own buffers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

import pytest
import torch
from zinf_testing import assert_same, config, full_states, make, offloaded, train

import zinf
from zinf.training.metrics import MetricsFile

LIMIT = 64 << 10


@contextlib.contextmanager
def file_size_limit(nbytes):
    """As a full drive: no file grows beyond so many bytes. What is mapped or on a swap file already stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def refused(name):
    with pytest.raises(OSError, match=name) as error:
        yield
    assert error.value.errno == errno.EFBIG


def test_the_buffers_of_a_checkpoint(nvme, tmp_path):
    small = make(width=4, layers=1)
    small.register_buffer("large", torch.ones(LIMIT))
    model = zinf.shard(small, config(nvme))
    optimizer = zinf.AdamW(model.parameters())
    train(model, optimizer, 1)
    folder = tmp_path / "run"
    first = zinf.save(folder, model, optimizer)
    states = full_states(model)
    train(model, optimizer, 1)
    with refused(r"tensors\.safetensors"), file_size_limit(LIMIT):
        zinf.save(folder, model, optimizer)
    assert [str(path) for path in folder.iterdir()] == [str(first.path)]
    zinf.load(folder, model, optimizer)
    assert_same(full_states(model), states)


def test_a_timeline(nvme, tmp_path):
    model, optimizer = offloaded(config(nvme))
    with contextlib.ExitStack() as limit, refused("timeline"), zinf.trace(model, tmp_path / "timeline.json"):
        train(model, optimizer, 20)
        limit.enter_context(file_size_limit(LIMIT))


def test_metrics(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with refused("metrics"), file_size_limit(LIMIT):
        metrics.write({"step": 1, "words": "x" * 2 * LIMIT})


def test_the_folder_of_a_checkpoint(nvme, tmp_path, monkeypatch):
    model, optimizer = offloaded(config(nvme))
    plain_fsync = os.fsync

    def fails_of_folders(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        plain_fsync(fd)

    monkeypatch.setattr(os, "fsync", fails_of_folders)
    with pytest.raises(OSError, match="checkpoint-000001"):
        zinf.save(tmp_path / "run", model, optimizer)
    assert not list((tmp_path / "run").iterdir())
