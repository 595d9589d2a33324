"""Whatever is written and read, in whatever pieces and by whatever engine: the bytes are those of a plain model."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deepnvme

SPACE = 300_000
DTYPES = [np.uint8, np.int16, np.float32, np.float64, np.complex128]

transfers = st.lists(
    st.tuples(
        st.sampled_from(["write", "read"]),
        st.integers(0, SPACE),  # offset
        st.sampled_from([0, 1, 511, 512, 4095, 4096, 4097, 65_536]) | st.integers(0, 100_000),  # about so many bytes
        st.sampled_from([0, 1, 64, 512, 4096 - 64]),  # address modulo 4096
        st.sampled_from(DTYPES),
    ),
    max_size=25,
)
numbers = itertools.count()


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("properties")


@pytest.fixture(scope="module")
def engines():
    made = {
        (backend, block): deepnvme.Engine(backend, block_size=block, queue_depth=depth, bounce_buffers=2)
        for backend, block, depth in itertools.product(("io_uring", "libaio", "threads"), ("4KiB", "1MiB"), (3,))
        if deepnvme.backends()[backend] == "ok"
    }
    yield made
    for engine in made.values():
        engine.close()


def array_at(shift: int, nbytes: int, dtype) -> np.ndarray:
    """An array of about nbytes whose address is `shift` modulo 4096."""
    itemsize = np.dtype(dtype).itemsize
    numel = nbytes // itemsize
    memory = deepnvme.empty(numel * itemsize + shift).numpy()
    return memory[shift : shift + numel * itemsize].view(dtype)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), transfers, st.booleans(), st.integers(1, 3))
def test_file_equals_a_plain_array_of_bytes(directory, engines, data, transfers, direct, members):
    io = engines[data.draw(st.sampled_from(sorted(engines)))]
    rng = np.random.default_rng(0)
    model = np.zeros(2 * SPACE, np.uint8)
    length = 0
    number = next(numbers)
    paths = [directory / f"{number}-{i}" for i in range(members)]
    with deepnvme.File(paths, "w", stripe="8KiB", direct=direct) as file:
        pending: list[tuple[np.ndarray, np.ndarray]] = []
        written: list[tuple[int, int]] = []
        for kind, offset, nbytes, shift, dtype in transfers:
            array = array_at(shift, nbytes, dtype)
            end = offset + array.nbytes
            if any(offset < b and a < end for a, b in written):
                # Requests that overlap a write under way have no order.
                io.flush()
                written = []
            if kind == "write":
                array.view(np.uint8)[:] = rng.integers(0, 256, array.nbytes, dtype=np.uint8)
                if any(offset < b and a < end for a, b in [(r[2], r[3]) for r in pending]):
                    io.flush()
                model[offset:end] = array.view(np.uint8)
                length = max(length, end)
                written.append((offset, end))
                io.write(file, array, offset)
            elif end <= length:
                io.flush()  # the length is only there when the writes are
                written = []
                io.read(file, array, offset)
                pending.append((array, model[offset:end].copy(), offset, end))
        io.flush()
        for array, expected, *_ in pending:
            assert (array.view(np.uint8) == expected).all()
        assert file.size == length
        whole = np.zeros(length, np.uint8)
        io.read(file, whole).wait()
        assert (whole == model[:length]).all()
    if members == 1:
        assert paths[0].read_bytes() == model[:length].tobytes()
    for path in paths:
        path.unlink()
