"""Tier `nvme`: tensors on one or several drives, through deepnvme's Swap.

A tensor is kept as pieces of `PIECE` elements, so that the optimizer can stream a large unit through a small
buffer, and a large read keeps several requests in flight. Every piece has its own checksum.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

import deepnvme

from ..errors import ConfigError
from ..spans import Spans
from . import NO_WAIT, Key, Wait

# Elements of a piece: 4 MiB of bfloat16, 8 MiB of float32, the request sizes that fill a drive. Whoever reads or
# writes a part of a tensor begins at a multiple of it.
PIECE = 2 << 20

# All other kinds belong to the optimizer.
_KINDS = {"param": "parameters", "grad": "gradients", "full_grad": "gradients", "activation": "activations"}


@dataclass
class Traffic:
    """Bytes moved since the last reset, by kind of state."""

    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)

    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # a checkpoint is read by a thread

    def count(self, direction: str, kind: str, nbytes: int) -> None:
        counter = getattr(self, direction)
        name = _KINDS.get(kind, "optimizer")
        with self._lock:
            counter[name] = counter.get(name, 0) + nbytes


class NvmeTier:
    """Tensors in private swap space, gone when the process ends.

    OSError from the drive (errno, path, offset) surfaces at the wait, and names the piece. ConfigError where there is
    no room for a tensor: room is made before training begins.
    """

    name = "nvme"

    def __init__(self, dirs: Sequence[str], checksum: bool, spans: Spans):
        self.dirs = tuple(dirs)
        self._engine = deepnvme.Engine()
        self._swap = deepnvme.Swap(list(dirs), checksum=checksum, engine=self._engine)
        self._spans = spans
        self._sizes: dict[Key, tuple[int, torch.dtype]] = {}
        self.traffic = Traffic()
        self.nbytes = 0
        self._closed = False

    @property
    def backend(self) -> str:
        """The drive engine in force."""
        return self._engine.backend

    @property
    def direct(self) -> bool | None:
        """Whether transfers pass the page cache by; None before the first."""
        return self._engine.direct

    @property
    def moved(self) -> int:
        """Bytes that the drives have read and written so far; `traffic` counts a transfer when it begins."""
        stats = self._engine.stats()
        return stats.bytes_read + stats.bytes_written

    def take_traffic(self) -> Traffic:
        """Bytes since the last call."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic

    def create(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """Room is reserved by writing zeros once: the first write of a block is slow, and no step pays for it."""
        if self._sizes.get(key) == (numel, dtype):
            return
        self.free(key)
        self._sizes[key] = (numel, dtype)
        try:
            for request in self._put_zeros(key, 0, numel):
                request.wait()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ConfigError(
                f"no room for the training state on {', '.join(self.dirs)}: free some, name another directory, "
                f"or add a drive ({error})"
            ) from error
        self.nbytes += numel * dtype.itemsize

    def resident(self, key: Key) -> Tensor | None:
        return None

    def start_read(self, key: Key, out: Tensor, first: int = 0) -> Wait:
        pieces = self._pieces(key, first, out.numel())
        requests = [self._swap.get(name, out=out[start - first : stop - first]) for name, start, stop in pieces]
        return self._watch("read", key, requests, out.nbytes)

    def start_write(self, key: Key, values: Tensor, first: int = 0, crc32c: int | None = None) -> Wait:
        pieces = self._pieces(key, first, values.numel())
        known = crc32c if len(pieces) == 1 else None  # each piece has its own
        requests = [
            self._swap.put(name, values[start - first : stop - first], crc32c=known) for name, start, stop in pieces
        ]
        return self._watch("written", key, requests, values.nbytes)

    def start_clear(self, key: Key, first: int, count: int) -> Wait:
        requests = self._put_zeros(key, first, count)
        return self._watch("written", key, requests, count * self._sizes[key][1].itemsize)

    def free(self, key: Key) -> None:
        if key in self._sizes and not self._closed:
            numel, dtype = self._sizes.pop(key)
            for name, _, _ in self._named(key, numel):
                self._swap.pop(name)
            self.nbytes -= numel * dtype.itemsize

    def free_units(self, numbers: Set[int]) -> None:
        for key in [key for key in self._sizes if key.unit in numbers]:
            self.free(key)

    def start_put(self, key: Key, values: Tensor) -> Wait:
        return self._watch("written", key, [self._swap.put(str(key), values)], values.nbytes)

    def start_get(self, key: Key, out: Tensor) -> Wait:
        return self._watch("read", key, [self._swap.get(str(key), out=out)], out.nbytes)

    def drop(self, key: Key) -> None:
        if not self._closed:
            with contextlib.suppress(KeyError):
                self._swap.pop(str(key))

    def close(self) -> None:
        self._closed = True
        self._swap.close()
        self._engine.close()

    def _named(self, key: Key, numel: int) -> list[tuple[str, int, int]]:
        return [
            (f"{key}.{start // PIECE}", start, min(start + PIECE, numel)) for start in range(0, max(numel, 1), PIECE)
        ]

    def _pieces(self, key: Key, first: int, count: int) -> list[tuple[str, int, int]]:
        numel, _ = self._sizes[key]
        stop = first + count
        if first % PIECE or (stop % PIECE and stop != numel):
            raise AssertionError(f"{key}: [{first}, {stop}) of {numel} does not begin and end with a piece")
        return [piece for piece in self._named(key, numel) if piece[1] >= first and piece[2] <= stop]

    def _put_zeros(self, key: Key, first: int, count: int) -> list[deepnvme.Request]:
        _, dtype = self._sizes[key]
        requests = []
        for name, start, stop in self._pieces(key, first, count):
            zeros = _zeros(stop - start, dtype)
            requests.append(self._swap.put(name, zeros, crc32c=_crc32c_of_zeros(zeros.nbytes)))
        return requests

    def _watch(self, direction: str, key: Key, requests: list, nbytes: int) -> Wait:
        self.traffic.count(direction, key.kind, nbytes)
        if not requests:
            return NO_WAIT
        ended = self._spans.begin("nc" if direction == "read" else "write", str(key))
        requests[-1].add_done_callback(lambda _: ended())
        return Wait(requests)


_standing_zeros = torch.empty(0, dtype=torch.uint8)


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """(numel,) to be written only."""
    global _standing_zeros
    nbytes = numel * dtype.itemsize
    if _standing_zeros.numel() < nbytes:
        _standing_zeros = deepnvme.empty(nbytes).torch().zero_()
    return _standing_zeros[:nbytes].view(dtype)


@functools.cache
def _crc32c_of_zeros(nbytes: int) -> int:
    return deepnvme.crc32c(_zeros(nbytes, torch.uint8))
