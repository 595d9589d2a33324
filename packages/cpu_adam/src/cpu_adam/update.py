"""The optimizer step: checks the arguments, finds the addresses, makes the one C call.

Everything is checked before anything is touched.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from cpu_adam import arrays, errors
from cpu_adam._kernel import ffi, lib
from cpu_adam.instruction_sets import index_of
from cpu_adam.scalars import real, whole
from cpu_adam.thread_count import thread_count

HALF_DTYPES = ("bfloat16", "uint16", "float16")
ALL_DTYPES = ("float32", *HALF_DTYPES)


def step(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
    param_lo: Any = None,
    param_out: Any = None,
    segments: Sequence[tuple[int, int, Mapping[str, Any]]] | None = None,
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """One step of Adam, in place, in one pass over memory.

    With g the gradient times `grad_scale`, m and v the moments, t the step, all in fp32::

        g   += weight_decay * p                     (decoupled=False: Adam with L2, as torch.optim.Adam)
        m    = beta1 * m + (1 - beta1) * g
        v    = beta2 * v + (1 - beta2) * g * g
        p    = (1 - lr * weight_decay) * p          (decoupled=True: AdamW, as torch.optim.AdamW)
        p   -= lr * m_hat / (sqrt(v_hat) + eps)     m_hat = m / (1 - beta1^t),  v_hat = v / (1 - beta2^t)

    (Kingma and Ba, arXiv 1412.6980, algorithm 1; Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, with
    the decay multiplied by lr as in torch. eps stands outside the root.) Bias corrections are in double.

    The arrays are contiguous, of one shape, on the CPU, and share no memory:

    param       float32, updated in place. Also bfloat16 (or its bit patterns as uint16) or float16: rounded
                to nearest even after every step, so small updates are lost, unless `param_lo` is given.
    grad        float32, bfloat16 (or uint16) or float16; only read.
    exp_avg     float32, m; zeros before the first step.
    exp_avg_sq  float32, v; zeros before the first step.
    param_lo    int16: then `param` is bfloat16, and the two are the fp32 master without loss (see `split`).
    param_out   bfloat16 (or uint16) or float16: receives the updated fp32 parameter rounded to nearest even.

    step        counts from 1.
    grad_scale  unscaling and clipping at no cost: clip_factor / loss_scale. Negative: maximise.
    segments    [(start, stop, settings), ..]: elements start .. stop - 1 of the flattened arrays with
                settings of their own, a dict of any of lr, betas, eps, weight_decay, step, decoupled. What it
                does not name, and all elements in no segment, use the call's.
    threads     None: every core this process may use, fewer for small arrays.
    isa         None: the best of `isas()`.

    Results are the same bits whatever `threads` and `isa`, and however a flat buffer is cut into calls. A NaN
    is always stored as the one quiet NaN. Other Python threads run meanwhile; several calls may run at once
    on different arrays.

    Raises TypeError for wrong dtypes or devices and for read-only arrays (JAX's are); ValueError for wrong
    shapes, sizes or values, shared memory, unknown keys in `segments`, and an `isa` that cannot run. Then
    nothing was touched.
    """
    own: dict[str, Any] = {
        "step": step,
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled": decoupled,
    }
    settings = _settings(**own)
    scale = real("grad_scale", grad_scale)
    if not math.isfinite(scale):
        raise errors.out_of_range("grad_scale", grad_scale, "finite")

    p = arrays.describe("param", param)
    g = arrays.describe("grad", grad)
    m = arrays.describe("exp_avg", exp_avg)
    v = arrays.describe("exp_avg_sq", exp_avg_sq)
    shape = p.shape
    arrays.require(p, ("bfloat16", "uint16") if param_lo is not None else ALL_DTYPES, writable=True)
    arrays.require(g, ALL_DTYPES, shape=shape)
    arrays.require(m, ("float32",), shape=shape, writable=True)
    arrays.require(v, ("float32",), shape=shape, writable=True)
    apart = [p, g, m, v]
    lo_pointer = out_pointer = ffi.NULL
    out_format = lib.ADAM_NONE
    if param_lo is not None:
        lo = arrays.describe("param_lo", param_lo)
        arrays.require(lo, ("int16",), shape=shape, writable=True)
        apart.append(lo)
        lo_pointer = ffi.cast("int16_t *", lo.address)
    if param_out is not None:
        out = arrays.describe("param_out", param_out)
        arrays.require(out, HALF_DTYPES, shape=shape, writable=True)
        apart.append(out)
        out_pointer, out_format = out.pointer, arrays.FORMATS[out.dtype]
    arrays.require_apart(apart)

    rows = _segments(segments, p.numel, own) if segments else []
    c_segments = ffi.new("struct adam_segment[]", rows)  # a name of its own: it must live through the call
    call = ffi.new(
        "struct adam_step *",
        (
            p.numel,
            p.pointer,
            lo_pointer,
            g.pointer,
            ffi.cast("float *", m.address),
            ffi.cast("float *", v.address),
            out_pointer,
            arrays.FORMATS[p.dtype],
            arrays.FORMATS[g.dtype],
            out_format,
            scale,
            settings,
            len(rows),
            c_segments,
        ),
    )
    lib.adam_update(call, index_of(isa), thread_count(threads, p.numel))


Settings = tuple[float, float, float, float, float, int, int]  # in the order of `struct adam_settings`


def _settings(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool
) -> Settings:
    """Raises ValueError for a hyperparameter out of range, TypeError for one that is no number."""
    count = whole("step", step)
    if not 1 <= count < 1 << 63:
        raise errors.out_of_range("step", step, "at least 1 (it counts from 1)")
    rate, epsilon, decay = real("lr", lr), real("eps", eps), real("weight_decay", weight_decay)
    for name, value in (("lr", rate), ("eps", epsilon), ("weight_decay", decay)):
        if not 0.0 <= value < math.inf:
            raise errors.out_of_range(name, value, "finite and not negative")
    try:
        beta1, beta2 = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        beta1 = beta2 = math.nan  # refused like numbers out of range
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise errors.out_of_range("betas", betas, "two numbers, each at least 0 and below 1")
    return rate, beta1, beta2, epsilon, decay, count, 1 if decoupled else 0


def _segments(
    segments: Sequence[tuple[int, int, Mapping[str, Any]]], numel: int, defaults: Mapping[str, Any]
) -> list[tuple[int, int, Settings]]:
    """Rows of `struct adam_segment`: ascending, none empty. Raises ValueError where they cannot be."""
    rows = []
    checked: tuple[Mapping[str, Any], Settings] | None = None  # neighbours often have the same
    for segment in segments:
        try:
            start, stop, own = segment
            first, last, keys = operator.index(start), operator.index(stop), own.keys()
        except (TypeError, ValueError, AttributeError):
            raise errors.out_of_range("a segment", segment, "(start, stop, {setting: value, ..})") from None
        if not 0 <= first <= last <= numel:
            raise errors.out_of_range("a segment", (start, stop), f"within 0 .. {numel}, start before stop")
        if checked is None or own != checked[0]:
            if not keys <= defaults.keys():
                raise errors.unknown_keys((first, last), keys - defaults.keys(), defaults.keys())
            checked = own, _settings(**{**defaults, **own})
        if first < last:
            rows.append((first, last, checked[1]))
    rows.sort()
    for (start, stop, _), (next_start, next_stop, _) in pairwise(rows):
        if stop > next_start:
            raise errors.overlapping_segments((start, stop), (next_start, next_stop))
    return rows
