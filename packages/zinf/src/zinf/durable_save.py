"""save(): a checkpoint is complete or absent, whatever happens in between (DESIGN.md, section 8).

It is written beside under a name that starts with a dot, synced, and renamed; the manifest with all checksums comes
last. Every rank streams its own shards, piece by piece, from their tiers; nothing is ever whole in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import deepnvme
from zero3.bandwidth_centric import round_up
from zero3.full_state import persistent_buffers
from zero3.partitioned_model import PartitionedModel
from zero3.unit import ParamSlot, Unit

from . import checkpoint_format as layout
from . import unit_states
from .checkpoint_extra import take_tensors
from .checkpoint_files import checkpoints
from .checkpoint_format import DTYPES, KindRecord, Manifest, OptimizerRecord, SlotRecord, UnitRecord
from .companion_files import to_tensors
from .offload_engine import OffloadEngine, engine_of, pieces
from .offloaded_adamw import AdamW
from .rank_failures import together
from .tiers.nvme import PIECE


@dataclass(frozen=True)
class SaveResult:
    """path: the checkpoint's folder; method: how the states got there ("copy"); nbytes: written by all ranks."""

    path: str
    method: str
    nbytes: int


def save(
    dir: str | os.PathLike,
    model: nn.Module,
    optimizer: AdamW | None,
    extra: Any = None,
    keep: int | None = None,
    background: bool = False,
) -> SaveResult:
    """Write a checkpoint of model and optimizer into a new folder `dir`/checkpoint-NNNNNN. Collective.

    extra       anything of JSON values (dicts with string keys, lists, numbers, strings, None) and tensors
    keep        how many complete checkpoints `dir` shall hold afterwards, the new one included; None: all
    background  must be False in this version

    OSError from the drive (ENOSPC, ...): then `dir` holds what it held before.
    """
    if background:
        raise ValueError("background=True is not available in this version")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would keep no checkpoint")
    engine, machinery = engine_of(model)
    settle(engine, machinery)
    root, ranks = Path(dir), machinery.ranks
    number = _agree_on_number(root, machinery)
    beside = root / f".{layout.folder_name(number)}"
    try:
        with together(machinery, "making the checkpoint's folder"):
            if ranks.rank == 0:
                _remove_unfinished(root)
                beside.mkdir(parents=True)
        with together(machinery, "writing the checkpoint's shards"):
            units, nbytes = _write_shards(beside, engine, machinery)
        final = root / layout.folder_name(number)
        with together(machinery, "finishing the checkpoint"):
            if ranks.rank == 0:
                nbytes = nbytes * _files(machinery) + _finish(beside, final, model, optimizer, extra, units)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    if ranks.rank == 0 and keep is not None:
        for old in checkpoints(root)[:-keep]:
            shutil.rmtree(old)
    engine.newest_checkpoint = str(final)
    return SaveResult(str(final), "copy", nbytes)


def settle(engine: OffloadEngine, machinery: PartitionedModel) -> None:
    """Nothing gathered, nothing owed, nothing on its way: all states are on their tiers."""
    machinery.border()
    for unit in machinery.units:
        machinery.release(unit, force=True)
    if engine.optimizer is not None:
        engine.optimizer.settle()


def _files(machinery: PartitionedModel) -> int:
    """How many ranks have shards of their own; where nothing is partitioned, rank 0's are all."""
    return machinery.shard_ranks


def _agree_on_number(root: Path, machinery: PartitionedModel) -> int:
    numbers = [layout.number_of(path.name) or 0 for path in root.iterdir()] if root.is_dir() else []
    number = torch.tensor([max(numbers, default=0) + 1])
    machinery.ranks.broadcast(number, "the number of the checkpoint")
    return int(number)


def _remove_unfinished(root: Path) -> None:
    """What a killed run left behind."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if path.name.startswith(".") and layout.number_of(path.name[1:]) is not None:
            shutil.rmtree(path, ignore_errors=True)


def _write_shards(folder: Path, engine: OffloadEngine, machinery: PartitionedModel) -> tuple[list[UnitRecord], int]:
    """This rank's file, synced, and its checksums beside it; returns the units' records."""
    records, end = _lay_out(engine, machinery)
    rank = machinery.shard_rank
    if machinery.shard_ranks == 1 and machinery.ranks.rank != 0:
        return records, end
    path = folder / layout.rank_file(rank)
    sums: list[dict[str, list[int]]] = []
    with deepnvme.Engine() as io, deepnvme.File(path, "w", size=end) as file:
        for unit, record in zip(machinery.units, records, strict=True):
            sums.append({name: _write_kind(io, file, engine, unit, name, kind) for name, kind in record.kinds.items()})
        io.flush()
        io.sync(file)
    state = bytes(torch.get_rng_state().tolist()).hex()
    _write_synced(folder / f"rank-{rank}.json", json.dumps({"crc32c": sums, "random_state": state}).encode())
    return records, end


def _lay_out(engine: OffloadEngine, machinery: PartitionedModel) -> tuple[list[UnitRecord], int]:
    """Records of all units without checksums, and the length of a rank's file."""
    records, end = [], 0
    for unit in machinery.units:
        kinds = {}
        for name, dtype in saved_kinds(engine, unit).items():
            kinds[name] = KindRecord(str(dtype).removeprefix("torch."), end)
            end = round_up(end + unit.shard_numel * dtype.itemsize, layout.ALIGNMENT)
        sums = engine.accumulates(unit)
        slots = [SlotRecord(list(s.names), list(s.shape), s.offset, _step(engine, s), sums) for s in unit.slots]
        records.append(UnitRecord(unit.name, unit.shard_numel, slots, kinds))
    return records, end


def saved_kinds(engine: OffloadEngine, unit: Unit) -> dict[str, torch.dtype]:
    """Kinds of state that a checkpoint holds of `unit` -> dtype."""
    return unit_states.update_kinds(unit.dtype) if engine.has_moments(unit) else unit_states.value_kinds(unit.dtype)


def _step(engine: OffloadEngine, slot: ParamSlot) -> int | None:
    if engine.optimizer is None or slot.param not in engine.optimizer.state:
        return None
    return engine.optimizer.state[slot.param]["step"]


def _write_kind(io, file, engine: OffloadEngine, unit: Unit, name: str, kind: KindRecord) -> list[int]:
    """Stream one kind of a unit's shard to the file; returns the checksums of its pieces."""
    dtype, sums = DTYPES[kind.dtype], []
    for start, stop in pieces(unit.shard_numel):
        with engine.host_buffer(stop - start, dtype) as part:
            engine.tier(unit, name).start_read(engine.key(unit, name), part, start)()
            request = io.write(file, part, kind.file_offset + start * dtype.itemsize)
            sums.append(deepnvme.crc32c(part))
            request.wait()
    return sums


def _finish(
    beside: Path,
    final: Path,
    model: nn.Module,
    optimizer: AdamW | None,
    extra: Any,
    units: list[UnitRecord],
) -> int:
    """Rank 0: the small tensors, the manifest, and the name. Returns the bytes written."""
    engine, machinery = engine_of(model)
    tensors = {f"buffer.{name}": buffer for name, buffer in buffers(model)}
    tensors |= to_tensors(engine.companions)
    plain_extra = take_tensors(extra, "extra", tensors)
    blob = save_tensors({name: _copy(tensor) for name, tensor in tensors.items()})
    _write_synced(beside / layout.TENSORS, blob)
    states = []
    for rank in range(_files(machinery)):
        part = beside / f"rank-{rank}.json"
        data = json.loads(part.read_text())
        states.append(data["random_state"])
        for record, sums in zip(units, data["crc32c"], strict=True):
            for name, kind in record.kinds.items():
                kind.crc32c.append(sums[name])
        part.unlink()
    manifest = Manifest(
        ranks=_files(machinery),
        piece_numel=PIECE,
        units=units,
        optimizer=_optimizer_settings(optimizer),
        extra=plain_extra,
        tensors_crc32c=deepnvme.crc32c(bytearray(blob)),
        random_states=states,
    )
    text = manifest.encode()
    _write_synced(beside / layout.MANIFEST, text)
    _sync_folder(beside)
    os.rename(beside, final)
    _sync_folder(final.parent)
    return len(blob) + len(text)


def _copy(tensor: Tensor) -> Tensor:
    """Memory of its own: safetensors refuses tensors that share it."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and value of every buffer that a state dict holds."""
    wanted = set(persistent_buffers(model))
    return ((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in wanted)


def _optimizer_settings(optimizer: AdamW | None) -> OptimizerRecord:
    if optimizer is None:
        return OptimizerRecord([], None)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return OptimizerRecord(groups, optimizer.loss_scale.state())


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
