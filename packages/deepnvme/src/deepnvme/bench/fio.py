"""The same work done by fio."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from .sweep import Point, Record, Workspace

_RW = {"read": "read", "write": "write", "mixed": "rw"}
_ENGINES = {"io_uring": "io_uring", "libaio": "libaio", "threads": "psync"}


def why_not() -> str:
    """Empty when fio can be run."""
    return "" if shutil.which("fio") else "fio is not installed"


def measure(
    space: Workspace, point: Point, seconds: float | None = None, rates: tuple[float, float] | None = None
) -> Record:
    """A record of the fields that fio gives, with "system": "fio".

    For so many seconds over the file, as our own measurement; on huge pages, as our buffers are. psync has no queue
    depth: there, as many jobs as we have threads. `rates`: bytes a second that it reads and writes at most.
    """
    record: Record = {
        "system": "fio",
        "op": point.op,
        "backend": point.backend,
        "block_size": point.block_size,
        "queue_depth": point.queue_depth,
    }
    if reason := why_not():
        return record | {"why_not": reason}
    command = [
        "fio",
        "--name=deepnvme",
        "--output-format=json",
        f"--filename={space.path}",
        f"--size={space.size}",
        f"--rw={_RW[point.op]}",
        f"--bs={point.block_size}",
        f"--ioengine={_ENGINES[point.backend]}",
        f"--iodepth={1 if point.backend == 'threads' else point.queue_depth}",
        f"--direct={int(point.direct is not False)}",
    ]
    if point.backend == "threads":
        command += [f"--numjobs={point.threads or 8}", "--thread", "--group_reporting", "--offset_increment=0"]
    if rates is not None:
        command += [f"--rate={round(rates[0])},{round(rates[1])}"]
    if seconds is not None:
        command += ["--time_based", f"--runtime={max(1, round(seconds))}"]
    environment = dict(os.environ, GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return record | {"why_not": (done.stderr or done.stdout).strip().splitlines()[-1]}
    # fio does not fall back: where it ran, it ran as it was told.
    return record | {"direct": point.direct is not False} | _figures(_report(done.stdout)["jobs"][0], space)


def _report(output: str) -> dict[str, Any]:
    return json.loads(output[output.index("{") :])  # fio puts notes in front


def _figures(job: dict[str, Any], space: Workspace) -> Record:
    read, write = job["read"], job["write"]
    space.written += write["io_bytes"]
    seconds = job["job_runtime"] / 1e3
    gigabytes = (read["io_bytes"] + write["io_bytes"]) / 1e9
    # usr_cpu and sys_cpu are percent of the run time
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return {
        "seconds": seconds,
        "gigabytes_per_second": (read["bw_bytes"] + write["bw_bytes"]) / 1e9,
        "cpu_seconds_per_gigabyte": cpu / gigabytes if gigabytes else None,
        "latency_microseconds": {
            op: {
                "p50": figures["clat_ns"]["percentile"]["50.000000"] / 1e3,
                "p99": figures["clat_ns"]["percentile"]["99.000000"] / 1e3,
                "max": figures["clat_ns"]["max"] / 1e3,
            }
            for op, figures in (("read", read), ("write", write))
            if figures["io_bytes"]
        },
    }
