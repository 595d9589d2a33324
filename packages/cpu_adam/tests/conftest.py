"""What several test files share."""

import numpy as np
import pytest

import cpu_adam

try:
    import torch

    torch.set_num_threads(1)  # the models in these tests are small, and other programs may want the cores
except ImportError:
    pass  # what compares with torch will say so; the rest runs


@pytest.fixture(params=cpu_adam.isas())
def isa(request):
    """Each instruction set this CPU runs."""
    return request.param


def hard_floats() -> np.ndarray:
    """(k,) float32 of every kind: zeros, denormals, powers, largest, infinities, NaN of several payloads and signs."""
    positive = np.array(
        [0x00000000, 0x00000001, 0x00007FFF, 0x00008000, 0x007FFFFF, 0x00800000, 0x1E3CE508, 0x33800000,
         0x3F7FFFFF, 0x3F800000, 0x3F808000, 0x3F818000, 0x4B800000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF,
         0x7F800000, 0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF],
        dtype=np.uint32,
    )  # fmt: skip
    return np.concatenate([positive, positive | np.uint32(0x80000000)]).view(np.float32)


@pytest.fixture
def hard_values():
    return hard_floats()


@pytest.fixture
def hard_arrays():
    """(param, grad, exp_avg, exp_avg_sq), float32: some thousand elements, a third hard values in all mixtures."""
    rng = np.random.default_rng(7)
    numel, hard = 6000 + 37, hard_floats()
    arrays = []
    for scale in (1.0, 1e-2, 1e-2, 1e-4):
        ordinary = (rng.standard_normal(numel) * scale).astype(np.float32)
        arrays.append(np.where(rng.random(numel) < 0.3, rng.choice(hard, numel), ordinary))
    sign_bit_off = arrays[3].view(np.uint32) & np.uint32(0x7FFFFFFF)  # a variance is never negative
    arrays[3] = sign_bit_off.view(np.float32)
    return arrays
