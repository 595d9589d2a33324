"""What the last step did: seconds, bytes, memory, prefetches; and the floor below which no step can come."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch

from .spans import Span, covered

if TYPE_CHECKING:
    from zero3.partitioned_model import PartitionedModel

    from .offload_engine import OffloadEngine
    from .offloaded_adamw import AdamW

_BYTE_KINDS = ("parameters", "gradients", "optimizer", "activations")

# Bytes that Adam moves through memory for a parameter: with the split master, and with a float32 one.
_ADAM_BYTES = {torch.bfloat16: 26, torch.float32: 28, torch.float16: 30}


class Reporter:
    """Counts between the ends of two steps."""

    def __init__(self, engine: OffloadEngine):
        self._engine = engine
        self._began = time.perf_counter()
        self._between_steps = True
        self._last: dict[str, Any] | None = None

    def forward_begins(self) -> None:
        """A forward with gradients. The first one after a step begins the next: what came between counts for none."""
        if self._between_steps:
            self._between_steps = False
            self._began = time.perf_counter()
            self._engine.tiers.spans.take()
            if self._engine.tiers.nvme is not None:
                self._engine.tiers.nvme.take_traffic()

    def step_ended(self, model: PartitionedModel, optimizer: AdamW) -> None:
        """An optimizer step is over: make its report, count afresh."""
        now = time.perf_counter()
        spans = self._engine.tiers.spans.take()
        self._last = self._make(model, spans, now - self._began)
        self._last["grad_norm"] = optimizer.grad_norm
        self._between_steps = True

    def report(self, model: PartitionedModel) -> dict[str, Any]:
        """The last step's report; before the first step, one of what has happened so far."""
        if self._last is None:
            return self._make(model, [], time.perf_counter() - self._began, reset=False)
        return self._last

    def _make(self, model: PartitionedModel, spans: list[Span], seconds: float, reset: bool = True) -> dict[str, Any]:
        scheduler = model.scheduler
        measured = {stage: covered(spans, stage) for stage in ("nc", "cg", "gg", "reduce", "optimizer")}
        # An update may run while a unit is waited for (ahead of its use): that time is the optimizer's, not lost.
        measured["stall"] = covered(spans, "stall", "reduce", "optimizer") - measured["optimizer"]
        measured["compute"] = max(seconds - measured["stall"] - measured["optimizer"], 0.0)
        measured["step"] = seconds
        moved = self._bytes(reset)
        result = {
            "seconds": measured,
            "bytes": moved,
            "peak": self._peak(model),
            "prefetch": {"hits": scheduler.hits, "misses": scheduler.misses},
            "placement": self._placement(model),
            "limit": self._limit(model, measured, covered(spans, "nc", "write")),
            "io": self._io(),
            "grad_norm": None,  # before the first step
        }
        if reset:
            scheduler.hits = scheduler.misses = 0
        return result

    def _placement(self, model: PartitionedModel) -> dict[str, dict[str, str]]:
        """Every name of a parameter -> tiers of its states."""
        slots = [slot for unit in model.units for slot in unit.slots]
        return {name: self._engine.where(slot.unit) for slot in slots for name in slot.names}

    def _bytes(self, reset: bool) -> dict[str, Any]:
        by_kind = {kind: {"read": 0, "written": 0} for kind in _BYTE_KINDS}
        nvme = self._engine.tiers.nvme
        if nvme is not None:
            traffic = nvme.take_traffic() if reset else nvme.traffic
            for direction in ("read", "written"):
                for kind, nbytes in getattr(traffic, direction).items():
                    by_kind[kind][direction] += nbytes
        return {
            "nvme_read": sum(kind["read"] for kind in by_kind.values()),
            "nvme_written": sum(kind["written"] for kind in by_kind.values()),
            "by_kind": by_kind,
        }

    def _peak(self, model: PartitionedModel) -> dict[str, int]:
        """Bytes of gathered units (with shards that the device uses in place), and of all of ours in host memory."""
        tiers = self._engine.tiers
        in_place = sum(unit.nbytes for unit in model.units if unit.permanent)
        kept = sum(tier.peak_nbytes for tier in tiers.memory if tier.name == "cpu" or tiers.device.type == "cpu")
        return {
            "device": in_place + model.scheduler.working_set.peak_nbytes,
            "host": kept + tiers.host_pool.nbytes,
        }

    def _limit(self, model: PartitionedModel, seconds: dict[str, float], drive: float) -> dict[str, float]:
        """Seconds that each resource needs at least for such a step, at the rates that it showed.

        drive   in which a read or a write was on its way
        """
        trained = sum(unit.shard_numel * _ADAM_BYTES.get(unit.dtype, 0) for unit in model.units if unit.trainable)
        return {
            "compute": seconds["compute"],
            "drive": drive,
            "link": seconds["cg"] + seconds["gg"],
            "memory": trained / memory_bandwidth(),
        }

    def _io(self) -> dict[str, Any]:
        nvme = self._engine.tiers.nvme
        if nvme is None:
            return {"backend": None, "direct": None, "dirs": []}
        return {"backend": nvme.backend, "direct": nvme.direct, "dirs": list(nvme.dirs)}


@functools.cache
def memory_bandwidth() -> float:
    """Bytes a second that a copy moves through host memory, read and written; measured once."""
    source = torch.ones(16 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() / best
