"""The same bits on every instruction set, with every number of threads, and on either side of every cut."""

import itertools
import re
import shutil
import subprocess

import numpy as np
import pytest

import cpu_adam
from cpu_adam import _kernel

torch = pytest.importorskip("torch", reason="torch is not installed")

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
ALL_FORMS = list(
    itertools.product(["float32", "bfloat16", "float16", "split"], ["float32", "bfloat16", "float16"],
                      [None, "bfloat16", "float16"])
)  # fmt: skip


def in_form(arrays, param, grad, out):
    """numpy float32 (param, grad, exp_avg, exp_avg_sq) -> torch positional arguments and keywords of that form."""
    p, g, m, v = (torch.from_numpy(array.copy()) for array in arrays)
    keywords = {}
    if param == "split":
        p, keywords["param_lo"] = cpu_adam.split(p)
    else:
        p = p.to(getattr(torch, param))
    if out is not None:
        keywords["param_out"] = torch.zeros(p.shape, dtype=getattr(torch, out))
    return [p, g.to(getattr(torch, grad)), m, v], keywords


def bits(array):
    array = array.detach().numpy() if array.dtype not in (torch.bfloat16,) else array.view(torch.int16).numpy()
    return array.view({4: np.uint32, 2: np.uint16}[array.dtype.itemsize])


def run(arrays, form, steps=3, **settings):
    """All arrays' bits after some steps."""
    positional, keywords = in_form(arrays, *form)
    for step in range(1, steps + 1):
        cpu_adam.step(*positional, step=step, **keywords, **{**SETTINGS, **settings})
    return [bits(array) for array in [*positional, *keywords.values()]]


@pytest.mark.parametrize("form", ALL_FORMS, ids=str)
@pytest.mark.parametrize("decoupled", [True, False])
def test_instruction_sets_and_threads(hard_arrays, form, decoupled):
    expected = run(hard_arrays, form, isa="generic", threads=1, decoupled=decoupled)
    for isa, threads in itertools.product(cpu_adam.isas(), (1, 2, 3, 7)):
        found = run(hard_arrays, form, isa=isa, threads=threads, decoupled=decoupled)
        for array, (a, b) in enumerate(zip(expected, found, strict=True)):
            assert np.array_equal(a, b), f"array {array} differs on {isa} with {threads} threads"


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.75), (0.25, 0.0)])
def test_rounding_is_that_of_the_written_formula(hard_arrays, isa, decoupled, betas):
    """Every operation rounds once, in the order written in adam_kernel.h: numpy's float32 gives the same bits."""
    f = np.float32
    p, g, m, v = (array.copy() for array in hard_arrays)
    step, lr, eps, weight_decay = 3, 1e-3, 1e-8, 0.1

    def two_floats(beta):
        high = f(beta)
        if float(high) >= beta:
            high = np.nextafter(high, f(0))
        return high, f(beta - float(high))

    b1 = f(betas[0])
    b2, b2_low = two_floats(betas[1])
    root = np.sqrt(1 - betas[1] ** step)
    with np.errstate(all="ignore"):
        if not decoupled:
            g = g + f(weight_decay) * p
        new_m = b1 * m + f(1 - betas[0]) * g if b1 < 0.5 else m + f(1 - betas[0]) * (g - m)
        new_v = b2 * v + (b2_low * v + (f(1 - betas[1]) * g) * g)
        decay = f(1 - lr * weight_decay) if decoupled else f(1)
        step_size = f(lr * root / (1 - betas[0] ** step))
        new_p = decay * p - (step_size * new_m) / (np.sqrt(new_v) + f(eps * root))
    arrays = [array.copy() for array in hard_arrays]
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
    cpu_adam.step(*arrays, step=step, isa=isa, **settings)
    for ours, numpys in zip((arrays[0], arrays[2], arrays[3]), (new_p, new_m, new_v), strict=True):
        np.testing.assert_array_equal(ours, numpys)  # takes NaN for equal, and -0 for 0


@pytest.mark.parametrize("form", [("float32", "float32", "bfloat16"), ("split", "bfloat16", None)], ids=str)
def test_cut_anywhere(hard_arrays, form, isa):
    arrays = [array[:300] for array in hard_arrays]
    expected = run(arrays, form, isa=isa)
    for cut in [1, 2, 3, 15, 16, 17, 63, 64, 65, 100, 128, 255, 299]:
        head = run([array[:cut] for array in arrays], form, isa=isa)
        tail = run([array[cut:] for array in arrays], form, isa=isa)
        for whole, a, b in zip(expected, head, tail, strict=True):
            assert np.array_equal(whole, np.concatenate([a, b])), f"cut at {cut}"


def test_nan_is_stored_as_one(hard_arrays, isa):
    for form in ALL_FORMS:
        positional, keywords = in_form(hard_arrays, *form)
        cpu_adam.step(*positional, step=1, isa=isa, **keywords, **SETTINGS)
        quiet = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
        outputs = [positional[0], positional[2], positional[3]]
        outputs += [keywords["param_out"]] if form[2] else []
        for array in outputs:
            nan = bits(array)[torch.isnan(array).numpy()]
            assert nan.size > 0, form
            assert np.all(nan == quiet[array.dtype]), form


@pytest.mark.parametrize("numel", [1, 1000, 4096, 4097, 50_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm2_is_the_same_everywhere(numel, dtype):
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    sums = {cpu_adam.norm2(grad, threads, isa=isa) for isa in cpu_adam.isas() for threads in (1, 2, 5)}
    assert len(sums) == 1


def test_split_and_join_are_the_same_everywhere(hard_values):
    master = np.tile(hard_values, 50)
    expected = cpu_adam.split(master, isa="generic", threads=1)
    for isa, threads in itertools.product(cpu_adam.isas(), (1, 3)):
        found = cpu_adam.split(master, isa=isa, threads=threads)
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
        joined = cpu_adam.join(*found, isa=isa, threads=threads)
        assert np.array_equal(joined.view(np.uint32), cpu_adam.join(*expected, isa="generic").view(np.uint32))


def test_names():
    assert cpu_adam.isa() == cpu_adam.isas()[0]
    assert cpu_adam.isas()[-1] == "generic"
    assert set(cpu_adam.isas()) <= {"avx512", "avx2", "neon", "generic"}


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump (binutils) is not installed")
def test_wide_registers_and_fused_multiply_add_in_the_binary():
    """Wide registers only in the kernels behind the run-time check, fused multiply-add nowhere."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _kernel.__file__], capture_output=True, text=True, check=True
    ).stdout
    if "x86-64" not in text:
        pytest.skip("not an x86-64 binary")
    assert not re.search(r"\bvfn?m(add|sub)", text)
    # cffi's wrappers and this package's own code: every function whose name says nothing of a kernel set
    functions = re.split(r"\n\n(?=[0-9a-f]+ <)", text)
    for function in functions:
        name = re.search(r"<([^>]+)>:", function)
        wide = "%zmm" in function or "%ymm" in function
        if wide and name:
            assert re.match(r"kernel_|load_|store_|block_norm2|make_nan_canonical|update_split_lines", name[1]), (
                f"wide registers in {name[1]}"
            )
