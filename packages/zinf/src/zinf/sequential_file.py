"""A file written from its beginning to its end, by direct I/O, behind the back of whoever makes its bytes."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

import deepnvme

_BUFFER_BYTES = 4 << 20
_BUFFERS = 6


class SequentialFile:
    """Bytes in, one after the other. OSError from the drive surfaces at a later `write` or in `finish`.

    nbytes   the length that the file will have: room for it is made at once
    """

    def __init__(self, path: Path, nbytes: int):
        self._io = deepnvme.Engine()
        try:
            self._file = deepnvme.File(path, "w", size=nbytes)
        except BaseException:
            self._io.close()
            raise
        self._free = deque(deepnvme.empty(_BUFFER_BYTES).torch() for _ in range(_BUFFERS))
        self._writing: deque[tuple[deepnvme.Request, Tensor]] = deque()
        self._open = self._free.popleft()
        self._filled = 0  # bytes of the open buffer
        self._offset = 0  # where it will lie

    def write(self, content: Tensor) -> None:
        """(n,) uint8 in host memory; free again on return."""
        done = 0
        while done < content.numel():
            count = min(content.numel() - done, _BUFFER_BYTES - self._filled)
            # By NumPy: torch would wake its other threads for this, and they spin beside the drive's for a while.
            self._open.numpy()[self._filled : self._filled + count] = content[done : done + count].numpy()
            self._filled += count
            done += count
            if self._filled == _BUFFER_BYTES:
                self._submit()
                self._open = self._next_buffer()

    def finish(self) -> None:
        """All bytes are on the drive, durably."""
        if self._filled:
            self._submit()
        while self._writing:
            self._writing.popleft()[0].wait()
        self._io.sync(self._file)
        self.close()

    def close(self) -> None:
        """Let go of it, whole or not."""
        with contextlib.suppress(OSError):  # of what has failed already
            self._io.close()
        self._file.close()
        self._writing.clear()

    def _submit(self) -> None:
        request = self._io.write(self._file, self._open[: self._filled], self._offset)
        self._writing.append((request, self._open))
        self._offset += self._filled
        self._filled = 0

    def _next_buffer(self) -> Tensor:
        if not self._free:
            request, buffer = self._writing.popleft()
            request.wait()
            self._free.append(buffer)
        return self._free.popleft()


def as_bytes(content: bytes) -> Tensor:
    """(n,) uint8 of Python's bytes; a copy."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
