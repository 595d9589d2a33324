"""Named tensors come back bit for bit, or not at all."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import types

import numpy as np
import pytest

import deepnvme

torch = pytest.importorskip("torch")

SPECIAL = [float("nan"), 0.0, -0.0, float("inf"), -float("inf"), 1e-45, 5e-324, 1.5, -2.25]


@pytest.fixture
def swap(tmp_path):
    with deepnvme.Swap(tmp_path) as s:
        yield s


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(9,), (3, 3), (), (0,), (4, 0, 2)])
def test_dtype_shape_and_bits_are_kept(swap, dtype, shape):
    numel = int(np.prod(shape))
    tensor = torch.tensor((SPECIAL * 2)[:numel] if dtype.is_floating_point else range(numel)).to(dtype).reshape(shape)
    swap.put("tensor", tensor).wait()
    back = swap.get("tensor").result()
    assert (back.torch().dtype, back.torch().shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(bits(back.torch()), bits(tensor))
    assert swap.nbytes == numel * dtype.itemsize
    assert os.stat(swap.path).st_size >= swap.nbytes


@pytest.mark.parametrize("make", [lambda t: t.t(), lambda t: t[::2], lambda t: t[:1].expand(5, -1), lambda t: t[3]])
def test_non_contiguous_tensor_keeps_its_values(swap, make):
    tensor = make(torch.randn(30, 40).bfloat16())
    swap.put("tensor", tensor).wait()
    assert torch.equal(swap.get("tensor").result().torch(), tensor)
    array = make(np.arange(1200.0).reshape(30, 40)) if not hasattr(make(tensor), "t") else np.arange(1200.0)[::3]
    swap.put("array", array).wait()
    assert (swap.get("array").result().numpy() == array).all()


def test_into_an_array_of_ones_own(swap):
    tensor = torch.randn(1000).bfloat16()
    swap.put("tensor", tensor)
    out = torch.zeros(1000, dtype=torch.bfloat16)
    assert swap.get("tensor", out).result() is out
    assert torch.equal(out, tensor)
    with pytest.raises(ValueError, match="'tensor' has 2000 bytes, `out` has 1998"):
        swap.get("tensor", out[:-1])


def test_operations_on_one_name_run_in_call_order(swap):
    arrays = [np.full(500_000, i, np.int32) for i in range(12)]
    gets = []
    for array in arrays:
        swap.put("name", array)
        gets.append(swap.get("name"))
    for i, get in enumerate(gets):
        assert (get.result().numpy() == i).all()


def test_names_and_removal(swap):
    swap.put("a", np.zeros(10))
    swap.put("b", np.zeros(20))
    assert swap.names() == ["a", "b"]
    assert "a" in swap
    assert "c" not in swap
    assert (len(swap), swap.nbytes) == (2, 240)
    swap.pop("a")
    assert (swap.names(), swap.nbytes) == (["b"], 160)
    for use in (swap.get, swap.pop):
        with pytest.raises(KeyError, match="a"):
            use("a")


def test_room_is_used_again_and_overwritten_in_place(swap):
    for turn in range(10):
        for i in range(4):
            swap.put(f"tensor{i}", np.full(1 << 18, turn * i, np.float32))
    assert swap._extents.end == 4 << 20
    for _ in range(10):
        swap.put("other", np.zeros(1 << 18, np.float32)).wait()
        swap.pop("other")
    assert swap._extents.end == 5 << 20


def test_room_of_what_gave_way_to_nothing_is_used_again(tmp_path):
    with deepnvme.Swap(tmp_path, capacity="1MiB") as swap:
        for turn in range(3):
            swap.put("a", np.full(1 << 20, turn, np.uint8)).wait()
            assert swap.get("a").result().numpy()[0] == turn
            swap.put("a", np.zeros(0, np.uint8)).wait()
            assert swap.get("a").result().shape == (0,)
        swap.put("b", np.full(1 << 20, 5, np.uint8)).wait()
        assert (swap.get("b").result().numpy() == 5).all()


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">u2"])
def test_the_byte_order_of_another_machine_is_refused(swap, dtype):
    # A Buffer has no such thing: its numbers would come back as others.
    foreign = np.arange(5).astype(dtype)
    for array in (foreign, foreign[::-1], memoryview(foreign)):
        with pytest.raises(ValueError, match="byte order"):
            swap.put("x", array)
    with pytest.raises(ValueError, match="byte order"):
        deepnvme.empty(5, dtype)
    assert swap.names() == []
    swap.put("x", foreign.astype(foreign.dtype.newbyteorder("="))).wait()
    assert np.array_equal(swap.get("x").result().numpy(), foreign)
    swap.put("one byte", np.arange(5).astype(">u1")).wait()


def test_sparse_tensor_is_refused_in_words(swap):
    with pytest.raises(TypeError, match="layout"):
        swap.put("x", torch.eye(3).to_sparse())


def test_room_that_is_still_being_read_is_not_given_away(tmp_path):
    with deepnvme.Swap(tmp_path, capacity="8MiB") as swap:
        first = np.full(8 << 20, 1, np.uint8)
        for turn in range(8):
            swap.put("a", first).wait()
            get = swap.get("a")
            swap.pop("a")
            swap.put("b", np.full(8 << 20, 2, np.uint8))
            assert (get.result().numpy() == 1).all(), turn
            swap.pop("b")


def test_capacity_is_reserved_and_not_exceeded(tmp_path):
    with deepnvme.Swap(tmp_path, capacity="4MiB") as swap:
        assert os.stat(swap.path).st_blocks * 512 >= 4 << 20
        swap.put("a", np.zeros(3 << 20, np.uint8)).wait()
        with pytest.raises(OSError, match="'b' of 2097152 bytes does not fit") as failure:
            swap.put("b", np.zeros(2 << 20, np.uint8))
        assert failure.value.errno == errno.ENOSPC
        assert "b" not in swap
        with pytest.raises(OSError, match="does not fit"):
            swap.put("a", np.ones(5 << 20, np.uint8))
        assert (swap.get("a").result().numpy() == 0).all()


def test_space_is_private_and_nothing_is_left(tmp_path):
    with deepnvme.Swap(tmp_path) as swap:
        swap.put("a", np.ones(1 << 20))
        status = os.stat(swap.path)
        assert status.st_mode & 0o777 == 0o600
        assert status.st_nlink == 0
        path = swap.path
    assert list(tmp_path.iterdir()) == []
    assert not os.path.exists(path)
    swap.close()
    with pytest.raises(deepnvme.ClosedError):
        swap.put("a", np.ones(1))


@pytest.mark.parametrize("position", [0, 1, 2_000_000, 3_999_999])
def test_one_damaged_byte_is_found_and_the_tensor_named(swap, position, rng):
    for name in ("good", "bad"):
        swap.put(name, rng.integers(0, 256, 4_000_000, dtype=np.uint8)).wait()
    start = swap._stored["bad"].start
    with open(swap.path, "r+b", buffering=0) as space:
        space.seek(start + position)
        byte = space.read(1)
        space.seek(start + position)
        space.write(bytes([byte[0] ^ 1]))
    swap.get("good").wait()
    for end in (lambda r: r.wait(), lambda r: r.result()):
        with pytest.raises(deepnvme.ChecksumError, match="tensor 'bad' is damaged") as failure:
            end(swap.get("bad"))
    assert failure.value.errno == errno.EIO
    assert failure.value.name == "bad"


def test_without_checksums_damage_is_not_looked_for(tmp_path):
    with deepnvme.Swap(tmp_path, checksum=False) as swap:
        swap.put("a", np.zeros(10_000, np.uint8)).wait()
        with open(swap.path, "r+b") as space:
            space.write(b"\x01")
        assert swap.get("a").result().numpy()[0] == 1


def test_checksums_travel_with_the_bytes(tmp_path, rng):
    values = rng.integers(0, 256, 100_001, dtype=np.uint8)
    known = deepnvme.crc32c(values)
    with deepnvme.Swap(tmp_path) as swap:
        assert swap.put("taken", values).crc32c == known
        assert swap.put("given", values, crc32c=known).crc32c == known
        for name in ("taken", "given"):
            get = swap.get(name)
            assert get.crc32c == known, name
            assert (get.result().numpy() == values).all()
        assert swap.put("overwritten", values, crc32c=known).wait() == values.nbytes
        assert swap.put("overwritten", values[:50_000]).crc32c == deepnvme.crc32c(values[:50_000])
        assert swap.get("overwritten").crc32c == deepnvme.crc32c(values[:50_000])


def test_bytes_that_were_damaged_before_they_were_put_are_found(tmp_path, rng):
    values = rng.integers(0, 256, 100_001, dtype=np.uint8)
    known = deepnvme.crc32c(values)
    values[77_777] ^= 4
    with deepnvme.Swap(tmp_path) as swap:
        swap.put("damaged", values, crc32c=known).wait()
        with pytest.raises(deepnvme.ChecksumError, match="tensor 'damaged'"):
            swap.get("damaged").wait()
        with pytest.raises(deepnvme.ChecksumError, match="tensor 'damaged'"):
            _ = swap.get("damaged").crc32c


@pytest.mark.parametrize(
    ("wrong", "error"), [("1", TypeError), (0.5, TypeError), (-1, ValueError), (1 << 32, ValueError)]
)
def test_a_checksum_that_is_none_is_refused_and_nothing_is_stored(tmp_path, wrong, error):
    with deepnvme.Swap(tmp_path) as swap:
        with pytest.raises(error, match="crc32c must"):
            swap.put("a", np.ones(10, np.uint8), crc32c=wrong)
        assert "a" not in swap


def test_a_swap_without_checksums_has_none_to_tell(tmp_path):
    values = np.ones(10_000, np.uint8)
    with deepnvme.Swap(tmp_path, checksum=False) as swap:
        assert swap.put("a", values).crc32c is None
        swap.put("b", values, crc32c=1).wait()
        get = swap.get("b")
        assert (get.result().numpy() == 1).all()
        assert get.crc32c is None


@pytest.mark.parametrize("shift", [0, 1, 64])
@pytest.mark.parametrize("nbytes", [1, 4096, 3 * 16_384 + 5, 1_000_001, 5 << 20])
def test_checksum_of_any_route(tmp_path, rng, nbytes, shift):
    """Direct, bounced and cached pieces add up to one checksum: that of the bytes."""
    memory = deepnvme.empty(nbytes + shift).numpy()
    memory[:] = rng.integers(0, 256, memory.size, dtype=np.uint8)
    with deepnvme.Swap([tmp_path, tmp_path], stripe="64KiB") as swap:
        put = swap.put("a", memory[shift:])
        put.wait()
        assert put._core.crc() == deepnvme.crc32c(memory[shift:])
        out = deepnvme.empty(nbytes + 64).numpy()[64 - shift :][:nbytes]
        assert (swap.get("a", out).result() == memory[shift:]).all()


def test_tensors_of_several_threads(swap):
    import concurrent.futures

    def work(seed: int) -> bool:
        array = np.random.default_rng(seed).integers(0, 99, 100_000)
        for _ in range(10):
            swap.put(f"t{seed}", array)
            if not (swap.get(f"t{seed}").result().numpy() == array).all():
                return False
            swap.pop(f"t{seed}")
        return True

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(12)))
    assert swap.names() == []


def test_copies_are_refused(swap):
    swap.put("a", np.ones(10)).wait()
    for thing in (swap, swap._engine):
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                duplicate(thing)
    assert (swap.get("a").result().numpy() == 1).all()


@pytest.mark.parametrize("drives", [1, 2])
def test_others_keep_room_on_a_small_drive(tmp_path, monkeypatch, drives):
    """What is reserved ahead is a small part of what is free; at the end it is what is needed."""
    free = [300 << 20]
    reserved = [0]

    class SmallDrive:
        def filenos(self):
            return list(range(drives))

        def reserve(self, nbytes):
            if nbytes - reserved[0] > free[0]:
                return errno.ENOSPC, "reserving", "path", 0, nbytes, 0, ""
            free[0] -= max(nbytes - reserved[0], 0)
            reserved[0] = max(nbytes, reserved[0])
            return None

    monkeypatch.setattr(os, "fstatvfs", lambda _: types.SimpleNamespace(f_bavail=free[0] // 4096, f_frsize=4096))
    with deepnvme.Swap([tmp_path] * drives) as swap, monkeypatch.context() as drive:
        drive.setattr(swap._file, "_open_core", SmallDrive)
        swap._reserve_up_to(4096)
        assert free[0] >= 280 << 20
        for used in range(1 << 20, 301 << 20, 1 << 20):
            swap._reserve_up_to(used)
        with pytest.raises(OSError, match="No space left") as full:
            swap._reserve_up_to(301 << 20)
        assert full.value.errno == errno.ENOSPC


def test_shared_engine(tmp_path):
    with deepnvme.Engine("threads") as io, deepnvme.Swap(tmp_path, engine=io) as swap:
        swap.put("a", np.ones(10)).wait()
        assert io.stats().requests == 1
    with deepnvme.Engine() as io:
        deepnvme.Swap(tmp_path, engine=io).close()
        assert io.flush() == 0
