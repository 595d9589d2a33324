"""Standard output that cannot be written: a redirection to a full drive."""

from __future__ import annotations

import errno
import os

_STANDARD_OUTPUT = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def words_for(error: OSError) -> str | None:
    """One line for a person, where `error` is of writing standard output; None of any other.

    What waits to be written there goes nowhere: Python would try again, and complain again, when it ends.
    """
    if error.errno not in _FULL or error.filename is not None:  # what we write to files names them
        return None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STANDARD_OUTPUT)
    os.close(nowhere)
    return f"Error: standard output cannot be written: {error.strerror}"
