"""Run a command where only so much memory is to be had, page cache included: a memory cgroup (version 1 or 2; root)."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_numbers = itertools.count()


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
    with _cgroup(limit) as folder:
        done = subprocess.run(
            ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(folder), *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "MEMORY_CGROUP": str(folder)},
        )
        v1 = folder.is_relative_to(_V1)
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


@contextmanager
def _cgroup(limit: int) -> Iterator[Path]:
    v1 = _V1.is_dir()
    root = _V1 if v1 else _V2
    if not v1 and "memory" not in (root / "cgroup.subtree_control").read_text().split():
        (root / "cgroup.subtree_control").write_text("+memory")
    folder = root / f"zinf-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit))
        yield folder
    finally:
        folder.rmdir()


def _fields(path: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
