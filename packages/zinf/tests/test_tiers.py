"""A tensor that is put on a tier is what comes back, in parts too; the traffic is counted."""

from __future__ import annotations

import itertools

import pytest
import torch

import deepnvme
from zinf.spans import Spans
from zinf.tier_set import allocate_host, check_directories
from zinf.tiers import Key
from zinf.tiers.memory import MemoryTier
from zinf.tiers.nvme import NvmeTier


@pytest.fixture(params=["cpu", "nvme", "nvme without checksum"])
def tier(request, nvme):
    if request.param == "cpu":
        yield MemoryTier("cpu", allocate_host)
        return
    made = NvmeTier([str(nvme)], checksum=request.param == "nvme", spans=Spans())
    yield made
    made.close()
    assert list(nvme.iterdir()) == []


KEY = Key(0, "exp_avg")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int16, torch.complex64]
)
def test_a_round_trip_in_pieces(tier, dtype, small_pieces):
    numel = 3 * 4096 + 2048
    values = torch.arange(numel).to(dtype)
    tier.create(KEY, numel, dtype)
    out = torch.ones(numel, dtype=dtype)
    tier.start_read(KEY, out)()
    assert not out.any()  # fresh room is zeros
    tier.start_write(KEY, values)()
    tier.start_read(KEY, out)()
    assert torch.equal(out, values)
    for start, stop in itertools.pairwise((0, 4096, 3 * 4096, numel)):
        part = torch.empty(stop - start, dtype=dtype)
        tier.start_read(KEY, part, start)()
        assert torch.equal(part, values[start:stop])
    tier.start_write(KEY, -values[4096:8192], 4096)()
    tier.start_read(KEY, out)()
    assert torch.equal(out, torch.cat([values[:4096], -values[4096:8192], values[8192:]]))


def test_zeros_in_a_part(tier, small_pieces):
    numel = 3 * 4096 + 2048
    values = torch.arange(1, numel + 1).to(torch.int16)
    tier.create(KEY, numel, torch.int16)
    tier.start_write(KEY, values)()
    tier.start_clear(KEY, 4096, 4096)()
    tier.start_clear(KEY, 3 * 4096, 2048)()
    out = torch.empty(numel, dtype=torch.int16)
    tier.start_read(KEY, out)()
    assert torch.equal(out, torch.cat([values[:4096], torch.zeros_like(out[:4096]), values[8192:12288], out[12288:]]))
    assert not out[12288:].any()


def test_checksums_come_with_a_piece_and_go_with_it(nvme, small_pieces):
    tier = NvmeTier([str(nvme)], checksum=True, spans=Spans())
    values = torch.arange(2 * 4096.0)
    tier.create(KEY, values.numel(), torch.float32)
    known = deepnvme.crc32c(values[:4096])
    tier.start_write(KEY, values[:4096], 0, known)()
    tier.start_write(KEY, values[4096:], 4096, known)()  # of other bytes
    out = torch.empty(4096)
    read = tier.start_read(KEY, out)
    assert read.crc32c == known
    assert torch.equal(out, values[:4096])
    with pytest.raises(deepnvme.ChecksumError):
        tier.start_read(KEY, out, 4096)()
    tier.start_write(KEY, values, 0, known)()  # of both pieces together there is none
    whole = torch.empty(2 * 4096)
    read = tier.start_read(KEY, whole)
    read()
    assert read.crc32c is None
    assert torch.equal(whole, values)
    tier.close()


def test_writes_take_effect_in_order(tier):
    tier.create(KEY, 2048, torch.float32)
    waits = [tier.start_write(KEY, torch.full((2048,), float(number))) for number in range(20)]
    out = torch.empty(2048)
    tier.start_read(KEY, out)()
    assert (out == 19).all()
    for wait in waits:
        wait()


def test_room_is_counted_and_given_back(tier):
    tier.create(KEY, 4096, torch.float32)
    tier.create(KEY, 4096, torch.float32)
    tier.create(Key(1, "param"), 2048, torch.bfloat16)
    assert tier.nbytes == 4096 * 4 + 2048 * 2
    tier.create(KEY, 2048, torch.float32)  # another size replaces it
    assert tier.nbytes == 2048 * 4 + 2048 * 2
    tier.free(KEY)
    tier.free(KEY)
    assert tier.nbytes == 2048 * 2


def test_what_was_put_is_dropped_once_and_what_was_not_is_no_error(tier):
    values = torch.arange(4096.0)
    tier.start_put(KEY, values)()
    out = torch.empty(4096)
    tier.start_get(KEY, out)()
    assert torch.equal(out, values)
    tier.drop(KEY)
    tier.drop(KEY)
    tier.drop(Key(1, "activation"))
    with pytest.raises(KeyError):
        tier.start_get(KEY, out)()


def test_traffic_by_kind(nvme):
    tier = NvmeTier([str(nvme)], checksum=True, spans=Spans())
    for kind in ("param", "grad", "exp_avg", "remainder"):
        tier.create(Key(0, kind), 2048, torch.float32)
        tier.start_write(Key(0, kind), torch.zeros(2048))()
    tier.start_read(Key(0, "param"), torch.zeros(2048))()
    traffic = tier.take_traffic()
    assert traffic.written == {"parameters": 8192, "gradients": 8192, "optimizer": 16384}
    assert traffic.read == {"parameters": 8192}
    assert tier.moved == 4 * 8192 + 32768 + 8192  # room is made by writing zeros
    assert tier.take_traffic().written == {}
    tier.close()


def test_directories_are_checked(tmp_path):
    from zinf.errors import ConfigError

    check_directories([str(tmp_path)])
    with pytest.raises(ConfigError, match="does not exist"):
        check_directories([str(tmp_path), str(tmp_path / "no")])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file' is no directory"):
        check_directories([str(tmp_path / "file")])
