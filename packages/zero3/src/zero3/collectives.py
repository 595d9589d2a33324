"""All-gather and reduce-scatter of flat tensors, asynchronous, with an identity.

gloo's own reduce-scatter is an all-reduce in disguise (twice the bytes) and its all-gather is 3-4 times slower
than point-to-point messages; so on gloo both are made of isend/irecv. Those carry a tag: the unit's number. Two
ranks that gather units in different order therefore never mix them up; where one does not come at all, the wait
ends after `timeout` in an error that names the unit. Other backends (nccl) use their own collectives.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import RankMismatchError

# Tags of one unit: one for its gathers, one for its reductions.
_GATHER, _REDUCE = 0, 1


class Ranks:
    """The data-parallel group, or a single process without one.

    group     a ProcessGroup; None: the default group when torch.distributed is initialised, else one rank
    timeout   seconds after which a rank that does not come is an error
    """

    def __init__(self, group: Any = None, timeout: float = 300.0):
        if not (isinstance(timeout, int | float) and timeout > 0):
            raise ValueError(f"timeout={timeout!r} is not a positive number of seconds")
        self.timeout = timeout
        if group is None and not (dist.is_available() and dist.is_initialized()):
            self.group: Any = None
            self.rank, self.size, self.backend = 0, 1, ""
            return
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.backend = dist.get_backend(self.group)

    @property
    def point_to_point(self) -> bool:
        return self.backend == "gloo"

    def peers(self) -> list[int]:
        """The other ranks, each rank beginning at its own successor, so that no rank is everybody's first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        return dist.isend(_bytes(tensor), dist.get_global_rank(self.group, to), group=self.group, tag=tag)

    def receive(self, tensor: Tensor, sender: int, tag: int) -> Any:
        return dist.irecv(_bytes(tensor), dist.get_global_rank(self.group, sender), group=self.group, tag=tag)

    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Rank 0's `tensor` to all, in place."""
        if self.size > 1:
            work = dist.broadcast(_bytes(tensor), group=self.group, group_src=0, async_op=True)
            self.wait(work, what)

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Sum of `tensor` over all ranks, in place."""
        if self.size > 1:
            self.wait(dist.all_reduce(tensor, group=self.group, async_op=True), what)
        return tensor

    def maximum(self, tensor: Tensor, what: str) -> Tensor:
        """Element-wise maximum of `tensor` over all ranks, in place."""
        if self.size > 1:
            self.wait(dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True), what)
        return tensor

    def wait(self, work: Any, what: str) -> None:
        """Wait for `work`; RankMismatchError naming `what` when the others do not come."""
        try:
            if self.point_to_point:
                work.wait(datetime.timedelta(seconds=self.timeout))
            else:
                work.wait()
        except RuntimeError as error:
            raise RankMismatchError(
                f"rank {self.rank} of {self.size} waited for the others at: {what}. Either a rank failed, or the "
                f"ranks use different modules in this step. Experts whose use differs between ranks belong into "
                f"one unit: zero3.as_unit(module). ({error})"
            ) from error


Wait = Callable[[], None]


def all_gather(ranks: Ranks, flat: Tensor, own: Tensor, tag: int, what: str) -> Wait:
    """Fill `flat` (size · n,) with every rank's `own` (n,), which is already in place; returns the wait."""
    if ranks.size == 1:
        return lambda: None
    if not ranks.point_to_point:
        work = dist.all_gather_into_tensor(flat, own, group=ranks.group, async_op=True)
        return lambda: ranks.wait(work, what)
    slices = flat.view(ranks.size, -1)
    tag = 2 * tag + _GATHER
    works = [ranks.receive(slices[peer], peer, tag) for peer in ranks.peers()]
    works += [ranks.send(own, peer, tag) for peer in ranks.peers()]

    def wait() -> None:
        for work in works:
            ranks.wait(work, what)

    return wait


def reduce_scatter(
    ranks: Ranks, flat: Tensor, scratch: Callable[[int], Tensor], tag: int, what: str
) -> Callable[[], Tensor]:
    """Mean over the ranks of this rank's slice of `flat` (size · n,).

    `scratch(numel)` gives a flat tensor of the dtype of `flat` for what arrives; both are overwritten. Returns a wait
    that yields the mean (n,): in float32 where the wire carries a narrower type, summed in the order of the ranks, so
    that the result depends on nothing but the numbers.
    """
    size, rank = ranks.size, ranks.rank
    slices = flat.view(size, -1)
    if size == 1:
        return lambda: slices[0]
    if not ranks.point_to_point:
        received = scratch(flat.numel()).view(size, -1)
        exchange = dist.all_to_all_single(received.view(-1), flat, group=ranks.group, async_op=True)

        def wait_for_all() -> Tensor:
            ranks.wait(exchange, what)
            return _mean(list(received))

        return wait_for_all
    received = scratch(slices[0].numel() * (size - 1)).view(size - 1, -1)
    tag = 2 * tag + _REDUCE
    parts: list[Tensor] = [slices[rank]] * size
    works = []
    for row, peer in enumerate(ranks.peers()):
        parts[peer] = received[row]
        works.append(ranks.receive(received[row], peer, tag))
    works += [ranks.send(slices[peer], peer, tag) for peer in ranks.peers()]

    def wait() -> Tensor:
        for work in works:
            ranks.wait(work, what)
        return _mean(parts)

    return wait


def all_reduce_mean(ranks: Ranks, flat: Tensor, what: str) -> Wait:
    """Mean of `flat` over the ranks, in place; for replicated states."""
    if ranks.size == 1:
        return lambda: None
    work = dist.all_reduce(flat, group=ranks.group, async_op=True)

    def wait() -> None:
        ranks.wait(work, what)
        flat.div_(ranks.size)

    return wait


def _mean(parts: list[Tensor]) -> Tensor:
    """Overwrites the first part, unless that is too narrow to add up in."""
    total = parts[0] if parts[0].dtype.itemsize >= 4 else parts[0].to(torch.float32)
    for part in parts[1:]:
        total.add_(part)
    return total.div_(len(parts))


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as uint8: gloo knows fewer types than torch."""
    if tensor.dtype == torch.uint8:
        return tensor
    flat = tensor.detach().view(-1)
    if flat.stride(0) != 1:  # of a single element, whose stride may be any
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)
