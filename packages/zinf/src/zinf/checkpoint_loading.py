"""load(): a checkpoint into a model on any number of ranks, any placement, any unit size.

Every parameter is mapped to wherever its bytes are; everything is compared before anything is changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero3.full_state import extra_states
from zero3.partitioned_model import PartitionedModel
from zero3.unit import ParamSlot, Unit

from . import unit_states
from .checkpoint_extra import give_tensors
from .checkpoint_files import Piece, PieceReader, find, read_manifest, read_tensors
from .checkpoint_format import DTYPES, Manifest, SlotRecord, UnitRecord, tiles_by_name
from .checkpoint_writer import buffers, saved_kinds
from .companion_files import from_tensors
from .durable_save import check_optimizer, finish_background_save, settle
from .errors import CheckpointError
from .offload_engine import OffloadEngine, engine_of, pieces
from .offloaded_adamw import AdamW
from .rank_failures import together
from .ring_copy import Buffers, Copy, RingCopy
from .tiers import NO_WAIT, Wait


def load(dir: str | os.PathLike, model: nn.Module, optimizer: AdamW | None) -> Any:
    """Read a checkpoint, or the newest complete one in a folder; returns its `extra`. Collective.

    Training goes on bit for bit, on any number of ranks and any placement of the same dtype. CheckpointError names
    what is damaged or does not fit; shapes and names are compared before anything is changed. What is found damaged
    later, as its bytes come, leaves a model that can be neither used nor saved until a whole checkpoint is loaded.
    """
    engine, machinery = engine_of(model)
    check_optimizer(engine, optimizer)
    finish_background_save(engine, machinery)
    path = find(dir)
    manifest = read_manifest(path)
    with contextlib.ExitStack() as stack:
        with together(machinery, "comparing the checkpoint with the model"):
            places = _match(manifest, engine, machinery)
            tensors = read_tensors(path, manifest)
            _match_buffers(model, tensors)
            _match_groups(manifest, optimizer)
            random_state = _random_state(manifest, machinery.ranks.rank)
            extra = give_tensors(manifest.extra, tensors)
            module_states = give_tensors(manifest.module_states, tensors)
            modules = extra_states(model)
            _match_extra_states(module_states, modules)
            companions = from_tensors(tensors)
            reader = stack.enter_context(PieceReader(path, manifest))
        stack.enter_context(engine.loading(path, moments=True))
        if optimizer is not None:
            optimizer.forget()
        settle(engine, machinery)
        for slot in places:
            slot.param.grad = None  # a checkpoint lies between two steps
        with together(machinery, "loading the checkpoint"):
            _make_moments(engine, optimizer, places)
            _load_units(engine, machinery, places, reader)
        with torch.no_grad():
            for name, buffer in buffers(model):
                buffer.copy_(tensors[f"buffer.{name}"])
        for name, module in modules.items():
            module.set_extra_state(module_states[name])
        _load_optimizer(manifest, optimizer, places, engine)
    if random_state is not None:
        torch.set_rng_state(random_state)
    engine.companions = companions or engine.companions
    engine.newest_checkpoint = str(path)
    return extra


Places = dict[ParamSlot, list[tuple[UnitRecord, SlotRecord]]]


def _match(manifest: Manifest, engine: OffloadEngine, machinery: PartitionedModel) -> Places:
    """Where each of the model's parameters is in the checkpoint. CheckpointError with all that does not fit.

    A parameter may be in tiles, in other tiles, or in one piece, in either.
    """
    known = tiles_by_name(manifest.units)
    places: Places = {}
    faults = []
    for slot in (slot for unit in machinery.units for slot in unit.slots):
        found = next((known[name] for name in slot.names if name in known), None)
        shape = tuple(slot.owner.shape)
        if found is None:
            faults.append(f"{slot.name} is missing")
        elif found[0][1].full_shape != shape:
            faults.append(f"{slot.name} has shape {found[0][1].full_shape}, the model {shape}")
        else:
            faults += [fault for record, _ in found for fault in _unlike_kinds(slot, record)]
            places[slot] = found
    faults = list(dict.fromkeys(faults))
    used = {id(saved) for found in places.values() for _, saved in found}
    faults += [f"{s.names[0]} is not in the model" for u in manifest.units for s in u.slots if id(s) not in used]
    if faults:
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(faults[:10]))
    return places


def _unlike_kinds(slot: ParamSlot, record: UnitRecord) -> list[str]:
    for kind, dtype in unit_states.value_kinds(slot.unit.dtype).items():
        saved = record.kinds.get(kind)
        if saved is None or DTYPES[saved.dtype] is not dtype:
            return [f"{slot.name} was saved as {record.kinds['param'].dtype}, the model trains in {slot.unit.dtype}"]
    return []


@dataclass(frozen=True)
class _Stretch:
    """Elements [start, stop) of a unit's flat buffer in the checkpoint, and where they belong in a part of a shard."""

    record: UnitRecord
    start: int
    stop: int
    to: int


@dataclass(frozen=True)
class _Part:
    """[start, stop) of one kind of a unit's shard, and what fills it; the rest is zeros."""

    unit: Unit
    kind: str
    dtype: torch.dtype
    start: int
    stop: int
    stretches: list[_Stretch]

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.dtype.itemsize


def _parts(engine: OffloadEngine, machinery: PartitionedModel, places: Places) -> Iterator[_Part]:
    """All parts of this rank's shards, in the order in which they are filled."""
    for unit in machinery.units:
        first = unit.rank * unit.shard_numel  # of this rank's shard in the unit's flat buffer
        for kind, dtype in saved_kinds(engine, unit).items():
            for start, stop in pieces(unit.shard_numel):
                stretches = []
                for slot, record, saved in ((s, *place) for s in unit.slots for place in places[s]):
                    zero = slot.offset - slot.first  # where in the flat buffer the parameter's first element would be
                    low = max(slot.offset, first + start, zero + saved.first)
                    high = min(slot.offset + slot.numel, first + stop, zero + saved.first + saved.numel)
                    if low < high and kind in record.kinds:
                        shift = low - zero - saved.first + saved.offset  # of `low`, in the checkpoint's unit
                        stretches.append(_Stretch(record, shift, shift + high - low, low - first - start))
                yield _Part(unit, kind, dtype, start, stop, stretches)


def _make_moments(engine: OffloadEngine, optimizer: AdamW | None, places: Places) -> None:
    """Room for moments of what is frozen here and was trained before: they count again when it is thawed."""
    for slot, found in places.items():
        trained_before = any(saved.step and "exp_avg" in record.kinds for record, saved in found)
        if optimizer is not None and slot.owner in optimizer.state and trained_before:
            engine.create_moments(slot.unit)


def _load_units(engine: OffloadEngine, machinery: PartitionedModel, places: Places, reader: PieceReader) -> None:
    """Fill this rank's shards, read ahead and written behind."""
    parts = list(_parts(engine, machinery, places))
    whole = [_as_saved(part, reader) for part in parts]
    reader.will_read(
        (s.record, part.kind, s.start, s.stop)
        for part, piece in zip(parts, whole, strict=True)
        for s in (part.stretches if piece is None else [])
    )
    with RingCopy.for_pieces(engine, machinery.units, "loading a checkpoint") as ring:
        ring.run(
            _put_together(engine, reader, part) if piece is None else _copy_whole(engine, reader, part, piece)
            for part, piece in zip(parts, whole, strict=True)
        )
    for unit in machinery.units:
        unit.model.values_changed(unit)


def _as_saved(part: _Part, reader: PieceReader) -> Piece | None:
    """The piece of the checkpoint that a part is: the same parameters at the same places, and nothing else."""
    if len({(id(s.record), s.start - s.to) for s in part.stretches}) != 1:
        return None
    record, start = part.stretches[0].record, part.stretches[0].start - part.stretches[0].to
    stop = start + part.stop - part.start
    saved = [slot for slot in record.slots if slot.offset < stop and start < slot.offset + slot.numel]
    if len(saved) != len(part.stretches) or start < 0 or stop > reader.flat_numel(record):
        return None
    return reader.whole_piece(record, part.kind, start, stop)


def _copy_whole(engine: OffloadEngine, reader: PieceReader, part: _Part, piece: Piece) -> Copy:
    """It is read to where it is written from, and keeps its checksum."""

    def write(buffers: Buffers, read: Wait) -> Wait:
        crc32c = read.crc32c
        reader.check(piece, crc32c)
        return engine.start_write(part.unit, part.kind, buffers[0].view(part.dtype), part.start, crc32c)

    return Copy([part.nbytes], lambda buffers: Wait([reader.start_read(piece, buffers[0])]), write)


def _put_together(engine: OffloadEngine, reader: PieceReader, part: _Part) -> Copy:
    """From wherever the checkpoint has its elements."""

    def write(buffers: Buffers, _: Wait) -> Wait:
        elements = buffers[0].view(part.dtype)
        if sum(s.stop - s.start for s in part.stretches) < elements.numel():
            elements.zero_()
        for s in part.stretches:
            for at, found in reader.read(s.record, part.kind, s.start, s.stop):
                to = s.to + at - s.start
                elements[to : to + found.numel()] = found
        return engine.start_write(part.unit, part.kind, elements, part.start)

    return Copy([part.nbytes], lambda _: NO_WAIT, write)


def _match_buffers(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, buffer in buffers(model):
        saved = tensors.get(f"buffer.{name}")
        if saved is None or saved.shape != buffer.shape:
            shapes = f"has shape {tuple(saved.shape)}, the model's {tuple(buffer.shape)}" if saved is not None else ""
            found = shapes or "is missing"
            raise CheckpointError(f"the checkpoint does not fit the model: buffer {name} {found}")


def _match_extra_states(saved: dict[str, Any], modules: dict[str, nn.Module]) -> None:
    faults = [f"{name} is missing" for name in modules if name not in saved]
    faults += [f"{name} is not in the model" for name in saved if name not in modules]
    if faults:
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(faults))


def _random_state(manifest: Manifest, rank: int) -> Tensor | None:
    """Of this rank, when the checkpoint has one for it. CheckpointError when torch does not take it."""
    if rank >= len(manifest.random_states):
        return None
    state = torch.tensor(list(bytes.fromhex(manifest.random_states[rank])), dtype=torch.uint8)
    try:
        torch.Generator().set_state(state)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"the random state of rank {rank} is damaged: {error}") from error
    return state


def _match_groups(manifest: Manifest, optimizer: AdamW | None) -> None:
    saved = manifest.optimizer.groups
    if optimizer is not None and saved and len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(optimizer.param_groups)}"
        )


def _load_optimizer(manifest: Manifest, optimizer: AdamW | None, places: Places, engine: OffloadEngine) -> None:
    if optimizer is None:
        return
    for slot, found in places.items():
        if slot.owner in optimizer.state:
            optimizer.state[slot.owner]["step"] = found[0][1].step or 0
    for group, settings in zip(optimizer.param_groups, manifest.optimizer.groups, strict=False):
        for key, value in settings.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)  # a rate may be a tensor that others hold too
            else:
                group[key] = value
    if manifest.optimizer.loss_scale is not None:
        optimizer.loss_scale.load(manifest.optimizer.loss_scale)
    engine.will_accumulate(slot.unit for slot, found in places.items() if any(saved.accumulates for _, saved in found))
