"""The infinity offload engine (paper, 5.1 and 6.3): a shard store over three tiers.

zero3 asks it for shards of parameters and gives it gradients; the optimizer asks it for all states of a unit. It
knows on which tier each kind of each unit's state lies, and nothing of modules or of when things happen.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import deepnvme
from zero3.buffer_pool import PooledBuffer
from zero3.errors import UnsupportedError
from zero3.partition_model import model_of
from zero3.partitioned_model import PartitionedModel
from zero3.shard_store import ShardStore
from zero3.unit import Unit

from . import unit_states
from .companion_files import Companions
from .config import Config
from .errors import CheckpointError
from .placement import Placement
from .step_report import Reporter
from .tier_set import TierSet
from .tiers import Key, Tier, Wait
from .tiers.nvme import PIECE

if TYPE_CHECKING:
    from .activation_offload import ActivationStore
    from .background_save import BackgroundSave
    from .offloaded_adamw import AdamW
    from .optimizer_in_step import UpdateInStep

# Elements: 4096 bytes of the narrowest state (2 bytes wide): O_DIRECT reads and writes every shard in place.
_SHARD_MULTIPLE = 2048

# Of a waiting gradient's memory: the tensor that is kept, and the storage object that the question makes.
_OWN_USES = 2


class OffloadEngine(ShardStore):
    """The shard store of one model.

    optimizer   the zinf.AdamW that updates the units; None before it is made, and with torch's own optimizers
    updates     its decision when the updates of this model run
    """

    shard_multiple = _SHARD_MULTIPLE

    def __init__(self, config: Config, placement: Placement, tiers: TierSet):
        self.config = config
        self.placement = placement
        self.tiers = tiers
        self.pool = tiers.device_pool
        self.optimizer: AdamW | None = None
        self.updates: UpdateInStep | None = None
        self._numbers: dict[Unit, int] = {}
        self.numbers: set[int] = set()  # the same, for whoever must not hold the units
        self._resident_left = placement.resident if "nvme" in (placement.params, placement.optimizer) else 0
        self._resident: set[Unit] = set()
        self._sums: set[Unit] = set()  # units that accumulate: their gradient waits in float32 from then on
        self._waiting: set[Unit] = set()  # units with a gradient that waits
        self._grad_writes: list[tuple[Wait, PooledBuffer]] = []
        self._full_gradients: dict[Unit, torch.dtype] = {}  # of no_sync, that wait
        self._looked_at: dict[Unit, tuple[Tensor, int]] = {}  # gradients that user code has, crc32c as read
        self._with_moments: set[Unit] = set()
        self._lent: dict[Unit, Tensor] = {}  # masters in the hands of a torch optimizer
        self.reporter = Reporter(self)
        self.newest_checkpoint: str | None = None
        self.saving: BackgroundSave | None = None  # a checkpoint that is on its way
        self.companions: Companions = {}  # configuration, tokenizer, ... that the model's weights came with
        self._half_loaded: dict[str, str] = {}  # "values", "moments": from where they came in part

    # -- where things lie ------------------------------------------------------------------------------------

    def key(self, unit: Unit, kind: str) -> Key:
        return Key(self._numbers[unit], kind)

    def tier(self, unit: Unit, kind: str) -> Tier:
        """The tier of a kind of state of `unit`."""
        return self.tiers.of(self.tier_name(unit, kind))

    def tier_name(self, unit: Unit, kind: str) -> str:
        if kind == "grad":
            return self.placement.grads
        placed = self.placement.params if kind == "param" else self.placement.optimizer
        return "cpu" if placed == "nvme" and unit in self._resident else placed

    def in_place(self, unit: Unit, kind: str) -> Tensor | None:
        """The kept tensor, where host code can use it in place."""
        kept = self.tier(unit, kind).resident(self.key(unit, kind))
        return kept if kept is not None and kept.device.type == "cpu" else None

    # -- ShardStore ------------------------------------------------------------------------------------------

    def adopt(self, unit: Unit, shard: Tensor) -> None:
        self._numbers[unit] = self.tiers.number()
        self.numbers.add(self._numbers[unit])
        kinds = unit_states.update_kinds(unit.dtype) if unit.trainable else unit_states.value_kinds(unit.dtype)
        nbytes = unit.shard_numel * sum(dtype.itemsize for dtype in kinds.values())
        if nbytes <= self._resident_left:
            self._resident_left -= nbytes
            self._resident.add(unit)
        for kind, dtype in unit_states.value_kinds(unit.dtype).items():
            self.tier(unit, kind).create(self.key(unit, kind), unit.shard_numel, dtype)
        self._put_values(unit, shard, 0)

    def forget(self, unit: Unit) -> None:
        if unit in self._numbers:
            self.before_change(unit)
            for kind in (*unit_states.update_kinds(unit.dtype), "grad"):
                self.tier(unit, kind).free(self.key(unit, kind))
            self.drop_gradient(unit)
            self.drop_full_gradient(unit)
            self.numbers.discard(self._numbers.pop(unit))
            self._with_moments.discard(unit)

    def resident(self, unit: Unit) -> Tensor | None:
        if not self.placement.shards_stay_in_place and unit not in self._resident:
            return None
        kept = self.tier(unit, "param").resident(self.key(unit, "param"))
        return kept if kept is not None and kept.device.type == unit.device.type else None

    def start_read(self, unit: Unit, out: Tensor) -> Callable[[], None]:
        if self.updates is not None and self.updates.owes(unit):
            return self.updates.start_update(unit, out)
        tier, key = self.tier(unit, "param"), self.key(unit, "param")
        if out.device.type == "cpu" or tier.resident(key) is not None:
            return tier.start_read(key, out)
        return self._read_through_host(tier, key, out)

    def _read_through_host(self, tier: Tier, key: Key, out: Tensor) -> Wait:
        """nc then cg: the drive fills pinned host memory, a copy brings it to the device."""
        buffer = self.tiers.host_pool.take(out.nbytes, str(key))
        arrived = tier.start_read(key, buffer.flat(out.numel(), out.dtype))
        return _ThroughHost(self.tiers, key, arrived, buffer, out)

    def before_use(self, unit: Unit) -> None:
        if self.updates is not None:
            self.updates.bring_up_to_date(unit)

    def write_back(self, unit: Unit, values: Tensor, start: int, stop: int) -> None:
        """The master takes exactly the visible values: what was not visible of it (the remainder) is gone."""
        if stop <= start:
            return
        self.before_use(unit)
        if self.updates is not None:
            self.updates.values_change(unit)
        first, last = start // PIECE * PIECE, min(-(-stop // PIECE) * PIECE, unit.shard_numel)
        for begin in range(first, last, PIECE):
            end = min(begin + PIECE, last)
            whole = self._values(unit, begin, end)
            low, high = max(start, begin), min(stop, end)
            whole[low - begin : high - begin] = values[low - start : high - start].to("cpu", whole.dtype)
            self._put_values(unit, whole, begin)

    def master(self, unit: Unit) -> Tensor:
        self.before_use(unit)
        out = torch.empty(unit.shard_numel, dtype=unit.master_dtype, device=unit.device)
        for start, stop in pieces(unit.shard_numel):
            out[start:stop] = self._values(unit, start, stop).to(unit.device)
        return out

    def gradient_arrived(self, unit: Unit, shard: Tensor) -> None:
        self.before_use(unit)  # an update that still owns the last gradient
        if self.updates is not None and self.updates.gradient_arrived(unit, shard):
            return
        self.keep_gradient(unit, shard)

    def gradient(self, unit: Unit) -> Tensor | None:
        if unit not in self._waiting:
            return None
        self.before_use(unit)  # what is written into it from now on comes behind the step that owns it
        kept = self.tier(unit, "grad").resident(self.key(unit, "grad"))
        if kept is not None:
            return kept
        if unit not in self._looked_at:
            gradient = self.read_gradient(unit)
            self._looked_at[unit] = gradient, deepnvme.crc32c(gradient)
        return self._looked_at[unit][0]

    def gradient_is_held(self, unit: Unit) -> bool:
        """Whether user code has kept the gradient that waits, and so could write into it without asking."""
        kept = self.tier(unit, "grad").resident(self.key(unit, "grad"))
        looked_at = kept if kept is not None else self._looked_at.get(unit, (None,))[0]
        if looked_at is None:
            return False
        return torch._C._storage_Use_Count(looked_at.untyped_storage()._cdata) > _OWN_USES

    def drop_gradient(self, unit: Unit) -> None:
        self._waiting.discard(unit)
        self._looked_at.pop(unit, None)

    def check_gradient(self, unit: Unit) -> None:
        if self.updates is not None:
            self.updates.check_gradient(unit)

    def keep_full_gradient(self, unit: Unit, flat: Tensor) -> None:
        self._full_gradients[unit] = flat.dtype
        tier, key = self.tier(unit, "grad"), self.key(unit, "full_grad")
        if tier.name == "nvme":
            self._write_grad_behind(tier.start_put, key, flat, flat.dtype)
        else:
            tier.start_put(key, flat)()

    def take_full_gradient(self, unit: Unit) -> Tensor:
        self._finish_grad_writes()
        flat = torch.empty(unit.padded_numel, dtype=self._full_gradients[unit])
        self.tier(unit, "grad").start_get(self.key(unit, "full_grad"), flat)()
        self.drop_full_gradient(unit)
        return flat.to(unit.device)

    def drop_full_gradient(self, unit: Unit) -> None:
        if self._full_gradients.pop(unit, None) is not None:
            self._finish_grad_writes()
            self.tier(unit, "grad").drop(self.key(unit, "full_grad"))

    def optimizer_shards(self, unit: Unit) -> Tensor:
        if self.placement.optimizer == "nvme":
            raise UnsupportedError(
                "the optimizer states are placed on nvme: only zinf.AdamW keeps its states there. Use it, or place "
                "the optimizer on 'cpu' or 'device'."
            )
        self._lent[unit] = self.master(unit)
        return self._lent[unit]

    def optimizer_done(self, unit: Unit) -> None:
        self._put_values(unit, self._lent.pop(unit), 0)

    def before_change(self, unit: Unit) -> None:
        """States of `unit` are about to change: a checkpoint on its way gets them as they were."""
        if self.saving is not None:
            with self.tiers.spans.running("stall", f"saving {unit.name}"):
                self.saving.before_change(unit)

    @contextmanager
    def loading(self, source: str | os.PathLike, moments: bool, all_values: bool = True) -> Iterator[None]:
        """Values, and `moments`, come from `source`. Where the block fails, they are in part those of before.

        all_values   none of before is left in the end
        """
        kinds = {"values", "moments"} if moments and self._with_moments else {"values"}
        before, self._half_loaded = self._half_loaded, {**self._half_loaded, **dict.fromkeys(kinds, os.fspath(source))}
        yield
        self._half_loaded = {kind: half for kind, half in before.items() if kind not in kinds or not all_values}

    def refuse_half_loaded(self) -> None:
        """CheckpointError where states of two sources would be taken for one model's."""
        if not self._half_loaded:
            return
        kind = "moments" if "moments" in self._half_loaded else "values"  # weights bring no moments
        raise CheckpointError(
            f"loading {self._half_loaded[kind]} has failed half-way: the model's {kind} are in part of it, and in part "
            f"those of before. Load {'weights or ' if kind == 'values' else ''}a checkpoint that is whole"
        )

    # -- values ----------------------------------------------------------------------------------------------

    def _values(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Master values [start, stop) of the shard, on the CPU; a copy. `start` is a multiple of PIECE."""
        kinds = unit_states.value_kinds(unit.dtype)
        parts = {kind: self.read(unit, kind, dtype, start, stop) for kind, dtype in kinds.items()}
        return unit_states.join(unit.dtype, parts)

    def _put_values(self, unit: Unit, values: Tensor, first: int) -> None:
        """Keep master values from element `first` (a multiple of PIECE) on."""
        self.before_change(unit)
        for start, stop in pieces(values.numel()):
            parts = unit_states.split(unit.dtype, values[start:stop].to("cpu"))
            for kind, part in parts.items():
                self.tier(unit, kind).start_write(self.key(unit, kind), part, first + start)()

    def read(self, unit: Unit, kind: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """[start, stop) of a kind of state, on the CPU; a copy."""
        out = torch.empty(stop - start, dtype=dtype)
        self.tier(unit, kind).start_read(self.key(unit, kind), out, start)()
        return out

    def write(self, unit: Unit, kind: str, values: Tensor, start: int) -> None:
        """Keep `values` from element `start` (a multiple of PIECE) on."""
        self.start_write(unit, kind, values, start)()

    def start_write(self, unit: Unit, kind: str, values: Tensor, start: int, crc32c: int | None = None) -> Wait:
        """As `write`, behind the caller's back; see Tier.start_write."""
        self.before_change(unit)
        return self.tier(unit, kind).start_write(self.key(unit, kind), values, start, crc32c)

    def start_clear(self, unit: Unit, kind: str, start: int, count: int) -> Wait:
        """As `start_write` of zeros."""
        self.before_change(unit)
        return self.tier(unit, kind).start_clear(self.key(unit, kind), start, count)

    @contextmanager
    def host_buffer(self, numel: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """(numel,) host memory from the pool, inside the block."""
        buffer = self.tiers.host_pool.take(numel * dtype.itemsize, "staging")
        part = buffer.flat(numel, dtype)
        try:
            yield part
        finally:
            del part
            self.tiers.host_pool.give_back(buffer)

    def create_moments(self, unit: Unit) -> None:
        """Room for the moments; zeros. Harmless when they exist."""
        if unit in self._with_moments:
            return
        self._with_moments.add(unit)
        for kind in unit_states.MOMENTS:
            self.tier(unit, kind).create(self.key(unit, kind), unit.shard_numel, torch.float32)

    def forget_moments(self) -> None:
        """The optimizer that had charge is gone. Gradients that wait are the parameters', and stay."""
        self.optimizer = self.updates = None
        self._sums &= self._waiting
        for unit in self._with_moments:
            self.before_change(unit)
            for kind in unit_states.MOMENTS:
                self.tier(unit, kind).free(self.key(unit, kind))
        self._with_moments.clear()
        self._half_loaded.pop("moments", None)

    def has_moments(self, unit: Unit) -> bool:
        """Whether an optimizer has ever had charge of `unit`; what is frozen from the start has no moments."""
        return unit in self._with_moments

    # -- gradients that wait ---------------------------------------------------------------------------------

    def reserve_gradient(self, unit: Unit) -> None:
        """Room on a drive is found before training begins; in memory it is taken when a gradient comes."""
        if self.placement.grads == "nvme":
            self.tier(unit, "grad").create(self.key(unit, "grad"), unit.shard_numel, self.waiting_dtype(unit))

    def keep_gradient(self, unit: Unit, shard: Tensor) -> None:
        """Let a reduced gradient wait on its tier; a second one is added to it, in float32."""
        tier, key = self.tier(unit, "grad"), self.key(unit, "grad")
        if unit in self._waiting:
            shard = self.read_gradient(unit).float().add_(shard)
            self._looked_at.pop(unit, None)
            self._sums.add(unit)
        dtype = self.waiting_dtype(unit)
        tier.create(key, unit.shard_numel, dtype)
        if tier.resident(key) is not None:
            tier.start_write(key, shard)()
        else:
            self._write_grad_behind(tier.start_write, key, shard, dtype)
        self._waiting.add(unit)

    def _write_grad_behind(
        self, start: Callable[[Key, Tensor], Wait], key: Key, gradient: Tensor, dtype: torch.dtype
    ) -> None:
        """Behind backward's back: the write reads from a buffer of its own, given back when it is done."""
        while len(self._grad_writes) > 1:
            self._finish_grad_write()
        buffer = self.tiers.host_pool.take(gradient.numel() * dtype.itemsize, f"gradient {key}")
        copy = buffer.flat(gradient.numel(), dtype)
        copy.copy_(gradient)
        self._grad_writes.append((start(key, copy), buffer))

    def _finish_grad_write(self) -> None:
        try:
            self._grad_writes[0][0]()
        except Exception:
            self._grad_write_is_over()
            raise
        self._grad_write_is_over()

    def _grad_write_is_over(self) -> None:
        buffer = self._grad_writes.pop(0)[1]
        self.tiers.host_pool.give_back(buffer)

    def _finish_grad_writes(self) -> None:
        while self._grad_writes:
            self._finish_grad_write()

    def forget_grad_writes(self) -> None:
        """Gradients do not count any more: nothing of them is on its way, nor are failures of their writes."""
        while self._grad_writes:
            self._grad_writes[0][0].settle()
            self._grad_write_is_over()

    def settle_gradients(self) -> None:
        """Every gradient that goes to a drive is there, with what user code has changed of it."""
        self._finish_grad_writes()
        for unit, (gradient, crc32c) in self._looked_at.items():
            # No version counter shows what is written by way of `.data` or NumPy.
            if (present := deepnvme.crc32c(gradient)) != crc32c:
                self.write(unit, "grad", gradient, 0)
                self._looked_at[unit] = gradient, present

    def read_gradient(self, unit: Unit) -> Tensor:
        """The gradient that waits, for looking; a copy where it is not in memory."""
        self.settle_gradients()
        kept = self.tier(unit, "grad").resident(self.key(unit, "grad"))
        if kept is not None:
            return kept
        return self.read(unit, "grad", self.waiting_dtype(unit), 0, unit.shard_numel)

    def waiting_dtype(self, unit: Unit) -> torch.dtype:
        if self.optimizer is None:  # torch's own optimizers want the gradient in the dtype of the values they update
            return unit.master_dtype
        return unit_states.grad_dtype(unit.dtype, unit in self._sums)

    def will_accumulate(self, units: Iterable[Unit]) -> None:
        """Gradients of `units` are sums of several micro-batches: they wait in float32 from the first on."""
        self._sums.update(units)

    def accumulates(self, unit: Unit) -> bool:
        """Whether gradients of `unit` are summed, and so wait in float32."""
        return unit in self._sums

    def waits(self, unit: Unit) -> bool:
        """Whether a gradient of `unit` waits."""
        return unit in self._waiting

    # -- activations -----------------------------------------------------------------------------------------

    @functools.cached_property
    def activations(self) -> ActivationStore:
        """Where saved activations go."""
        from .activation_offload import ActivationStore  # it needs this class

        return ActivationStore(self)

    def drop_unheld_activations(self) -> None:
        """Rooms of saved activations that nobody holds any more are free again: at the end of each backward."""
        if "activations" in self.__dict__:
            self.activations.drop_unheld()

    # -- for people ------------------------------------------------------------------------------------------

    def where(self, unit: Unit) -> dict[str, str]:
        """Kind of state -> tier, as `report` prints it."""
        names = {"params": self.tier_name(unit, "param")}
        if unit.trainable:
            names["grads"] = self.tier_name(unit, "grad")
            names["optimizer"] = self.tier_name(unit, "exp_avg")
        return names


class _ThroughHost(Wait):
    """A read into host memory, and the copy from there to the device."""

    __slots__ = ("_arrived", "_buffer", "_key", "_out", "_tiers")

    def __init__(self, tiers: TierSet, key: Key, arrived: Wait, buffer: PooledBuffer, out: Tensor):
        super().__init__()
        self._tiers, self._key, self._arrived, self._out = tiers, key, arrived, out
        self._buffer: PooledBuffer | None = buffer

    def __call__(self) -> None:
        if self._buffer is None:  # it has been waited for
            return
        self._arrived()
        with self._tiers.spans.running("cg", str(self._key)):
            self._out.copy_(self._buffer.flat(self._out.numel(), self._out.dtype))
        buffer, self._buffer = self._buffer, None
        self._tiers.host_pool.give_back(buffer)

    def done(self) -> bool:
        return self._arrived.done()


def engine_of(model: nn.Module) -> tuple[OffloadEngine, PartitionedModel]:
    """The engine and the machinery of a zinf model. TypeError for any other."""
    machinery = model_of(model)
    if not isinstance(machinery.store, OffloadEngine):
        raise TypeError(f"{type(model).__name__} is not a zinf model: build it with zinf.init or zinf.shard")
    return machinery.store, machinery


def pieces(numel: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of the stretches in which states are streamed."""
    for start in range(0, numel, PIECE):
        yield start, min(start + PIECE, numel)
