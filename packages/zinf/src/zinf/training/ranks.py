"""This process among the processes of a run: started alone, or by `torchrun` as one rank of several."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Who we are, how many there are, and on which device we compute."""

    rank: int
    count: int
    device: torch.device

    @classmethod
    def join(cls) -> Ranks:
        """Takes the place that the environment names (RANK, WORLD_SIZE, as torchrun sets them); alone without it.

        The accelerator is used where there is one, a different one by each rank of a machine; else the CPU and gloo.
        """
        device = torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and torch.accelerator.is_available():
            index = int(os.environ.get("LOCAL_RANK", "0"))
            torch.accelerator.set_device_index(index)
            device = torch.device(accelerator.type, index)
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls(0, 1, device)
        backend = "gloo"
        if device.type != "cpu":
            # gloo as well: shards and short messages that lie in host memory travel by it.
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        dist.init_process_group(backend)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def hosts(self) -> int:
        """Machines that the ranks are on, as many on each."""
        return self.count // int(os.environ.get("LOCAL_WORLD_SIZE", self.count))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch that all ranks have drawn alike, on our device."""
        return batch.chunk(self.count)[self.rank].to(self.device)

    def mean(self, value: float) -> float:
        """The mean of every rank's value, the same on each. Collective."""
        if self.count == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / self.count

    def first_fault(self, fault: str | None) -> str | None:
        """The fault of the lowest rank that has one, told to all, so that none waits for a rank that gave up.

        Collective.
        """
        if self.count == 1:
            return fault
        faults: list[str | None] = [None] * self.count
        dist.all_gather_object(faults, fault)
        return next((f"rank {rank}: {text}" if rank else text for rank, text in enumerate(faults) if text), None)

    def leave(self) -> None:
        """Ends the process group, when all went well."""
        if self.count > 1 or dist.is_initialized():
            dist.destroy_process_group()
