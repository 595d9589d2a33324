"""A control group of one's own, version 1 or 2, that holds some processes to so much memory or drive. Needs root."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deepnvme.sizes import parse_size

_ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()


def version(controller: str) -> int:
    """1 where `controller` (by its name in version 1) is mounted so, else 2."""
    return 1 if (_ROOT / controller).is_dir() else 2


@contextmanager
def control_group(controller: str, limits: Mapping[int, Mapping[str, Sequence[str]]]) -> Iterator[Path]:
    """The folder of a new group, gone afterwards.

    controller   by its name in version 1: "memory", "blkio"
    limits       version -> file -> lines that are written into it

    OSError when no group can be made (not root, none mounted). Its processes must have ended at the end.
    """
    found = version(controller)
    root = _ROOT / controller if found == 1 else _ROOT
    if found == 2:
        name = {"blkio": "io"}.get(controller, controller)
        if name not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text(f"+{name}")
    folder = root / f"zinf-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    try:
        for file, lines in limits[found].items():
            for line in lines:
                (folder / file).write_text(line)
        yield folder
    finally:
        folder.rmdir()


@contextmanager
def link(directory: str, rate: int) -> Iterator[Path]:
    """The folder of a group whose processes read and write the drive of `directory` at `rate` bytes a second each."""
    disk = _disk_of(directory)
    v1 = {f"blkio.throttle.{way}_bps_device": [f"{disk} {rate}"] for way in ("read", "write")}
    with control_group("blkio", {1: v1, 2: {"io.max": [f"{disk} rbps={rate} wbps={rate}"]}}) as folder:
        yield folder


def _disk_of(directory: str) -> str:
    """ "major:minor" of the whole drive that holds `directory`: of a partition nothing can be limited."""
    device = os.stat(directory).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    return ((block.parent if (block / "partition").exists() else block) / "dev").read_text().strip()


def joining(folder: Path, command: Sequence[str]) -> list[str]:
    """`command`, run in the group: it and all that it starts."""
    return ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(folder), *command]


def add_link(parser: argparse.ArgumentParser) -> None:
    """The flag `--link` of a benchmark that can run with its drive held to a rate."""
    parser.add_argument("--link", metavar="RATE", help="bytes a second that the drive is held to, each way; needs root")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def go_on_link(given: argparse.Namespace) -> None:
    """Where a link was asked for: run this script once more on it, and exit with its status."""
    if given.link and not given.inside:
        with link(given.nvme, parse_size(given.link)) as folder:
            command = joining(folder, [sys.executable, *sys.argv, "--inside"])
            sys.exit(subprocess.run(command).returncode)
