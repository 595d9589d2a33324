"""Against the limit: a plain C loop with the same traffic as the fp32 step, four streams read and three written.

    python benchmarks/against_copy.py [--numel N] [--threads 1 2] [--rounds R]

Also what bf16 saves: the split master over our own fp32 form, on every instruction set this CPU runs. JSON on stdout.
"""

import ctypes
import itertools
import subprocess
import tempfile
from pathlib import Path

import numpy
from report import main

import cpu_adam
from cpu_adam import contestants
from cpu_adam.alternation import System

# Every element of p, g, m, v is used as Adam uses it, and little is computed.
LIKE = r"""
void like(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, long numel) {
#pragma omp parallel for simd schedule(static)
    for (long i = 0; i < numel; i++) {
        m[i] = 0.9f * m[i] + 0.1f * g[i];
        v[i] = 0.9f * v[i] + 0.1f * g[i] * g[i];
        p[i] = p[i] - 1e-3f * m[i];
    }
}
"""


def plain_loop(numel: int) -> System:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "like.c"), Path(folder, "like.so")
        source.write_text(LIKE)
        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run(["gcc", *flags, source, "-o", library], check=True)
        like = ctypes.CDLL(str(library)).like
    arrays = [numpy.full(numel, value, numpy.float32) for value in (0.1, 1e-3, 0.0, 0.0)]
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    return System(lambda arrays=arrays: like(*addresses, ctypes.c_long(numel)), 28)


def systems(numel: int, threads: int) -> dict[str, System]:
    ours = {
        f"{name}, {isa}": form(numel, threads, isa)
        for (name, form), isa in itertools.product(
            [("fp32", contestants.fp32), ("split", contestants.split_master)], cpu_adam.isas()
        )
    }
    return {"plain loop": plain_loop(numel), "copy": contestants.plain_copy(numel, threads), **ours}


RATIOS = {
    **{f"fp32 / plain loop, {isa}": (f"fp32, {isa}", "plain loop") for isa in cpu_adam.isas()},
    **{f"split / fp32, {isa}": (f"split, {isa}", f"fp32, {isa}") for isa in cpu_adam.isas()},
}

if __name__ == "__main__":
    main(__doc__, systems, RATIOS)
