"""This machine as a planner's Machine: what the system says it has, and what short measurements say it does."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import deepnvme
from zinf.planner.cluster import Machine

_PROBE_BYTES = 256 << 20  # of a copy and of a file: far above any cache, well under a second
_PROBE_PIECE = 8 << 20  # of a request to the drive
_MATRIX = 1024  # order of the matrices multiplied


def measure_here(directory: Path) -> Machine:
    """This machine: memory as the system tells it, speeds measured in about a second, the drive that of `directory`.

    Without an accelerator the CPU is the one device, and its memory is the host's. Raises OSError when no file can
    be made in `directory`.
    """
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = torch.device("cpu")
    devices, device_memory, device = 1, host_memory, host
    if torch.accelerator.is_available():
        devices = torch.accelerator.device_count()
        device = torch.accelerator.current_accelerator() or host
        device_memory = devices * torch.get_device_module(device).mem_get_info()[1]
    return Machine(
        name="here",
        devices=devices,
        device_memory=device_memory,
        host_memory=host_memory,
        nvme_memory=shutil.disk_usage(directory).free,
        host_bandwidth=_copy_bandwidth(host, device),
        nvme_bandwidth=_drive_bandwidth(directory) / devices,
        device_bandwidth=_copy_bandwidth(device, device),
        peak=_matmul_rate(device),
        source=f"this machine, measured now; drive: that of {directory}",
        device_is_host=device == host,
    )


def _copy_bandwidth(source: torch.device, target: torch.device) -> float:
    """Bytes a second that a copy carries from `source` to `target`."""
    origin = torch.ones(_PROBE_BYTES, dtype=torch.uint8, device=source)
    copy = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=target)
    return _PROBE_BYTES / _best_seconds(lambda: copy.copy_(origin), target)


def _matmul_rate(device: torch.device) -> float:
    """Operations a second of matrix products, in the faster of float32 and bfloat16."""
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        # A small product first: a CPU without wide bf16 instructions would take seconds for a large one.
        for order in (_MATRIX // 8, _MATRIX):
            matrix = torch.ones(order, order, dtype=dtype, device=device)
            rates.append(2 * order**3 / _best_seconds(functools.partial(torch.mm, matrix, matrix), device))
            if rates[-1] < max(rates) / 4:
                break
    return max(rates)


def _drive_bandwidth(directory: Path) -> float:
    """Bytes a second that the drive reads or writes, the slower of the two, past the page cache where possible."""
    piece = deepnvme.empty(_PROBE_PIECE)
    offsets = range(0, _PROBE_BYTES, _PROBE_PIECE)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".zinf-plan-") as folder, deepnvme.Engine() as engine:
        path = Path(folder) / "probe"

        def write() -> None:
            for offset in offsets:
                engine.write(path, piece, offset)
            engine.flush()

        def read() -> None:
            for offset in offsets:
                engine.read(path, piece, offset)
            engine.flush()

        host = torch.device("cpu")
        return _PROBE_BYTES / max(_best_seconds(write, host, times=2), _best_seconds(read, host, times=2))


def _best_seconds(work: Callable[[], object], device: torch.device, times: int = 3) -> float:
    """Seconds of the fastest of several runs: what the hardware can do when nothing disturbs it."""
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
