"""Every length and every alignment, and not one byte past either end."""

import numpy as np
import pytest

import cpu_adam
from cpu_adam import reference

torch = pytest.importorskip("torch", reason="torch is not installed")

GUARD = 17  # elements on either side
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Guarded:
    """A tensor of `numel` elements at a storage offset, between guard values that must survive."""

    def __init__(self, values: torch.Tensor, offset: int = 0) -> None:
        numel = values.numel()
        raw = torch.full((offset + numel + 2 * GUARD,), 77, dtype=values.dtype)
        self.tensor = raw[offset + GUARD : offset + GUARD + numel].view(values.shape)
        self.tensor.copy_(values)
        self.around = [raw[: offset + GUARD], raw[offset + GUARD + numel :]]

    def intact(self) -> bool:
        return all(torch.all(side == 77) for side in self.around)


def random(shape, generator, scale=1.0):
    return torch.randn(shape, generator=generator) * scale


def step_and_check(shape, param_dtype, grad_dtype, offsets, *, split=False, out=None, isa=None, steps=3):
    """Steps guarded arrays and compares them with the float64 reference, up to the rounding of their dtypes."""
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    master = random(shape, generator)
    keywords = {}
    if split:
        hi, lo = cpu_adam.split(master)
        param, keywords["param_lo"] = Guarded(hi, offsets[0]), Guarded(lo, offsets[4])
    else:
        param = Guarded(master.to(param_dtype), offsets[0])
        master = param.tensor.float()
    if out is not None:
        keywords["param_out"] = Guarded(torch.zeros(shape, dtype=out), offsets[5])
    m, v = (Guarded(torch.zeros(shape), offset) for offset in offsets[2:4])
    exact = master.numpy().astype(np.float64), np.zeros(shape), np.zeros(shape)
    everything = [param, m, v, *keywords.values()]
    for step in range(1, steps + 1):
        grad = Guarded(random(shape, generator).to(grad_dtype), offsets[1])
        tensors = {name: guarded.tensor for name, guarded in keywords.items()}
        cpu_adam.step(
            param.tensor, grad.tensor, m.tensor, v.tensor, step=step, lr=0.01, weight_decay=0.1, isa=isa, **tensors
        )
        exact = reference.adam(exact[0], grad.tensor.float().numpy(), *exact[1:], step=step, lr=0.01, weight_decay=0.1)
        assert all(guarded.intact() for guarded in [*everything, grad])
    np.testing.assert_allclose(m.tensor.numpy(), exact[1], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(v.tensor.numpy(), exact[2], rtol=1e-5, atol=1e-7)
    found = cpu_adam.join(param.tensor, tensors["param_lo"]) if split else param.tensor.float()
    spacing = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
    tolerance = spacing[torch.float32 if split else param_dtype] * steps
    np.testing.assert_allclose(found.numpy(), exact[0], rtol=tolerance, atol=tolerance)
    if out is not None and (split or param_dtype is torch.float32):
        assert torch.equal(tensors["param_out"], found.to(out))


def test_every_length_up_to_1000(isa):
    for numel in range(1001):
        step_and_check((numel,), torch.float32, torch.float32, [0] * 6, isa=isa, steps=1)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_every_length_with_16_bit_arrays(isa, split, out):
    for numel in [*range(140), *range(997, 1001)]:
        step_and_check((numel,), torch.float32, torch.bfloat16, [0] * 6, split=split, out=out, isa=isa, steps=1)


@pytest.mark.parametrize("param_dtype", DTYPES)
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_lengths_dtypes_and_shapes(param_dtype, grad_dtype):
    for numel in [*range(1, 71), 1023, 1024, 1025]:
        for shape in [(numel,), (1, numel), (numel, 1), (numel, 2)]:
            step_and_check(shape, param_dtype, grad_dtype, [numel % 16] * 6, steps=2)


@pytest.mark.parametrize("form", [{}, {"split": True}, {"out": torch.bfloat16}, {"split": True, "out": torch.float16}])
def test_every_storage_offset(form, isa):
    for offset in range(16):
        rng = np.random.default_rng(offset)
        offsets = [offset, *map(int, rng.integers(0, 16, 5))]
        for numel in [1, 63, 64, 65, 200, 1024]:
            step_and_check((numel,), torch.float32, torch.bfloat16, offsets, isa=isa, **form)


def test_an_offset_of_param_out_that_never_reaches_a_cache_line(isa):
    for numel in (1, 15, 31, 32, 33, 95, 96, 97, 500):
        for offset in range(33):
            offsets = [0, 0, 0, 0, 0, offset]
            step_and_check((numel,), torch.float32, torch.float32, offsets, out=torch.bfloat16, isa=isa, steps=1)


def test_other_dtypes_are_refused():
    ones = torch.ones(1024)
    for dtype in (torch.float64, torch.int8, torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="param has dtype"):
            cpu_adam.step(ones.to(dtype), ones, ones.clone(), ones.clone(), step=1, lr=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm2_of_every_length(dtype, isa):
    generator = torch.Generator().manual_seed(3)
    for numel in [*range(300), 4095, 4096, 4097, 8192, 10_001]:
        grad = Guarded(random((numel,), generator).to(dtype), numel % 16).tensor
        expected = float((grad.double() ** 2).sum())
        assert cpu_adam.norm2(grad, isa=isa) == pytest.approx(expected, rel=1e-13)


def test_split_and_join_of_every_length(isa):
    for numel in range(200):
        master = Guarded(torch.randn(numel), numel % 16).tensor
        hi, lo = cpu_adam.split(master, isa=isa)
        assert torch.equal(cpu_adam.join(hi, lo, isa=isa), master)
