"""bf16 and fp16: every conversion as torch makes it."""

import numpy as np
import pytest

import cpu_adam

torch = pytest.importorskip("torch", reason="torch is not installed")

ALL_16_BIT_PATTERNS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def through_kernel(grad, isa):
    """The gradient as the kernel reads it: with betas of 0 the first moment is the gradient."""
    m, v = torch.zeros(grad.shape), torch.zeros(grad.shape)
    cpu_adam.step(torch.zeros(grad.shape), grad, m, v, step=1, lr=0.0, betas=(0.0, 0.0), isa=isa)
    return m


def rounded_by_kernel(values, dtype, isa):
    """fp32 values as param_out gives them: with lr 0 the parameter stays."""
    out = torch.zeros(values.shape, dtype=dtype)
    zeros = torch.zeros(values.shape)
    cpu_adam.step(values.clone(), zeros, zeros.clone(), zeros.clone(), step=1, lr=0.0, param_out=out, isa=isa)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient(dtype, isa):
    grad = ALL_16_BIT_PATTERNS.view(dtype)
    torch.testing.assert_close(through_kernel(grad, isa), grad.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_around_every_16_bit_number(dtype, isa):
    """Each number, the midpoint to the next, and the floats on either side of both."""
    exact = ALL_16_BIT_PATTERNS.view(dtype).float()
    half_gap = 0x8000 if dtype is torch.bfloat16 else 0x1000
    near = [exact.view(torch.int32) + shift for shift in (0, 1, -1, half_gap, half_gap - 1, half_gap + 1)]
    values = torch.cat(near).view(torch.float32)
    # Denormal fp16 lie closer together than their fp32 patterns say
    tiny = torch.arange(0, 4096, dtype=torch.float32) * 2.0**-26
    values = torch.cat([values, tiny, -tiny, torch.tensor([65519.996, 65520.0, 65504.0, 3.4e38, -3.4e38])])
    values = values[~values.isnan()]
    found, expected = rounded_by_kernel(values, dtype, isa), values.to(dtype)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_random_patterns(dtype, isa):
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32))
    values = values[~values.isnan()]
    found, expected = rounded_by_kernel(values, dtype, isa), values.to(dtype)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_parameter_without_master_is_rounded_every_step(dtype, isa):
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(333, generator=generator).to(dtype)
    m, v = torch.zeros(333), torch.zeros(333)
    fp32_m, fp32_v = m.clone(), v.clone()
    for step in range(1, 6):
        grad = torch.randn(333, generator=generator).to(dtype)
        fp32 = param.float()
        cpu_adam.step(fp32, grad.float(), fp32_m, fp32_v, step=step, lr=0.01, weight_decay=0.1)
        cpu_adam.step(param, grad, m, v, step=step, lr=0.01, weight_decay=0.1, isa=isa)
        assert torch.equal(param, fp32.to(dtype))


def test_uint16_stands_for_bf16(isa):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(77, generator=generator).to(torch.bfloat16) for _ in range(3)]
    arrays = [tensor.view(torch.int16).numpy().view(np.uint16).copy() for tensor in tensors]
    moments = [torch.zeros(77) for _ in range(2)]
    cpu_adam.step(*tensors[:2], *moments, step=1, lr=0.1, param_out=tensors[2], isa=isa)
    cpu_adam.step(*arrays[:2], *(np.zeros(77, np.float32) for _ in range(2)), step=1, lr=0.1, param_out=arrays[2])
    for tensor, array in zip(tensors, arrays, strict=True):
        assert np.array_equal(tensor.view(torch.int16).numpy().view(np.uint16), array)


@pytest.mark.parametrize("scale", [1.0, 2.0**-16, 0.3, -1.0])
def test_grad_scale_multiplies_first(scale):
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(500, generator=generator).half()
    param = torch.randn(500, generator=generator)
    a = [param.clone(), grad, torch.zeros(500), torch.zeros(500)]
    b = [param.clone(), grad.float() * scale, torch.zeros(500), torch.zeros(500)]
    cpu_adam.step(*a, step=1, lr=0.1, weight_decay=0.1, decoupled=False, grad_scale=scale)
    cpu_adam.step(*b, step=1, lr=0.1, weight_decay=0.1, decoupled=False)
    for ours, expected in zip([a[0], *a[2:]], [b[0], *b[2:]], strict=True):
        assert torch.equal(ours, expected)
