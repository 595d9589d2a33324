"""How fast states stream: save, load, export and load_pretrained of a model on a drive, against fio on that drive.

    python packages/zinf/benchmarks/streams_against_fio.py --nvme DIR [--parameters 1e9] [--json F]

Each operation must read and write a known number of bytes a parameter. Its figure is the rate at which it moved these
bytes, over the rate of fio's sequential direct I/O with the same mixture of reads and writes; alternated, medians.
Where the operation puts a new file in the place of an old one, so does fio, and ends as it does when the new one is
durable and the old one gone (to remove a large file takes seconds on some drives). Two rounds come first that do not
count: the first write of a place is slower than all later ones, and a new checkpoint lies beside the old one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import put
from torch import nn

import zinf

WIDTH = 2048
# Bytes of a bfloat16 parameter with its states that must be read and written: all of param 2, remainder 2 and moments
# 8 in a checkpoint; the param alone in an export; an export in, param and remainder out.
NEEDED = {"save": (12, 12), "load": (12, 12), "export": (2, 2), "load_pretrained": (2, 4)}
WRITES_A_NEW_FILE = ("save", "export")
FIO_BYTES = 6 << 30
_WARM_UP = 2


def build(drive: Path, parameters: float) -> tuple[nn.Module, zinf.AdamW]:
    """A model whose states are all on the drive, with moments."""
    config = zinf.Config.preset("inf-nvme", nvme=[drive], resident=0, host_memory="1GiB", device_memory="256MiB")
    with zinf.init(config):
        layers = max(1, round(parameters / WIDTH**2))
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    return model, zinf.AdamW(model.parameters())


def operations(folder: Path, model: nn.Module, optimizer: zinf.AdamW) -> dict[str, Callable[[], object]]:
    return {
        "save": lambda: zinf.save(folder / "run", model, optimizer, keep=1),
        "load": lambda: zinf.load(folder / "run", model, optimizer),
        "export": lambda: zinf.export(model, folder / "weights"),
        "load_pretrained": lambda: zinf.load_pretrained(model, folder / "weights"),
    }


def fio(folder: Path, read: int, written: int, new_file: bool) -> float:
    """Bytes a second, read and written together, of two jobs at once that share FIO_BYTES in this proportion."""
    files = {"read": folder / "fio-read", "write": folder / "fio-written"}
    removing = 0.0
    if new_file:  # and flushed at the end: without it a drive's cache would be measured
        started = time.perf_counter()
        files["write"].unlink(missing_ok=True)
        removing = time.perf_counter() - started
    parts = {"read": FIO_BYTES * read // (read + written), "write": FIO_BYTES * written // (read + written)}
    command = [
        "fio", "--output-format=json", f"--bs={4 << 20}", "--ioengine=io_uring", "--iodepth=16", "--direct=1",
        "--fallocate=native", f"--end_fsync={int(new_file)}",
    ]  # fmt: skip
    for way, nbytes in parts.items():
        size = nbytes // (4 << 20) * (4 << 20)
        command += [f"--name={way}", f"--rw={way}", f"--filename={files[way]}", f"--size={size}"]
    huge_pages = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    found = subprocess.run(command, env=huge_pages, capture_output=True, text=True, check=True).stdout
    jobs = json.loads(found[found.index("{") :])["jobs"]
    moved = sum(job[way]["io_bytes"] for job, way in zip(jobs, parts, strict=True))
    return moved / (removing + max(job["job_runtime"] / 1e3 for job in jobs))


def measure(drive: Path, parameters: float, repeats: int) -> dict:
    model, optimizer = build(drive, parameters)
    numel = sum(param.numel() for param in model.parameters())
    run = operations(drive, model, optimizer)
    rates: dict[str, list[float]] = {name: [] for name in run}
    limits: dict[str, list[float]] = {name: [] for name in run}
    for new_file in (True, False):  # the files that it reads and overwrites from now on
        fio(drive, 1, 1, new_file)
    for number in range(_WARM_UP + repeats):
        for name, operation in run.items():
            read, write = NEEDED[name]
            os.sync()  # what was written before is not written during this
            started = time.perf_counter()
            operation()
            rate = numel * (read + write) / (time.perf_counter() - started)
            if number < _WARM_UP:
                continue
            rates[name].append(rate)
            limits[name].append(fio(drive, read, write, name in WRITES_A_NEW_FILE))
    return {
        "parameters": numel,
        "operations": {
            name: {
                "gigabytes_per_second": statistics.median(rates[name]) / 1e9,
                "fio_gigabytes_per_second": statistics.median(limits[name]) / 1e9,
                "of_limit": statistics.median(a / b for a, b in zip(rates[name], limits[name], strict=True)),
                "of_limit_all": [a / b for a, b in zip(rates[name], limits[name], strict=True)],
            }
            for name in run
        },
        "peak_host_bytes": zinf.report(model)["peak"]["host"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", type=Path, required=True, help="a directory on the drive")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the record into this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp(dir=arguments.nvme))
    try:
        record = measure(folder, arguments.parameters, arguments.repeats)
    finally:
        shutil.rmtree(folder)
    put(record, arguments.json)


if __name__ == "__main__":
    main()
