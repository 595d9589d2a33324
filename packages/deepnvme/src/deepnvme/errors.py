"""Exceptions, and how their messages are composed."""

from __future__ import annotations

import errno
import os


class ClosedError(ValueError):
    """Used after close(), as Python's own files answer."""


class ForkedError(RuntimeError):
    """An engine was used in a forked child; its threads stayed in the parent."""


class ChecksumError(OSError):
    """What came back is not what was written (errno EIO); `name` is the tensor."""

    def __init__(self, name: str, path: str, offset: int, nbytes: int, expected: int, found: int) -> None:
        text = (
            f"tensor {name!r} is damaged: crc32c is {found:08x}, was {expected:08x} when it was written "
            f"({nbytes} bytes at offset {offset})"
        )
        super().__init__(errno.EIO, text, path)
        self.name = name


# What to try, where something general can be said.
_HINTS = {
    errno.ENOSPC: "free space on that filesystem, or use another directory",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "beyond the file-size limit (ulimit -f) or what the filesystem allows",
    errno.EINVAL: "direct I/O may not be possible there: try direct=False",
    errno.EMFILE: "the descriptor limit is reached: raise it (ulimit -n), or open fewer files at once",
}


def io_error(
    code: int, operation: str, path: str, offset: int, nbytes: int, moved: int = 0, note: str = ""
) -> OSError:
    """The OSError (or the subclass that belongs to `code`) of a failed transfer."""
    text = f"{os.strerror(code)}: {operation} of {nbytes} bytes at offset {offset}"
    if moved:
        text += f", failed after {moved} bytes"
    hint = note or _HINTS.get(code, "")
    if hint:
        text += f" ({hint})"
    return OSError(code, text, path)


def open_error(error: OSError, path: str, what: str) -> OSError:
    """The same failure, saying in words what was being done."""
    code = error.errno or errno.EIO
    hint = _HINTS.get(code, "") if code != errno.EINVAL else ""
    return OSError(code, f"{os.strerror(code)}: {what}" + (f" ({hint})" if hint else ""), path)
