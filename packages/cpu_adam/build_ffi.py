"""Builds cpu_adam._kernel: the C sources of csrc/ and a cffi binding to csrc/adam.h (API mode).

setuptools runs it through `cffi_modules` (pyproject.toml, setup.py).
"""

import re
from pathlib import Path

import cffi

CSRC = Path(__file__).parent / "csrc"

COMPILE_ARGS = [
    "-std=gnu11",
    "-O3",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-fno-fast-math",  # whatever CFLAGS ask for
    # No fused multiply-add: gcc would contract a*b+c by itself, and only where the target has FMA, so that
    # instruction sets would differ in the last bit.
    "-ffp-contract=off",
    # Neither changes a value. With errno sqrtf cannot be vectorised; with traps selects become branches.
    "-fno-math-errno",
    "-fno-trapping-math",
]


def declarations() -> str:
    """adam.h as cffi reads it: without preprocessor lines."""
    header = (CSRC / "adam.h").read_text()
    return re.sub(r"^#.*$", "", header, flags=re.MULTILINE)


def relative(pattern: str) -> list[str]:
    """Sources as setuptools wants them: relative to this directory."""
    return sorted(f"csrc/{path.name}" for path in CSRC.glob(pattern))


ffibuilder = cffi.FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "cpu_adam._kernel",
    '#include "adam.h"',
    sources=relative("*.c"),
    depends=relative("*.h"),
    include_dirs=["csrc"],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=["-pthread"],
    libraries=["m"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
