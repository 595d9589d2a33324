"""Run a command where only so much memory is to be had, page cache included: a memory cgroup (version 1 or 2; root)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cgroups import control_group, joining, version


@dataclass(frozen=True)
class Outcome:
    """What a command left: its status and output, and what its cgroup counted."""

    status: int
    output: str
    errors: str
    peak: int  # bytes of all memory of all its processes, page cache included, at the highest
    killed: int  # processes that the kernel killed for want of memory


def run_inside(limit: int, command: Sequence[str], *, timeout: float) -> Outcome:
    """Run `command` with at most `limit` bytes. Raises OSError when no cgroup can be made (not root, none mounted).

    MEMORY_CGROUP in its environment is the cgroup's folder, for `file_pages`.
    """
    limits = {1: {"memory.limit_in_bytes": [str(limit)]}, 2: {"memory.max": [str(limit)]}}
    with control_group("memory", limits) as folder:
        done = subprocess.run(
            joining(folder, command),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "MEMORY_CGROUP": str(folder)},
        )
        v1 = version("memory") == 1
        peak = int((folder / ("memory.max_usage_in_bytes" if v1 else "memory.peak")).read_text())
        events = _fields(folder / ("memory.oom_control" if v1 else "memory.events"))
        return Outcome(done.returncode, done.stdout, done.stderr, peak, events.get("oom_kill", 0))


def file_pages() -> int | None:
    """Bytes of page cache that this process's cgroup holds; None outside `run_inside`."""
    folder = os.environ.get("MEMORY_CGROUP")
    if folder is None:
        return None
    stat = _fields(Path(folder) / "memory.stat")
    return stat.get("cache", stat.get("file", 0))


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
