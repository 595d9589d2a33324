"""Whatever cannot be right is refused with a message that names the argument, and nothing is touched."""

import numpy as np
import pytest

import cpu_adam

torch = pytest.importorskip("torch", reason="torch is not installed")

ARGUMENTS = ["param", "grad", "exp_avg", "exp_avg_sq"]


def arguments(numel=32):
    """A good call: (param, grad, exp_avg, exp_avg_sq)."""
    return [torch.full((numel,), value) for value in (1.0, 0.5, 0.25, 0.125)]


def refused(error, match, arrays, **settings):
    watched = [
        array
        for array in arrays
        if isinstance(array, torch.Tensor) and array.device.type == "cpu" and array.layout is torch.strided
    ]
    before = [array.clone() for array in watched]
    with pytest.raises(error, match=match):
        cpu_adam.step(*arrays, **{"step": 1, "lr": 1e-2, **settings})
    for array, copy in zip(watched, before, strict=True):
        assert torch.equal(array, copy), "touched although refused"


@pytest.mark.parametrize(("position", "name"), list(enumerate(ARGUMENTS)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int16, torch.complex64, torch.bool])
def test_wrong_dtype(position, name, dtype):
    arrays = arguments()
    arrays[position] = arrays[position].to(dtype)
    refused(TypeError, rf"^{name} has dtype .*needed", arrays)


@pytest.mark.parametrize(("position", "name"), [(2, "exp_avg"), (3, "exp_avg_sq")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_are_fp32(position, name, dtype):
    arrays = arguments()
    arrays[position] = arrays[position].to(dtype)
    refused(TypeError, rf"^{name} has dtype", arrays)


@pytest.mark.parametrize(("position", "name"), list(enumerate(ARGUMENTS))[1:])
@pytest.mark.parametrize("shape", [(31,), (33,), (4, 8), ()])
def test_wrong_shape(position, name, shape):
    arrays = arguments()
    arrays[position] = torch.zeros(shape)
    refused(ValueError, rf"^{name} has shape", arrays)


@pytest.mark.parametrize(("position", "name"), list(enumerate(ARGUMENTS)))
def test_not_contiguous(position, name):
    arrays = arguments()
    arrays[position] = torch.zeros(64)[::2]
    refused(ValueError, rf"^{name} is not contiguous", arrays)


def test_expanded_and_transposed_are_not_contiguous():
    square = [torch.ones(4, 4) for _ in range(4)]
    refused(ValueError, "grad is not contiguous", [square[0], torch.ones(1).expand(4, 4), *square[2:]])
    refused(ValueError, "grad is not contiguous", [square[0], square[1].t(), *square[2:]])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_and_other_devices():
    arrays = arguments()
    refused(ValueError, "grad is sparse", [arrays[0], arrays[1].to_sparse(), *arrays[2:]])
    square = [torch.ones(4, 4) for _ in range(4)]
    refused(ValueError, "grad is sparse", [square[0], square[1].to_sparse_csr(), *square[2:]])
    refused(ValueError, "grad is a view that torch negates", [arrays[0], torch._neg_view(arrays[1]), *arrays[2:]])
    refused(TypeError, "grad is on device meta", [arrays[0], arrays[1].to("meta"), *arrays[2:]])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(("position", "name"), list(enumerate(ARGUMENTS)))
def test_a_tensor_without_memory(position, name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    released, cut = torch.ones(32), torch.ones(64)[32:]
    released.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(64 * 4 - 1)
    with FakeTensorMode():
        fake = torch.ones(32)
    for tensor in (released, cut, fake):
        arrays = arguments()
        arrays[position] = tensor
        others = [array for array in arrays if array is not tensor]
        before = [array.clone() for array in others]
        with pytest.raises(ValueError, match=f"{name} has no memory"):
            cpu_adam.step(*arrays, step=1, lr=1e-2)
        assert all(torch.equal(a, b) for a, b in zip(others, before, strict=True))
        for use in (cpu_adam.norm2, cpu_adam.split):
            with pytest.raises(ValueError, match="has no memory"):
                use(tensor)


@pytest.mark.parametrize("thing", [None, 3.0, [1.0, 2.0], "weights"])
def test_not_an_array(thing):
    arrays = arguments()
    refused(TypeError, r"^grad is a", [arrays[0], thing, *arrays[2:]])


@pytest.mark.parametrize(("position", "name"), [(0, "param"), (2, "exp_avg"), (3, "exp_avg_sq")])
def test_read_only(position, name):
    arrays = [array.numpy() for array in arguments()]
    arrays[position].flags.writeable = False
    before = arrays[position].copy()
    with pytest.raises(TypeError, match=rf"^{name} is read-only"):
        cpu_adam.step(*arrays, step=1, lr=1e-2)
    with pytest.raises(TypeError, match=rf"^{name} is read-only"):
        cpu_adam.step(*[memoryview(array) for array in arrays], step=1, lr=1e-2)
    assert np.array_equal(arrays[position], before)


def test_a_read_only_gradient_is_fine():
    arrays = [array.numpy() for array in arguments()]
    arrays[1].flags.writeable = False
    cpu_adam.step(*arrays, step=1, lr=1e-2)


def test_shared_memory():
    whole = torch.zeros(63)
    for first, second in [(whole[:32], whole[31:]), (whole[31:], whole[:32]), (whole[:32], whole[:32])]:
        refused(ValueError, "share memory", [first, second, torch.zeros(32), torch.zeros(32)])
    low = torch.zeros(32, dtype=torch.int16)
    hi = low.view(torch.bfloat16)
    refused(ValueError, "share memory", [hi, *arguments()[1:]], param_lo=low)


def test_neighbours_do_not_share_memory():
    whole = torch.zeros(4, 32)
    cpu_adam.step(*whole, step=1, lr=1e-2)


def test_odd_address():
    raw = np.zeros(4 * 32 + 1, dtype=np.uint8)
    arrays = [array.numpy() for array in arguments()]
    with pytest.raises(ValueError, match=r"^param lies at address"):
        cpu_adam.step(raw[1:].view(np.float32), *arrays[1:], step=1, lr=1e-2)


def test_foreign_byte_order():
    arrays = [array.numpy() for array in arguments()]
    with pytest.raises(TypeError, match=r"^grad has dtype >f4"):
        cpu_adam.step(arrays[0], arrays[1].astype(">f4"), *arrays[2:], step=1, lr=1e-2)


@pytest.mark.parametrize("settings", [
    {"step": 0}, {"step": -1}, {"lr": -1e-3}, {"lr": float("nan")}, {"lr": float("inf")}, {"eps": -1e-8},
    {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"betas": (float("nan"), 0.9)}, {"weight_decay": -0.1},
    {"betas": (0.9,)}, {"betas": 0.9}, {"betas": ("a", "b")},
    {"grad_scale": float("nan")}, {"grad_scale": float("inf")}, {"threads": 0}, {"isa": "sse9"}, {"isa": 3},
])  # fmt: skip
def test_settings_out_of_range(settings):
    name = next(iter(settings))
    refused(ValueError, name, arguments(), **settings)


def test_an_unavailable_isa_names_those_there_are():
    refused(ValueError, r"available: .*generic", arguments(), isa="avx1024")


@pytest.mark.parametrize("settings", [
    {"step": 1.5}, {"lr": "fast"}, {"eps": None}, {"weight_decay": [0.1]}, {"grad_scale": "big"}, {"threads": 1.5},
])  # fmt: skip
def test_settings_of_the_wrong_kind(settings):
    name = next(iter(settings))
    refused(TypeError, rf"^{name} is .*; a (whole )?number is needed", arguments(), **settings)


@pytest.mark.parametrize(("segments", "match"), [
    ([(0, 33, {})], "within 0 .. 32"),
    ([(-1, 3, {})], "within 0 .. 32"),
    ([(5, 4, {})], "start before stop"),
    ([(0, 5, {}), (4, 8, {})], "overlap"),
    ([(4, 8, {}), (0, 5, {})], "overlap"),
    ([(0, 5, {"learning_rate": 1.0})], "sets 'learning_rate'"),
    ([(0, 5, {"lr": -1.0})], "lr is -1.0"),
    ([(0, 5, {"step": 0})], "step is 0"),
    ([(0, 5)], r"segment is \(0, 5\); it must be \(start, stop"),
    ([(0, 5, [])], "it must be \\(start, stop"),
    ([(0.5, 5, {})], "it must be \\(start, stop"),
])  # fmt: skip
def test_segments(segments, match):
    refused(ValueError, match, arguments(), segments=segments)


def test_remainder_needs_bf16():
    low = torch.zeros(32, dtype=torch.int16)
    refused(TypeError, r"^param has dtype float32; bfloat16", arguments(), param_lo=low)
    half = [arguments()[0].half(), *arguments()[1:]]
    refused(TypeError, r"^param has dtype float16; bfloat16", half, param_lo=low)
    bf16 = [arguments()[0].bfloat16(), *arguments()[1:]]
    refused(TypeError, r"^param_lo has dtype uint8", bf16, param_lo=low.to(torch.uint8))
    refused(ValueError, r"^param_lo has shape", bf16, param_lo=low[:31])


def test_param_out():
    refused(TypeError, r"^param_out has dtype float32", arguments(), param_out=torch.zeros(32))
    refused(ValueError, r"^param_out has shape", arguments(), param_out=torch.zeros(31, dtype=torch.bfloat16))


def test_norm2_split_and_join():
    with pytest.raises(TypeError, match="grad has dtype float64"):
        cpu_adam.norm2(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="not contiguous"):
        cpu_adam.norm2(torch.zeros(6)[::2])
    with pytest.raises(TypeError, match="master has dtype bfloat16"):
        cpu_adam.split(torch.zeros(3, dtype=torch.bfloat16))
    hi, lo = cpu_adam.split(torch.zeros(3))
    with pytest.raises(TypeError, match="hi has dtype int16"):
        cpu_adam.join(lo, lo)
    with pytest.raises(ValueError, match="shape"):
        cpu_adam.join(hi, lo[:2])
