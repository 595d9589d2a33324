"""crc32c against published values and the definition, by every kernel of this CPU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepnvme
from deepnvme import _core

KERNELS = _core.crc32c_kernels()


def by_definition(data: bytes) -> int:
    """Long division, one bit at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


# RFC 3720, B.4
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_published_values(data, crc):
    assert by_definition(data) == crc
    assert deepnvme.crc32c(data) == crc


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 255, 256, 257, 511, 512, 513, 4097, 12_287, 12_288, 50_001])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_every_kernel_agrees_with_the_definition(kernel, nbytes, shift, rng):
    memory = rng.integers(0, 256, nbytes + shift, dtype=np.uint8)
    data = memory[shift:]
    expected = by_definition(data.tobytes())
    address = memory.ctypes.data + shift
    assert _core.crc32c_by(kernel, 0, address, nbytes) == expected
    half = nbytes // 3
    first = _core.crc32c_by(kernel, 0, address, half)
    assert _core.crc32c_by(kernel, first, address + half, nbytes - half) == expected


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_continued(first, second):
    assert deepnvme.crc32c(second, deepnvme.crc32c(first)) == deepnvme.crc32c(first + second)


def test_tensor_of_any_dtype():
    torch = pytest.importorskip("torch")
    tensor = torch.randn(1001).bfloat16()
    assert deepnvme.crc32c(tensor) == by_definition(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("backend", ["io_uring", "libaio", "threads"])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1_000_001, 5 << 20])
@pytest.mark.parametrize("offset", [0, 4096, 13])
def test_taken_on_the_way(tmp_path, rng, backend, nbytes, offset):
    values = rng.integers(0, 256, nbytes, dtype=np.uint8)
    with deepnvme.Engine(backend, block_size="1MiB") as io:
        assert io.write(tmp_path / "file", values, offset, checksum=True).crc32c == deepnvme.crc32c(values)
        out = np.zeros_like(values)
        assert io.read(tmp_path / "file", out, offset, checksum=True).crc32c == deepnvme.crc32c(values)
        assert (out == values).all()
        assert io.read(tmp_path / "file", out, offset).crc32c is None


def test_of_a_transfer_that_failed_there_is_none(tmp_path):
    (tmp_path / "short").write_bytes(b"abc")
    with deepnvme.Engine() as io:
        request = io.read(tmp_path / "short", np.zeros(10, np.uint8), checksum=True)
        with pytest.raises(OSError, match="short"):
            _ = request.crc32c
