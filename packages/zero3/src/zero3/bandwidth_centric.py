"""How a unit is cut so that every rank's own link carries 1/dp of it (paper, 6.1). Pure arithmetic.

Every rank reads its own shard of every unit and the ranks all-gather; no rank owns a whole parameter. All
numbers here are counts of elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm, prod

# Each parameter starts at a multiple of this in its unit: 64 bytes for the narrowest element, so that
# vector loads never straddle two parameters, whatever the dtype.
PARAMETER_ALIGNMENT = 64


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def offsets_of(numels: Iterable[int]) -> tuple[list[int], int]:
    """Start of each parameter in the flat buffer, and the length of all together."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += round_up(numel, PARAMETER_ALIGNMENT)
    return offsets, end


@dataclass(frozen=True)
class Partition:
    """A flat buffer of `padded_numel` elements cut into `ranks` equal shards."""

    shard_numel: int
    ranks: int

    @classmethod
    def of(cls, numel: int, ranks: int, shard_multiple: int = PARAMETER_ALIGNMENT) -> Partition:
        """Cut `numel` elements over `ranks`; a shard is a multiple of `shard_multiple` long.

        A store on a drive asks for a multiple of the drive's block, so that a shard is read in place.
        """
        multiple = lcm(shard_multiple, PARAMETER_ALIGNMENT)
        return cls(max(round_up(-(-numel // ranks), multiple), multiple), ranks)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.ranks

    def bounds(self, rank: int) -> tuple[int, int]:
        """Where `rank`'s shard starts and ends in the flat buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def piece(self, rank: int, offset: int, numel: int) -> tuple[int, int]:
        """The part of the parameter at [offset, offset + numel) that lies in `rank`'s shard.

        Returns (start, stop) within the shard; equal when the shard holds none of it.
        """
        start, stop = self.bounds(rank)
        low = min(max(offset, start), stop)
        high = min(max(offset + numel, start), stop)
        return low - start, max(high, low) - start


def piece_shape(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Shape in which an optimizer sees `count` elements of a parameter of `shape`: the same ndim.

    A whole parameter keeps its shape. A part of it becomes (count, 1, ...): optimizers and parameter groups
    look at `ndim`, and a part of a matrix is in general no matrix.
    """
    if count == prod(shape):
        return tuple(shape)
    return (count,) + (1,) * (len(shape) - 1)
