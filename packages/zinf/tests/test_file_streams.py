"""Files read ahead and written behind, against the bytes that Python itself reads and writes."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

import deepnvme
from zinf import read_ahead, sequential_file
from zinf.errors import CheckpointError
from zinf.read_ahead import ReadAhead, Stretch
from zinf.safetensors_file import Entry, SafetensorsFile, header
from zinf.sequential_file import SequentialFile, as_bytes

CHANCE = random.Random(5)
CONTENT = CHANCE.randbytes(300_000)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "content").write_bytes(CONTENT)
    with deepnvme.File(tmp_path / "content", "r") as opened:
        yield opened


def stretches(file, count, most):
    starts = [CHANCE.randrange(len(CONTENT) - most) for _ in range(count)]
    return [Stretch(file, start, CHANCE.randrange(1, most)) for start in starts]


def test_stretches_come_in_any_order_whatever_was_foretold(file, monkeypatch):
    monkeypatch.setattr(read_ahead, "_MOST_AHEAD", 3)
    wanted = stretches(file, 60, 20_000)
    for foretold in (wanted, [], wanted[::2], wanted[::-1], stretches(file, 9, 50)):
        with ReadAhead(foretold) as ahead:
            for stretch in [*wanted, *wanted[:5]]:
                content, _ = ahead.get(stretch)
                end = stretch.file_offset + stretch.nbytes
                assert content.numpy().tobytes() == CONTENT[stretch.file_offset : end]


def test_what_was_just_read_is_not_read_again(file):
    (stretch,) = stretches(file, 1, 100)
    with ReadAhead([stretch, stretch], checksum=True) as ahead:
        content, crc32c = ahead.get(stretch)
        assert crc32c == deepnvme.crc32c(content)
        assert ahead.get(stretch)[1] is None


def test_buffers_are_used_again(file, monkeypatch):
    made = []
    monkeypatch.setattr(read_ahead.deepnvme, "empty", lambda *a, make=deepnvme.empty: made.append(a) or make(*a))
    wanted = [Stretch(file, start, 1000) for start in range(0, 250_000, 1000)]
    with ReadAhead(wanted) as ahead:
        for stretch in wanted:
            ahead.get(stretch)
    assert len(made) <= read_ahead._MOST_AHEAD + read_ahead._KEPT + 1


def test_a_file_that_is_too_short_is_an_error_when_it_is_asked_for(file):
    beyond = Stretch(file, len(CONTENT) - 10, 100)
    good = Stretch(file, 0, 100)
    with ReadAhead([good, beyond]) as ahead:
        ahead.get(good)
        with pytest.raises(OSError, match="content"):
            ahead.get(beyond)
    with ReadAhead([good, beyond]) as ahead:
        ahead.get(good)  # nobody asks for the other


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 300_000])
def test_a_file_holds_what_was_written_one_after_the_other(tmp_path, monkeypatch, nbytes):
    monkeypatch.setattr(sequential_file, "_BUFFER_BYTES", 8192)
    file = SequentialFile(tmp_path / "out", nbytes)
    start = 0
    while start < nbytes:
        stop = min(start + CHANCE.randrange(1, 30_000), nbytes)
        file.write(as_bytes(CONTENT[start:stop]))
        start = stop
    file.finish()
    assert (tmp_path / "out").read_bytes() == CONTENT[:nbytes]


def test_headers_are_what_safetensors_reads(tmp_path):
    tensors = {
        "matrix": torch.arange(6, dtype=torch.float32).view(2, 3),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
    }
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    content = b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    (tmp_path / "ours").write_bytes(header(entries) + content)
    found = load_file(tmp_path / "ours")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in tensors.items())
    save_file(tensors, tmp_path / "theirs")
    for name in ("ours", "theirs"):
        with SafetensorsFile(tmp_path / name) as file, ReadAhead() as ahead:
            assert sorted(file.names) == sorted(tensors)
            assert file.shape("matrix") == (2, 3)
            part, _ = ahead.get(file.stretch("matrix", 2, 5))
            assert read_ahead.as_elements(part, file.dtype("matrix")).tolist() == [2, 3, 4]


def test_a_damaged_header_is_named(tmp_path):
    save_file({"a": torch.zeros(9)}, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    for damaged in (b"", content[:20], b"\xff" * 8 + content[8:], content[:-1]):
        (tmp_path / "file").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="file is damaged"):
            SafetensorsFile(tmp_path / "file")
