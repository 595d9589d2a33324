"""One rank's part in writing a checkpoint: complete or absent, whatever happens in between (DESIGN.md, section 8).

It is written beside, under a name that starts with a dot, synced, and renamed; the manifest with all checksums comes
last. All but the shards is taken down when the writer is made, so that training may go on while shards are copied.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import deepnvme
from zero3.bandwidth_centric import round_up
from zero3.full_state import extra_states, persistent_buffers
from zero3.partitioned_model import PartitionedModel
from zero3.unit import ParamSlot, Unit

from . import checkpoint_format as layout
from . import unit_states
from .checkpoint_extra import take_tensors
from .checkpoint_files import checkpoints
from .checkpoint_format import KindRecord, Manifest, OptimizerRecord, SlotRecord, UnitRecord
from .companion_files import to_tensors
from .errors import CheckpointError
from .named_file import named_file
from .offload_engine import OffloadEngine, engine_of
from .offloaded_adamw import AdamW
from .safetensors_file import refuse_unwritable
from .shard_copy import ShardCopy, file_nbytes
from .tiers.nvme import PIECE


class CheckpointWriter:
    """Writes a rank's shards; on rank 0 also all else, and gives the checkpoint its name.

    units      all units of the model
    kinds      of each unit, the kinds of state that are saved
    nbytes     of the shards of all ranks, and of the small tensors
    """

    def __init__(
        self, root: Path, number: int, model: nn.Module, optimizer: AdamW | None, extra: Any, keep: int | None
    ):
        engine, machinery = engine_of(model)
        self._root, self._keep = root, keep
        self._beside = root / f".{layout.folder_name(number)}"
        self.final = root / layout.folder_name(number)
        self._rank = machinery.shard_rank
        self._files = machinery.shard_ranks  # where nothing is partitioned, rank 0's shards are all
        self._has_file = machinery.ranks.rank == 0 or self._files > 1
        self.is_first = machinery.ranks.rank == 0
        self._engine = engine
        self.units: Sequence[Unit] = list(machinery.units)
        self._records = _lay_out(engine, machinery)
        self.kinds = {unit: list(record.kinds) for unit, record in zip(self.units, self._records, strict=True)}
        self._random_state = bytes(torch.get_rng_state().tolist()).hex()
        tensors = {f"buffer.{name}": buffer for name, buffer in buffers(model)} | to_tensors(engine.companions)
        for name, tensor in tensors.items():
            refuse_unwritable(name, tensor)
        self._extra = take_tensors(extra, "extra", tensors)
        self._module_states = {
            name: take_tensors(module.get_extra_state(), name, tensors) for name, module in extra_states(model).items()
        }
        self._tensors = save_tensors({name: _copy(tensor) for name, tensor in tensors.items()})
        self._optimizer = _optimizer_settings(optimizer)
        self.nbytes = file_nbytes(self.units, self._records) * self._files + len(self._tensors)
        self._copy: ShardCopy | None = None

    def make_folder(self) -> None:
        """Rank 0: the folder beside, and nothing left of a run that was killed."""
        self._root.mkdir(parents=True, exist_ok=True)
        for path in self._root.iterdir():
            if path.name.startswith(".") and layout.number_of(path.name[1:]) is not None:
                shutil.rmtree(path, ignore_errors=True)
        self._beside.mkdir()

    def open(self) -> None:
        """Room for this rank's shards. OSError (ENOSPC) when there is none."""
        if self._has_file:
            path = self._beside / layout.rank_file(self._rank)
            self._copy = ShardCopy(self._engine, path, self.units, self._records)

    def copy(self, wanted: Iterable[tuple[Unit, Sequence[str]]], arrived: Callable[[Unit], None]) -> None:
        """Copy kinds of units; see ShardCopy.copy."""
        if self._copy is not None:
            self._copy.copy(wanted, arrived)
        else:
            for unit, _ in wanted:
                arrived(unit)

    def seal(self) -> None:
        """This rank's file is whole: its checksums say so."""
        if self._copy is not None:
            content = {"crc32c": self._copy.finish(), "random_state": self._random_state}
            beside = self._beside / f".rank-{self._rank}"
            _write_synced(beside, json.dumps(content).encode())
            os.rename(beside, self._sealed(self._rank))  # whoever looks for it finds it whole

    def close(self) -> None:
        """Let go of the file and of buffers. For the thread that trains."""
        if self._copy is not None:
            self._copy.close()

    def unsealed(self) -> list[int]:
        """Ranks whose files are not whole yet. CheckpointError with the words of one that has given up."""
        for rank in range(self._files):
            if self._given_up(rank).exists():
                raise CheckpointError(f"rank {rank} failed: {self._given_up(rank).read_text()}")
        return [rank for rank in range(self._files) if not self._sealed(rank).exists()]

    def give_up(self, why: str) -> None:
        """This rank's file will not be whole: tells rank 0, which discards the checkpoint."""
        if self.is_first:
            self.discard()
            return
        with contextlib.suppress(OSError):
            beside = self._beside / f".given-up-{self._rank}"
            beside.write_text(why)
            os.rename(beside, self._given_up(self._rank))

    def publish(self) -> None:
        """Rank 0, when all files are whole: the small tensors, the manifest, and the name; then old ones go."""
        _write_synced(self._beside / layout.TENSORS, self._tensors)
        states = []
        for rank in range(self._files):
            data = json.loads(self._sealed(rank).read_text())
            states.append(data["random_state"])
            for record, sums in zip(self._records, data["crc32c"], strict=True):
                for name, kind in record.kinds.items():
                    kind.crc32c.append(sums[name])
            self._sealed(rank).unlink()
        manifest = Manifest(
            ranks=self._files,
            piece_numel=PIECE,
            units=self._records,
            optimizer=self._optimizer,
            extra=self._extra,
            module_states=self._module_states,
            tensors_crc32c=deepnvme.crc32c(bytearray(self._tensors)),
            random_states=states,
        )
        _write_synced(self._beside / layout.MANIFEST, manifest.encode())
        _sync_folder(self._beside)
        os.rename(self._beside, self.final)
        _sync_folder(self._root)
        if self._keep is not None:
            for old in checkpoints(self._root)[: -self._keep]:
                _remove(old)

    def discard(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self._beside, ignore_errors=True)

    def _sealed(self, rank: int) -> Path:
        return self._beside / f"rank-{rank}.json"

    def _given_up(self, rank: int) -> Path:
        return self._beside / f"rank-{rank}.failed"


def saved_kinds(engine: OffloadEngine, unit: Unit) -> dict[str, torch.dtype]:
    """Kinds of state that a checkpoint holds of `unit` -> dtype."""
    return unit_states.update_kinds(unit.dtype) if engine.has_moments(unit) else unit_states.value_kinds(unit.dtype)


def buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every buffer that a state dict holds."""
    wanted = set(persistent_buffers(model))
    return ((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in wanted)


def _lay_out(engine: OffloadEngine, machinery: PartitionedModel) -> list[UnitRecord]:
    """Records of all units, without checksums."""
    records, end = [], 0
    for unit in machinery.units:
        kinds = {}
        for name, dtype in saved_kinds(engine, unit).items():
            kinds[name] = KindRecord(str(dtype).removeprefix("torch."), end)
            end = round_up(end + unit.shard_numel * dtype.itemsize, layout.ALIGNMENT)
        slots = [_slot_record(engine, slot) for slot in unit.slots]
        records.append(UnitRecord(unit.name, unit.shard_numel, slots, kinds))
    return records


def _slot_record(engine: OffloadEngine, slot: ParamSlot) -> SlotRecord:
    sums, whole = engine.accumulates(slot.unit), None if slot.tile is None else list(slot.owner.shape)
    step = _step(engine, slot)
    return SlotRecord(list(slot.names), list(slot.shape), slot.offset, step, sums, slot.first, whole)


def _step(engine: OffloadEngine, slot: ParamSlot) -> int | None:
    if engine.optimizer is None or slot.owner not in engine.optimizer.state:
        return None
    return engine.optimizer.state[slot.owner]["step"]


def _copy(tensor: Tensor) -> Tensor:
    """Memory of its own: safetensors refuses tensors that share it."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _optimizer_settings(optimizer: AdamW | None) -> OptimizerRecord:
    if optimizer is None:
        return OptimizerRecord([], None)
    groups = [
        {
            key: _setting(value, f"{key!r} of parameter group {number}")
            for key, value in group.items()
            if key != "params"
        }
        for number, group in enumerate(optimizer.param_groups)
    ]
    return OptimizerRecord(groups, optimizer.loss_scale.state())


def _setting(value: Any, what: str) -> Any:
    """A setting as JSON has it; a number of torch's or numpy's as Python's. TypeError for what cannot be kept."""
    if isinstance(value, list | tuple):
        return [_setting(item, what) for item in value]
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} cannot be kept in a checkpoint: {error}") from None
    return value


def _remove(checkpoint: Path) -> None:
    """Of one that somebody has moved to another place, only the link: what lies there is not ours to remove."""
    if checkpoint.is_symlink():
        checkpoint.unlink()
    else:
        shutil.rmtree(checkpoint)


def _write_synced(path: Path, content: bytes) -> None:
    with named_file(path), open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with named_file(path):
            os.fsync(fd)
    finally:
        os.close(fd)
