"""The folder of a run: what is made in it, what is taken back, and what an earlier run left there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from zinf.checkpoint_files import checkpoints
from zinf.training.faults import CannotStart, describe


@contextlib.contextmanager
def new_directories(*paths: Path) -> Iterator[None]:
    """Makes the directories, and takes back those it made when the body fails and leaves them empty.

    Raises CannotStart when one cannot be made or written.
    """
    made: list[Path] = []
    try:
        try:
            for path in paths:
                made += _make(path)
                check_writable(path)
        except OSError as error:
            raise CannotStart(describe(error)) from error
        yield
    except BaseException:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # not empty: something of worth was written
                path.rmdir()
        raise


def check_writable(directory: Path) -> None:
    """Raises OSError (FileNotFoundError, NotADirectoryError, PermissionError) unless files can be made there."""
    os.listdir(directory)  # the system's own words for what is missing or is no directory
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "no permission to write here", str(directory))


def set_aside_earlier_run(out: Path) -> Path | None:
    """Moves the checkpoints and metrics of an earlier run in `out` into `out`/earlier-N; None when there are none.

    Nothing is deleted and nothing is mixed: checkpoints of two runs in one folder could not be told apart.
    """
    present = [*checkpoints(out), *out.glob("metrics.jsonl")]
    if not present:
        return None
    number = 1
    while (out / f"earlier-{number}").exists():
        number += 1
    target = out / f"earlier-{number}"
    target.mkdir()
    for path in present:
        path.rename(target / path.name)
    return target


def _make(path: Path) -> list[Path]:
    """Makes `path` and the parents it lacks; returns those that were made here, outermost first.

    The ranks of a run make the same ones at the same time: each is made by one, and only that one takes it back.
    """
    missing, made = [], []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        try:
            directory.mkdir()
        except FileExistsError:
            if not directory.is_dir():
                raise
        else:
            made.append(directory)
    return made
