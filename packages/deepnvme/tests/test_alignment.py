"""Every byte arrives where it belongs, whatever the address, offset and length."""

from __future__ import annotations

import os

import numpy as np
import pytest

import deepnvme

LENGTHS = [1, 511, 512, 513, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (1 << 20) + 1]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shift", [0, 1, 64, 512])
def test_length_on_disk_is_the_arrays_and_memory_behind_it_is_untouched(io, tmp_path, noise, length, shift):
    path = tmp_path / "tensor"
    data = noise(length)
    assert io.write(path, data).wait() == length
    assert path.read_bytes() == data.tobytes()

    memory = deepnvme.empty(shift + length + 4096).numpy()
    memory[:] = 0xA5
    assert io.read(path, memory[shift : shift + length]).wait() == length
    assert memory[shift : shift + length].tobytes() == data.tobytes()
    assert (memory[:shift] == 0xA5).all()
    assert (memory[shift + length :] == 0xA5).all()


def test_half_precision_tensor_that_ends_inside_a_sector(backend, tmp_path):
    torch = pytest.importorskip("torch")
    tensor = torch.randn(14_412_000).half()
    path = tmp_path / "tensor"
    with deepnvme.Engine(backend, block_size="1MiB", queue_depth=8) as io:
        assert io.write(path, tensor).wait() == 28_824_000
        assert path.stat().st_size == 28_824_000
        back = torch.zeros_like(tensor)
        io.read(path, back).wait()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [0, 1, 512, 4095, 4096, 100_000])
def test_write_into_an_existing_file_keeps_the_rest(io, tmp_path, noise, offset, direct):
    path = tmp_path / "file"
    before = noise(300_001)
    path.write_bytes(before.tobytes())
    data = noise(50_003)
    with deepnvme.File(path, "r+", direct=direct) as file:
        io.write(file, data, offset).wait()
    expected = before.copy()
    expected[offset : offset + data.size] = data
    assert path.read_bytes() == expected.tobytes()


def test_length_becomes_the_larger_of_old_and_new_end(io, tmp_path, noise):
    path = tmp_path / "file"
    for offset, nbytes, length in [(0, 5000, 5000), (100, 10, 5000), (8192, 1, 8193), (1 << 21, 700_001, 2_797_153)]:
        io.write(path, noise(nbytes), offset).wait()
        assert path.stat().st_size == length
    assert path.read_bytes()[5000:8192] == bytes(3192)


def test_empty_array_creates_the_file_and_extends_it_to_the_offset(io, tmp_path):
    path = tmp_path / "file"
    assert io.write(path, np.empty(0, np.float32)).wait() == 0
    assert path.stat().st_size == 0
    assert io.write(path, np.empty(0, np.float32), 100).wait() == 0
    assert path.stat().st_size == 100
    assert io.read(path, np.empty(0, np.float32)).wait() == 0


def test_neighbours_that_share_pages_do_not_damage_each_other(io, tmp_path, noise):
    """Pieces of odd lengths, written at once in random order, tile the file exactly."""
    path = tmp_path / "file"
    data = noise(3_000_017)
    rng = np.random.default_rng(3)
    for _ in range(5):
        cuts = np.unique(np.concatenate([[0, data.size], rng.integers(0, data.size, 400)]))
        order = rng.permutation(len(cuts) - 1)
        data = noise(data.size)
        with deepnvme.File(path, "w") as file:
            for i in order:
                io.write(file, data[cuts[i] : cuts[i + 1]], int(cuts[i]))
            io.flush()
        assert path.read_bytes() == data.tobytes()


def test_aligned_transfers_copy_nothing(io, tmp_path):
    buffer = deepnvme.empty(8 << 20)
    path = tmp_path / "file"
    io.write(path, buffer).wait()
    io.read(path, buffer).wait()
    stats = io.stats()
    assert stats.direct is True
    assert (stats.bounced_bytes, stats.cached_bytes) == (0, 0)
    assert (stats.bytes_read, stats.bytes_written) == (8 << 20, 8 << 20)


def test_only_the_ends_bounce_when_address_and_offset_agree(io, tmp_path, noise):
    path = tmp_path / "file"
    path.write_bytes(noise(1 << 20).tobytes())
    memory = deepnvme.empty(1 << 20).numpy()
    io.read(path, memory[100 : (1 << 20) - 100], 100).wait()
    assert 0 < io.stats().bounced_bytes < 2 * 4096
    assert memory[100 : (1 << 20) - 100].tobytes() == path.read_bytes()[100 : (1 << 20) - 100]


def test_all_of_it_bounces_when_they_do_not(io, tmp_path, noise):
    path = tmp_path / "file"
    path.write_bytes(noise(1 << 20).tobytes())
    memory = deepnvme.empty((1 << 20) + 64).numpy()
    io.read(path, memory[64:]).wait()
    assert io.stats().bounced_bytes == 1 << 20
    assert memory[64:].tobytes() == path.read_bytes()


def test_more_unaligned_requests_than_bounce_buffers(backend, tmp_path, noise):
    path = tmp_path / "file"
    pieces = [noise(200_001) for _ in range(64)]
    with deepnvme.Engine(backend, bounce_buffers=4) as io, deepnvme.File(path, "w") as file:
        for i, piece in enumerate(pieces):
            io.write(file, piece, i * 200_001)
        assert io.flush() == 64
        back = [np.zeros(200_001, np.uint8) for _ in pieces]
        for i, out in enumerate(back):
            io.read(file, out, i * 200_001)
        assert io.flush() == 64
    assert all((a == b).all() for a, b in zip(pieces, back, strict=True))


@pytest.mark.parametrize("members", [1, 2, 3])
def test_striped_file_reads_back_and_its_members_hold_the_turns(io, tmp_path, noise, members):
    data = noise(1_000_003)
    paths = [tmp_path / f"member{i}" for i in range(members)]
    with deepnvme.File(paths, "w", stripe="64KiB") as file:
        io.write(file, data, 5000).wait()
        assert file.size == 1_005_003
        back = np.zeros_like(data)
        io.read(file, back, 5000).wait()
        assert (back == data).all()
    whole = bytes(5000) + data.tobytes()
    for i, path in enumerate(paths):
        turns = [whole[k : k + 65536] for k in range(i * 65536, len(whole), members * 65536)]
        assert path.read_bytes() == b"".join(turns) if members > 1 else whole
    assert sum(os.path.getsize(p) for p in paths) == 1_005_003
