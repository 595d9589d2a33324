"""norm2: the sum of squares in float64, and every infinity and NaN in it."""

import math

import numpy as np
import pytest

import cpu_adam

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_float64(dtype, isa):
    grad = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert cpu_adam.norm2(grad, isa=isa) == pytest.approx(math.fsum((grad.double() ** 2).tolist()), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", [0, 31, 4095, 4096, 9999, 10_000])
def test_one_element_that_is_not_finite(dtype, position, isa):
    grad = torch.ones(10_001, dtype=dtype)
    for value in (math.inf, -math.inf):
        grad[position] = value
        assert cpu_adam.norm2(grad, isa=isa) == math.inf
    grad[position] = math.nan
    assert math.isnan(cpu_adam.norm2(grad, isa=isa))


def test_large_squares_do_not_overflow():
    largest = torch.full((1000,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert cpu_adam.norm2(largest) == pytest.approx(1000 * float(torch.finfo(torch.bfloat16).max) ** 2)
    assert cpu_adam.norm2(torch.full((3,), 1e-30)) == pytest.approx(3e-60)


def test_empty_and_read_only():
    assert cpu_adam.norm2(np.zeros(0, np.float32)) == 0.0
    grad = np.ones((3, 4), np.float32)
    grad.flags.writeable = False
    assert cpu_adam.norm2(grad) == 12.0
    assert isinstance(cpu_adam.norm2(grad), float)
