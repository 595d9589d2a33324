"""Arrays of every library, and those that are refused."""

from __future__ import annotations

import array
import errno
import mmap

import numpy as np
import pytest

import deepnvme
from deepnvme.dtypes import _TABLE

torch = pytest.importorskip("torch")

TORCH_DTYPES = [name for name in _TABLE if isinstance(getattr(torch, name, None), torch.dtype)]


@pytest.fixture(scope="module")
def io():
    with deepnvme.Engine() as engine:
        yield engine


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


def random_bits(dtype, numel: int):
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_torch_dtypes_keep_their_bits(io, path, name):
    tensor = random_bits(getattr(torch, name), 1001)
    io.write(path, tensor).wait()
    assert path.stat().st_size == tensor.nbytes
    out = torch.zeros_like(tensor)
    io.read(path, out).wait()
    assert torch.equal(out.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_buffer_is_a_view_for_torch_and_numpy(name):
    buffer = deepnvme.empty((3, 5), name)
    tensor = buffer.torch()
    assert (tensor.shape, tensor.dtype) == ((3, 5), getattr(torch, name))
    assert tensor.data_ptr() == buffer.address
    assert buffer.address % 4096 == 0
    buffer.numpy().view(np.uint8)[1, 2] = 1
    assert tensor.view(torch.uint8)[1, 2] == 1
    assert buffer.numpy().shape == (3, 5)
    assert np.asarray(buffer).ctypes.data == buffer.address


def test_buffer_through_dlpack_and_array_interface():
    buffer = deepnvme.empty((4, 6), "float32")
    buffer.numpy()[:] = np.arange(24).reshape(4, 6)
    assert (np.from_dlpack(buffer) == buffer.numpy()).all()
    assert torch.from_dlpack(buffer).data_ptr() == buffer.address
    assert torch.from_dlpack(deepnvme.empty(8, "bfloat16")).dtype == torch.bfloat16
    assert memoryview(buffer).format == "f"

    class Interface:
        __array_interface__ = buffer.__array_interface__

    assert np.asarray(Interface()).ctypes.data == buffer.address


def test_views_keep_the_memory_alive():
    buffer = deepnvme.empty(4 << 20)
    buffer.numpy()[:] = 7
    views = [buffer.numpy(), buffer.torch(), torch.from_dlpack(buffer), np.from_dlpack(buffer), memoryview(buffer)]
    del buffer
    others = [deepnvme.empty(4 << 20) for _ in range(4)]
    for other in others:
        other.numpy()[:] = 1
    assert all(view[-1] == 7 for view in views)


def test_buffers_of_nothing_and_of_one_element():
    assert deepnvme.empty(0).torch().shape == (0,)
    assert deepnvme.empty((2, 0), "float16").numpy().shape == (2, 0)
    assert deepnvme.empty((), "int64").torch().shape == ()


@pytest.mark.parametrize("shape", ["x", -1, (2, -3), 1.5, 2**63, (2**70, 0)])
def test_impossible_shapes(shape):
    with pytest.raises((TypeError, ValueError)):
        deepnvme.empty(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", np.float32, np.dtype("int8"), float])
def test_dtypes_by_name_or_object(dtype):
    assert deepnvme.empty(2, dtype).nbytes == 2 * deepnvme.empty(1, dtype).itemsize


def test_unknown_dtype():
    with pytest.raises(ValueError, match="'float7' is not one of"):
        deepnvme.empty(2, "float7")


def test_parameter_that_requires_grad(io, path):
    parameter = torch.nn.Parameter(torch.randn(1000))
    io.write(path, parameter).wait()
    other = torch.nn.Parameter(torch.zeros(1000))
    io.read(path, other).wait()
    assert torch.equal(other, parameter)


@pytest.mark.parametrize("make", [bytearray, lambda n: array.array("B", bytes(n)), lambda n: mmap.mmap(-1, n)])
def test_buffer_protocol(io, path, make):
    io.write(path, b"\x05" * 9000).wait()
    out = make(9000)
    io.read(path, out).wait()
    assert bytes(memoryview(out)) == b"\x05" * 9000


def test_producer_of_dlpack_alone(io, path):
    class Foreign:
        def __init__(self, data):
            self.data = data

        def __dlpack__(self, **arguments):
            return self.data.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.data.__dlpack_device__()

    data = np.arange(5000, dtype=np.float64)
    io.write(path, Foreign(data)).wait()
    out = np.zeros_like(data)
    io.read(path, Foreign(out)).wait()
    assert (out == data).all()
    with pytest.raises(ValueError, match="not contiguous"):
        io.write(path, Foreign(data[::2]))
    read_only = np.zeros(10)
    read_only.flags.writeable = False
    with pytest.raises((TypeError, BufferError)):
        io.read(path, Foreign(read_only))


def test_array_of_an_accelerator_is_refused(io, path):
    class OnCuda:
        def __dlpack__(self, **_):
            raise AssertionError("must not be asked")

        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(TypeError, match="not in host memory"):
        io.write(path, OnCuda())
    with pytest.raises(TypeError, match="device meta"):
        io.write(path, torch.empty(3, device="meta"))
    assert not path.exists()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 6)).T,
        np.zeros(10)[::2],
        np.broadcast_to(np.zeros(1), 5),
        torch.zeros(4, 6).t(),
        torch.zeros(1).expand(5),
        memoryview(bytes(10))[::2],
    ],
)
def test_non_contiguous_is_refused_before_anything_happens(io, path, array):
    with pytest.raises(ValueError, match="not contiguous"):
        io.write(path, array)
    assert not path.exists()


def test_lazy_conjugate_is_refused(io, path):
    with pytest.raises(ValueError, match="resolve_conj"):
        io.write(path, torch.zeros(3, dtype=torch.complex64).conj())


def test_sparse_tensor_is_refused(io, path):
    with pytest.raises(TypeError, match="layout"):
        io.write(path, torch.eye(3).to_sparse())


def without_memory():
    """Tensors whose elements lie nowhere, or beyond the end of what there is."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    released = torch.zeros(100_000)
    released.untyped_storage().resize_(0)
    cut = torch.zeros(100_000)[50_000:]
    cut.untyped_storage().resize_(300_000)
    with FakeTensorMode():
        fake = torch.zeros(100_000)
    return [released, cut, fake]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("number", range(3))
def test_tensor_without_memory_is_refused(io, path, tmp_path, number):
    tensor = without_memory()[number]
    path.write_bytes(bytes(400_000))
    with deepnvme.Swap(tmp_path) as swap:
        for use in (
            lambda: io.write(path, tensor),
            lambda: io.read(path, tensor),
            lambda: io.write(path, tensor, 1, checksum=True),
            lambda: deepnvme.crc32c(tensor),
            lambda: swap.put("x", tensor),
        ):
            with pytest.raises(ValueError, match="no memory behind its"):
                use()
    assert path.read_bytes() == bytes(400_000)


def test_distributed_tensor_is_refused(run_python):
    run_python(
        """
        import deepnvme, torch, torch.distributed as dist
        if not dist.is_available(): raise SystemExit
        store = dist.FileStore("store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
        tensor = distribute_tensor(torch.arange(1000.0), DeviceMesh("cpu", [0]), [Shard(0)])
        with deepnvme.Engine() as io:
            for use in (lambda: io.write("file", tensor), lambda: io.read("file", tensor)):
                try: use(); raise SystemExit("accepted")
                except ValueError as e: assert "to_local" in str(e), e
            io.write("file", tensor.to_local()).wait()
        assert open("file", "rb").read() == torch.arange(1000.0).numpy().tobytes()
        dist.destroy_process_group()
        """,
        timeout=250,  # importing all that takes long on a busy machine
    )


def test_impossible_amounts_of_memory():
    for shape in ((2**32 - 1, 2**32 + 1), 2**62, (2**62, 2**10)):
        with pytest.raises(OSError, match="cannot map") as failure:
            deepnvme.empty(shape, "int16")
        assert failure.value.errno == errno.ENOMEM


@pytest.mark.parametrize("what", [3, "text", None, [1, 2], np.array(["a"], dtype=object)])
def test_no_array(io, path, what):
    with pytest.raises(TypeError):
        io.write(path, what)


def test_read_only_target_is_refused(io, path):
    io.write(path, bytes(100)).wait()
    frozen = np.zeros(100, np.uint8)
    frozen.flags.writeable = False
    for target in (frozen, bytes(100), memoryview(bytes(100))):
        with pytest.raises(TypeError, match="read-only"):
            io.read(path, target)


def test_torch_view_of_a_buffer_never_bounces(tmp_path):
    with deepnvme.Engine() as io:
        tensor = deepnvme.empty(1 << 20, "bfloat16").torch().normal_()
        io.write(tmp_path / "file", tensor).wait()
        assert io.stats().bounced_bytes == 0
