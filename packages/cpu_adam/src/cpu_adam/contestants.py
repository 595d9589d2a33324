"""The steps that benchmarks compare: ours in each form, a plain copy, and other libraries' where installed.

Each function returns a `System` on fresh arrays of `numel` parameters. torch and DeepSpeed take their number of
threads from OMP_NUM_THREADS, which must be set before they are imported.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy

import cpu_adam
from cpu_adam.alternation import System

SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


def plain_copy(numel: int, threads: int) -> System:
    """fp32 numbers copied: the bandwidth that memory gives."""
    source, target = numpy.full(numel, 0.1, numpy.float32), numpy.zeros(numel, numpy.float32)
    borders = [numel * i // threads for i in range(threads + 1)]
    cuts = [slice(*pair) for pair in itertools.pairwise(borders)]
    pool = ThreadPoolExecutor(threads)
    return System(lambda: list(pool.map(lambda cut: numpy.copyto(target[cut], source[cut]), cuts)), 8)


# ---- ours ----


def fp32(numel: int, threads: int, isa: str | None = None) -> System:
    return System(_stepper(*_fp32_arrays(numel), threads=threads, isa=isa), 28)


def fp32_with_bf16_copy(numel: int, threads: int, isa: str | None = None) -> System:
    """The bf16 copy is written in the same pass."""
    out = numpy.zeros(numel, numpy.uint16)
    return System(_stepper(*_fp32_arrays(numel), param_out=out, threads=threads, isa=isa), 30)


def split_master(numel: int, threads: int, isa: str | None = None) -> System:
    """A bf16 parameter and a 16-bit remainder in place of the fp32 master, and a bf16 gradient."""
    param, grad, m, v = _fp32_arrays(numel)
    hi, lo = cpu_adam.split(param)
    half_grad, _ = cpu_adam.split(grad)
    return System(_stepper(hi, half_grad, m, v, param_lo=lo, threads=threads, isa=isa), 26)


def _fp32_arrays(numel: int) -> list[numpy.ndarray]:
    """[param, grad, exp_avg, exp_avg_sq]"""
    return [numpy.full(numel, value, numpy.float32) for value in (0.1, 1e-3, 0.0, 0.0)]


def _stepper(param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, **keywords: Any) -> Callable[[], None]:
    count = itertools.count(1)
    return lambda: cpu_adam.step(param, grad, exp_avg, exp_avg_sq, step=next(count), **keywords, **SETTINGS)


# ---- others ----


def torch_fused(numel: int, *, bf16_copy: bool = False) -> System:
    """torch.optim.AdamW(fused=True); with bf16_copy the parameters are copied to bf16 afterwards."""
    import torch

    parameter = _torch_parameter(numel)
    return _with_copy(torch.optim.AdamW([parameter], fused=True, **SETTINGS), parameter, bf16_copy)


def deepspeed(numel: int, *, bf16_copy: bool = False) -> System:
    """DeepSpeedCPUAdam, likewise. Compiled by DeepSpeed at its first use."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = _torch_parameter(numel)
    return _with_copy(DeepSpeedCPUAdam([parameter], **SETTINGS), parameter, bf16_copy)


def _torch_parameter(numel: int) -> Any:
    import torch

    parameter = torch.nn.Parameter(torch.full((numel,), 0.1))
    parameter.grad = torch.full((numel,), 1e-3)
    return parameter


def _with_copy(optimizer: Any, parameter: Any, bf16_copy: bool) -> System:
    if not bf16_copy:
        return System(optimizer.step, 28)
    copy = parameter.detach().bfloat16()

    def step() -> None:
        optimizer.step()
        copy.copy_(parameter.detach())

    return System(step, 30)
