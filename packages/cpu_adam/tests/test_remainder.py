"""The split master: split and join are exact, and a split master is updated as the fp32 one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cpu_adam

torch = pytest.importorskip("torch", reason="torch is not installed")

BLOCK = 1 << 24


def bits(array):
    return np.asarray(array).view(np.uint32)


def written_rule(pattern: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """DESIGN.md 6a in integers of any size: (hi, lo) of uint32 patterns that are not NaN."""
    wide = pattern.astype(np.int64)
    hi = (wide + 0x8000) >> 16
    return (hi & 0xFFFF).astype(np.uint16), (wide - (hi << 16)).astype(np.int16)


def check_patterns(pattern: np.ndarray, isa=None) -> None:
    """Splits the floats of these bit patterns, compares with the rule, and joins them again."""
    hi, lo = cpu_adam.split(pattern.view(np.float32), isa=isa)
    back = bits(cpu_adam.join(hi, lo, isa=isa))
    nan = (pattern & 0x7FFFFFFF) > 0x7F800000
    assert np.array_equal(back[~nan], pattern[~nan])
    assert np.all(hi[nan] == 0x7FC0)
    assert np.all(lo[nan] == 0)
    expected_hi, expected_lo = written_rule(pattern[~nan])
    assert np.array_equal(hi[~nan], expected_hi)
    assert np.array_equal(lo[~nan], expected_lo)


def test_hard_values(hard_values, isa):
    check_patterns(bits(hard_values), isa)


def test_every_upper_half_with_telling_lower_halves(isa):
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xEDCB):
        check_patterns(upper | np.uint32(lower), isa)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_float():
    """All 2^32 bit patterns, by blocks; the two blocks with NaN in them by the slower check."""
    pattern = np.arange(BLOCK, dtype=np.uint32)
    for start in range(0, 1 << 32, BLOCK):
        if start & 0x7FFFFFFF == 0x7F000000:
            check_patterns(pattern)
        else:
            hi, lo = cpu_adam.split(pattern.view(np.float32))
            assert np.array_equal(hi, (pattern + np.uint32(0x8000)) >> 16)
            assert np.array_equal(bits(cpu_adam.join(hi, lo)), pattern)
        pattern += np.uint32(BLOCK)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=200))
def test_any_list_of_floats(values):
    check_patterns(bits(np.array(values, dtype=np.float32)))


def test_hi_is_the_nearest_bf16_but_for_ties():
    master = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    hi, lo = cpu_adam.split(master)
    tie = lo == -32768
    assert torch.equal(hi[~tie], master[~tie].to(torch.bfloat16))
    ties = torch.tensor([0x3F808000, 0x3F818000], dtype=torch.int32).view(torch.float32)  # 1 and 1.0078125, plus half
    assert cpu_adam.split(ties)[0].tolist() == [1.0078125, 1.015625]  # away from zero, where bfloat16() goes to even


def test_libraries_and_shapes():
    master = torch.randn(3, 4, 5)
    hi, lo = cpu_adam.split(master)
    assert (hi.dtype, lo.dtype, hi.shape, lo.shape) == (torch.bfloat16, torch.int16, master.shape, master.shape)
    numpy_hi, numpy_lo = cpu_adam.split(master.numpy())
    assert (numpy_hi.dtype, numpy_lo.dtype, numpy_hi.shape) == (np.uint16, np.int16, (3, 4, 5))
    assert np.array_equal(numpy_hi.view(np.int16), hi.view(torch.int16).numpy())
    for a in (hi, numpy_hi):
        for b in (lo, numpy_lo):
            joined = cpu_adam.join(a, b)
            assert isinstance(joined, torch.Tensor if a is hi else np.ndarray)
            assert np.array_equal(np.asarray(joined), master.numpy())
    assert cpu_adam.split(torch.nn.Parameter(master))[0].requires_grad is False


def test_into_given_arrays():
    master = torch.randn(7, 1001)
    hi, lo = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    given = cpu_adam.split(master, out=(hi, lo))
    assert given[0] is hi
    assert given[1] is lo
    wanted = cpu_adam.split(master)
    assert torch.equal(hi, wanted[0])
    assert torch.equal(lo, wanted[1])


def test_refused_outputs_are_not_touched():
    master = torch.randn(8)
    hi, lo = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int16)
    read_only = np.zeros(8, np.int16)
    read_only.flags.writeable = False
    for out, error in [
        ((hi, lo[:7]), ValueError),
        ((hi, lo[::2]), ValueError),
        ((hi, lo.int()), TypeError),
        ((hi.half(), lo), TypeError),
        ((hi, read_only), TypeError),
        ((hi, hi.view(torch.int16)), ValueError),
        ((hi, master.view(torch.int16)[:8]), ValueError),
    ]:
        with pytest.raises(error):
            cpu_adam.split(master, out=out)
    assert not hi.any()
    assert not lo.any()


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_split_master_is_the_fp32_master_bit_for_bit(hard_arrays, isa, decoupled, grad_dtype):
    settings = {"lr": 1e-2, "weight_decay": 0.1, "decoupled": decoupled, "isa": isa}
    master, grad, m, v = (torch.from_numpy(array) for array in hard_arrays)
    split_m, split_v = m.clone(), v.clone()
    hi, lo = cpu_adam.split(master)
    for step in range(1, 21):
        noise = torch.randn(grad.shape, generator=torch.Generator().manual_seed(step)).to(grad_dtype)
        gradient = grad.to(grad_dtype) if step == 1 else noise
        cpu_adam.step(master, gradient, m, v, step=step, **settings)
        cpu_adam.step(hi, gradient, split_m, split_v, step=step, param_lo=lo, **settings)
    assert np.array_equal(bits(cpu_adam.join(hi, lo)), bits(master))
    assert np.array_equal(bits(split_m), bits(m))
    assert np.array_equal(bits(split_v), bits(v))


def adamw_copy(values, **settings):
    master = torch.nn.Parameter(values.clone())
    return master, torch.optim.AdamW([master], foreach=False, **settings)


def test_small_decay_does_not_vanish_in_bf16():
    """Ten thousand decays of a millionth, gradient 0: the master is torch's fp32 one, the parameter its rounding."""
    ones = torch.ones(40)
    hi, lo = cpu_adam.split(ones)
    m, v, grad = torch.zeros(40), torch.zeros(40), torch.zeros(40, dtype=torch.bfloat16)
    master, optimizer = adamw_copy(ones, lr=1e-4, weight_decay=0.01)
    master.grad = grad.float()
    for step in range(1, 10_001):
        cpu_adam.step(hi, grad, m, v, step=step, lr=1e-4, weight_decay=0.01, param_lo=lo)
        optimizer.step()
    assert torch.equal(cpu_adam.join(hi, lo), master)
    assert master[0].item() == pytest.approx(0.98987, abs=5e-6)
    assert torch.all(hi == 0.98828125)


def test_small_updates_do_not_vanish_in_bf16():
    ones = torch.ones(40)
    hi, lo = cpu_adam.split(ones)
    m, v, grad = torch.zeros(40), torch.zeros(40), torch.full((40,), 0.5, dtype=torch.bfloat16)
    master, optimizer = adamw_copy(ones, lr=1e-5, weight_decay=0.0)
    master.grad = grad.float()
    for step in range(1, 1001):
        cpu_adam.step(hi, grad, m, v, step=step, lr=1e-5, param_lo=lo)
        optimizer.step()
    torch.testing.assert_close(cpu_adam.join(hi, lo), master.detach(), rtol=1e-6, atol=0)
    assert torch.all(hi == master.to(torch.bfloat16))
    assert torch.all(hi < 1)
