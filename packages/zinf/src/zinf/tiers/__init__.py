"""How one flat tensor is put on a tier and fetched from it.

A tier keeps tensors by key (unit, kind). `first` counts elements from the start of the kept tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Wait:
    """The end of a transfer: call it to wait, ask `done()` not to. When it raises, no memory is in use any more.

    requests   of deepnvme's, or objects that have its wait() and done(); none: the transfer is over already
    """

    __slots__ = ("_requests",)

    def __init__(self, requests: Sequence[Any] = ()):
        self._requests = requests

    def __call__(self) -> None:
        try:
            for request in self._requests:
                request.wait()
        except Exception:
            self.settle()
            raise

    @classmethod
    def of_all(cls, waits: Iterable[Wait]) -> Wait:
        """The end of several transfers."""
        return cls([request for wait in waits for request in wait._requests])

    @property
    def crc32c(self) -> int | None:
        """Of what was moved, if one request has moved it all and a checksum was taken on the way."""
        return self._requests[0].crc32c if len(self._requests) == 1 else None

    def done(self) -> bool:
        return all(request.done() for request in self._requests)

    def settle(self) -> None:
        """Wait for the end, be it a failure: no memory is in use any more."""
        for request in self._requests:
            with contextlib.suppress(Exception):
                request.wait()


@dataclass(frozen=True)
class Key:
    """What a kept tensor is: of which unit (a number that is never used twice), and which kind of state."""

    unit: int
    kind: str
    """"param", "remainder", "master", "exp_avg", "exp_avg_sq", "grad", "full_grad" (of no_sync) or "activation"."""

    def __str__(self) -> str:
        return f"{self.unit}.{self.kind}"


class Tier(Protocol):
    """One place for flat tensors."""

    name: str

    def create(self, key: Key, numel: int, dtype: torch.dtype) -> None:
        """Make room; zeros. OSError(ENOSPC) when there is none."""

    def resident(self, key: Key) -> Tensor | None:
        """The kept tensor itself, where it can be used in place; else None."""

    def start_read(self, key: Key, out: Tensor, first: int = 0) -> Wait:
        """Fill `out` (n,) from element `first` on; returns the wait."""

    def start_write(self, key: Key, values: Tensor, first: int = 0, crc32c: int | None = None) -> Wait:
        """Keep `values` (n,) from element `first` on; they must not change until the wait returns.

        `crc32c`: of `values`, where it is known: who keeps checksums need not take it again.
        """

    def start_clear(self, key: Key, first: int, count: int) -> Wait:
        """Keep `count` zeros from element `first` on."""

    def free(self, key: Key) -> None:
        """The room may be used for something else."""

    def free_units(self, numbers: Set[int]) -> None:
        """The same, for all that is kept of these units."""

    def start_put(self, key: Key, values: Tensor) -> Wait:
        """Keep `values` (n,) as a whole, without `create`: for what lives shorter than a step."""

    def start_get(self, key: Key, out: Tensor) -> Wait:
        """Fill `out` (n,) with what was put; returns the wait."""

    def drop(self, key: Key) -> None:
        """Forget what was put, if it was."""


NO_WAIT = Wait()
