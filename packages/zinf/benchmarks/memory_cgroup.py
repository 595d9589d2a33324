"""Run a command where only so much memory is to be had, page cache included: a memory cgroup (version 1 or 2; root)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@dataclass(frozen=True)
class Group:
    """A memory cgroup that lives."""

    folder: Path

    @property
    def peak(self) -> int:
        """As Outcome's, so far."""
        v1 = version("memory") == 1
        return int((self.folder / ("memory.max_usage_in_bytes" if v1 else "memory.peak")).read_text())

    @property
    def killed(self) -> int:
        v1 = version("memory") == 1
        return _fields(self.folder / ("memory.oom_control" if v1 else "memory.events")).get("oom_kill", 0)


@contextmanager
def memory_group(limit: int | None = None) -> Iterator[Group]:
    """A group for at most `limit` bytes. Raises OSError when none can be made (not root, none mounted)."""
    bound = [] if limit is None else [str(limit)]
    limits = {1: {"memory.limit_in_bytes": bound}, 2: {"memory.max": bound}}
    with control_group("memory", limits) as folder:
        yield Group(folder)


def run_inside(limit: int, command: Sequence[str], *, timeout: float) -> Outcome:
    """Run `command` with at most `limit` bytes. Raises OSError when no cgroup can be made (not root, none mounted).

    MEMORY_CGROUP in its environment is the cgroup's folder, for `file_pages`.
    """
    with memory_group(limit) as group:
        done = subprocess.run(
            joining(group.folder, command),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "MEMORY_CGROUP": str(group.folder)},
        )
        return Outcome(done.returncode, done.stdout, done.stderr, group.peak, group.killed)


def file_pages() -> int | None:
    """Bytes of page cache that this process's cgroup holds; None outside `run_inside`."""
    folder = os.environ.get("MEMORY_CGROUP")
    if folder is None:
        return None
    stat = _fields(Path(folder) / "memory.stat")
    return stat.get("cache", stat.get("file", 0))


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
