"""How much of a file lies in the page cache (mincore), and how to get it out of there."""

from __future__ import annotations

import ctypes
import mmap
import os


def cached_nbytes(path: str) -> int:
    """Bytes of the file that the page cache holds, in whole pages."""
    size = os.path.getsize(path)
    if size == 0:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    # A private writable mapping is the one kind whose address Python gives away; nothing is written or read.
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as mapping:
        view = ctypes.c_char.from_buffer(mapping)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), resident)
        del view  # else the mapping cannot be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", path)
    return sum(flags & 1 for flags in resident) * mmap.PAGESIZE


def evict(path: str) -> None:
    """Writes the file's dirty pages back and drops all of them from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
