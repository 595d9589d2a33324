"""The squared norm of a gradient, for clipping and for finding infinities and NaN in the same read."""

from typing import Any

import numpy

from cpu_adam import arrays
from cpu_adam._kernel import ffi, lib
from cpu_adam.instruction_sets import index_of
from cpu_adam.thread_count import thread_count


def norm2(grad: Any, threads: int | None = None, *, isa: str | None = None) -> float:
    """Sum of squares of `grad`, in float64.

    grad: any shape; float32, bfloat16 (or uint16 bit patterns) or float16; read-only is fine.
    Returns inf or nan exactly where the gradient holds one; squares of finite values do not overflow.
    The order of additions is fixed: the result does not depend on `threads` or `isa`.

    Raises TypeError for another dtype or device, ValueError if `grad` is not contiguous.
    """
    array = arrays.describe("grad", grad)
    arrays.require(array, tuple(arrays.FORMATS))
    block_sums = numpy.empty(lib.adam_norm2_blocks(array.numel), dtype=numpy.float64)
    return lib.adam_norm2(
        array.pointer,
        arrays.FORMATS[array.dtype],
        array.numel,
        ffi.cast("double *", ffi.from_buffer(block_sums)),
        index_of(isa),
        thread_count(threads, array.numel),
    )
