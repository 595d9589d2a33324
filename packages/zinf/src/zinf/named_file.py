"""Errors of writing that name their file. What a buffered file raises on a full drive has only the system's words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def named_file(path: str | os.PathLike) -> Iterator[None]:
    """Let an OSError of the block that names no file name `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
