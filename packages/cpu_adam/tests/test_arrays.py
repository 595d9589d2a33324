"""Arrays of any library: numpy, buffers, DLPack, tensors that require grad."""

import array
import ctypes

import numpy as np
import pytest

import cpu_adam

torch = pytest.importorskip("torch", reason="torch is not installed")

NUMEL = 70


def numpy_arrays():
    rng = np.random.default_rng(0)
    param, grad, m, v = (rng.standard_normal(NUMEL).astype(np.float32) for _ in range(4))
    return [param, grad, m, np.abs(v)]


class OnlyDLPack:
    """What a foreign library's array offers at least: DLPack, of version 1 or from before."""

    def __init__(self, source, versioned):
        self.source, self.versioned = source, versioned

    def __dlpack_device__(self):
        return self.source.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        if not self.versioned:
            return self.source.__dlpack__()
        return self.source.__dlpack__(max_version=max_version)


class OldDLPack(OnlyDLPack):
    """From before version 1: knows no max_version."""

    def __dlpack__(self, stream=None):
        return self.source.__dlpack__()


MAKERS = {
    "torch": torch.from_numpy,
    "parameters": lambda x: torch.nn.Parameter(torch.from_numpy(x)),
    "numpy": lambda x: x,
    "memoryview": memoryview,
    "array.array": lambda x: array.array("f", x.tolist()),
    "ctypes": lambda x: (ctypes.c_float * NUMEL)(*x.tolist()),
    "DLPack": lambda x: OnlyDLPack(x, versioned=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_any_array(make):
    expected = numpy_arrays()
    cpu_adam.step(*expected, step=1, lr=0.1)
    sources = numpy_arrays()
    made = [make(source) for source in sources]
    cpu_adam.step(*made, step=1, lr=0.1)
    for position, one in enumerate(made):
        found = one.source if isinstance(one, OnlyDLPack) else one
        found = found.detach().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
        assert np.array_equal(found, expected[position])


def test_mixed_libraries():
    expected = numpy_arrays()
    cpu_adam.step(*expected, step=1, lr=0.1)
    param, grad, m, v = numpy_arrays()
    cpu_adam.step(torch.from_numpy(param), OnlyDLPack(grad, True), memoryview(m), v, step=1, lr=0.1)
    assert all(np.array_equal(a, b) for a, b in zip((param, grad, m, v), expected, strict=True))


def test_dlpack_bfloat16():
    values = torch.randn(NUMEL).to(torch.bfloat16)
    assert cpu_adam.norm2(OnlyDLPack(values, True)) == cpu_adam.norm2(values)
    assert cpu_adam.norm2(OldDLPack(values, False)) == cpu_adam.norm2(values)


@pytest.mark.parametrize("wrap", [lambda x: OnlyDLPack(x, False), lambda x: OldDLPack(x, False)])
def test_old_dlpack_cannot_tell_that_it_is_writable(wrap):
    arrays = numpy_arrays()
    before = arrays[0].copy()
    with pytest.raises(TypeError, match="param is read-only"):
        cpu_adam.step(wrap(arrays[0]), *arrays[1:], step=1, lr=0.1)
    assert np.array_equal(arrays[0], before)
    cpu_adam.step(arrays[0], wrap(arrays[1]), *arrays[2:], step=1, lr=0.1)


def test_dlpack_strides_and_read_only():
    with pytest.raises(ValueError, match="grad is not contiguous"):
        cpu_adam.norm2(OnlyDLPack(torch.zeros(6, 4).t(), True))
    assert cpu_adam.norm2(OnlyDLPack(torch.ones(1, 5, 1)[:, ::1], True)) == 5
    assert cpu_adam.norm2(OnlyDLPack(torch.ones(0, 5), True)) == 0
    arrays = numpy_arrays()
    arrays[2].flags.writeable = False
    with pytest.raises(TypeError, match="exp_avg is read-only"):
        cpu_adam.step(*(OnlyDLPack(one, True) for one in arrays), step=1, lr=0.1)


def test_dlpack_frees_what_it_held():
    class Counted(np.ndarray):
        alive = 0

        def __del__(self):
            Counted.alive -= 1

    source = np.ones(NUMEL, np.float32).view(Counted)
    Counted.alive += 1
    assert cpu_adam.norm2(OnlyDLPack(source, True)) == NUMEL
    del source
    assert Counted.alive == 0


def test_a_device_dlpack_names():
    class Elsewhere(OnlyDLPack):
        def __dlpack_device__(self):
            return (2, 0)

    with pytest.raises(TypeError, match=r"grad is on device DLPack type 2.*CPU"):
        cpu_adam.norm2(Elsewhere(np.zeros(3, np.float32), True))


def test_multidimensional_and_fortran_order():
    shape = (3, 5, 2)
    arrays = [np.ones(shape, np.float32) for _ in range(4)]
    cpu_adam.step(*arrays, step=1, lr=0.1)
    arrays[1] = np.asfortranarray(arrays[1])
    with pytest.raises(ValueError, match="grad is not contiguous"):
        cpu_adam.step(*arrays, step=1, lr=0.1)
    with pytest.raises(ValueError, match="grad is not contiguous"):
        cpu_adam.step(arrays[0], memoryview(np.ones((3, 10), np.float32))[::2], *arrays[2:], step=1, lr=0.1)


def test_importing_needs_no_torch():
    import subprocess
    import sys

    code = (
        "import sys, numpy, cpu_adam; a = [numpy.ones(3, 'float32') for _ in range(4)]; "
        "cpu_adam.step(*a, step=1, lr=.1); assert not {'torch', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
