"""The split master: an fp32 number as a bf16 number and a 16-bit remainder, both ways, without loss.

With b the fp32 bits: hi = (b + 0x8000) >> 16, which is b rounded to bf16 with ties away from zero, and
lo = the low 16 bits of b as int16; back, b = (hi << 16) + lo modulo 2^32. NaN becomes hi = quiet NaN, lo = 0.
So beside a bf16 parameter an fp32 master weight takes 2 bytes instead of 4.
"""

import sys
from typing import Any

import numpy

from cpu_adam import arrays, errors
from cpu_adam._kernel import ffi, lib
from cpu_adam.instruction_sets import index_of
from cpu_adam.thread_count import thread_count


def split(
    master: Any, *, out: tuple[Any, Any] | None = None, threads: int | None = None, isa: str | None = None
) -> tuple[Any, Any]:
    """fp32 master -> (hi, lo), each of its shape.

    A torch tensor gives (bfloat16, int16) tensors; any other array gives numpy (uint16, int16), the first
    holding bfloat16 bit patterns. `join` gives back every bit, but of NaN only that it is one.
    `out`: a (hi, lo) to be written instead, of the master's shape: (bfloat16 or uint16, int16).

    Raises TypeError unless `master` is float32 on the CPU, ValueError if it is not contiguous; the same for `out`, and
    ValueError where arrays share memory. Then nothing is written.
    """
    source = arrays.describe("master", master)
    arrays.require(source, ("float32",))
    hi, lo = out or (_empty_like(master, source, dtype) for dtype in ("bfloat16", "int16"))
    high, low = arrays.describe("hi", hi), arrays.describe("lo", lo)
    arrays.require(high, ("bfloat16", "uint16"), writable=True, shape=source.shape)
    arrays.require(low, ("int16",), writable=True, shape=source.shape)
    arrays.require_apart([source, high, low])
    lib.adam_split(
        ffi.cast("float *", source.address),
        ffi.cast("uint16_t *", high.address),
        ffi.cast("int16_t *", low.address),
        source.numel,
        index_of(isa),
        thread_count(threads, source.numel),
    )
    return hi, lo


def join(hi: Any, lo: Any, *, threads: int | None = None, isa: str | None = None) -> Any:
    """(hi, lo) -> the fp32 master: a torch tensor if `hi` is one, else a numpy array.

    hi: bfloat16, or its bit patterns as uint16. lo: int16, the same shape.

    Raises TypeError for other dtypes or devices, ValueError for unequal shapes or non-contiguous arrays.
    """
    high, low = arrays.describe("hi", hi), arrays.describe("lo", lo)
    arrays.require(high, ("bfloat16", "uint16"))
    arrays.require(low, ("int16",))
    if tuple(high.shape) != tuple(low.shape):
        raise errors.out_of_range("lo's shape", tuple(low.shape), f"{tuple(high.shape)}, the shape of hi")
    master = _empty_like(hi, high, "float32")
    lib.adam_join(
        ffi.cast("uint16_t *", high.address),
        ffi.cast("int16_t *", low.address),
        ffi.cast("float *", arrays.describe("master", master).address),
        high.numel,
        index_of(isa),
        thread_count(threads, high.numel),
    )
    return master


def _empty_like(array: Any, described: arrays.Array, dtype: str) -> Any:
    """A new contiguous array of the same shape and of the same library, as far as that is torch or numpy."""
    if arrays.is_torch(array):
        torch = sys.modules["torch"]
        return torch.empty(described.shape, dtype=getattr(torch, dtype))
    return numpy.empty(described.shape, dtype="uint16" if dtype == "bfloat16" else dtype)
