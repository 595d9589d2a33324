"""save() and load(): a checkpoint is complete or absent, whatever happens in between (DESIGN.md, section 8).

It is written beside under a name that starts with a dot, synced, and renamed; the manifest with all checksums comes
last. Every rank streams its own shards, piece by piece, from their tiers; nothing is ever whole in memory. Loading
maps every parameter to wherever its bytes are, so another number of ranks, another placement or another unit size
reads the same checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

import deepnvme
from zero3.bandwidth_centric import round_up
from zero3.full_state import persistent_buffers
from zero3.partitioned_model import PartitionedModel
from zero3.unit import ParamSlot, Unit

from . import checkpoint_format as layout
from . import unit_states
from .checkpoint_format import DTYPES, KindRecord, Manifest, OptimizerRecord, SlotRecord, UnitRecord
from .errors import CheckpointError
from .offload_engine import OffloadEngine, engine_of, pieces
from .offloaded_adamw import AdamW
from .tiers.nvme import PIECE

_TENSOR_MARK = "__tensor__"


@dataclass(frozen=True)
class SaveResult:
    """path: the checkpoint's folder; method: how the states got there ("copy"); nbytes: written by all ranks."""

    path: str
    method: str
    nbytes: int


# -- saving ---------------------------------------------------------------------------------------------------


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
    _settle(engine, machinery)
    root, ranks = Path(dir), machinery.ranks
    number = _agree_on_number(root, machinery)
    beside = root / f".{layout.folder_name(number)}"
    try:
        with _together(machinery, "making the checkpoint's folder"):
            if ranks.rank == 0:
                _remove_unfinished(root)
                beside.mkdir(parents=True)
        with _together(machinery, "writing the checkpoint's shards"):
            units, nbytes = _write_shards(beside, engine, machinery)
        final = root / layout.folder_name(number)
        with _together(machinery, "finishing the checkpoint"):
            if ranks.rank == 0:
                nbytes = nbytes * _files(machinery) + _finish(beside, final, model, optimizer, extra, units, machinery)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise
    if ranks.rank == 0 and keep is not None:
        for old in checkpoints(root)[:-keep]:
            shutil.rmtree(old)
    engine.newest_checkpoint = str(final)
    return SaveResult(str(final), "copy", nbytes)


def _settle(engine: OffloadEngine, machinery: PartitionedModel) -> None:
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


@contextmanager
def _together(machinery: PartitionedModel, what: str) -> Iterator[None]:
    """The block ends well on every rank, or on none: where one fails, the others raise with its message."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    ranks = machinery.ranks
    texts = torch.zeros(ranks.size, _MESSAGE_BYTES, dtype=torch.int32)
    if failure is not None:
        text = f"{type(failure).__name__}: {failure}".encode()[:_MESSAGE_BYTES]
        texts[ranks.rank, : len(text)] = torch.tensor(list(text), dtype=torch.int32)
    ranks.sum(texts, what)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text.any():
            raise CheckpointError(f"rank {rank} failed at {what}: {bytes(text[text > 0].tolist()).decode(errors='replace')}")


_MESSAGE_BYTES = 1000


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
        for name, dtype in _saved_kinds(engine, unit).items():
            kinds[name] = KindRecord(str(dtype).removeprefix("torch."), end)
            end = round_up(end + unit.shard_numel * dtype.itemsize, layout.ALIGNMENT)
        sums = engine.accumulates(unit)
        slots = [SlotRecord(list(s.names), list(s.shape), s.offset, _step(engine, s), sums) for s in unit.slots]
        records.append(UnitRecord(unit.name, unit.shard_numel, slots, kinds))
    return records, end


def _saved_kinds(engine: OffloadEngine, unit: Unit) -> dict[str, torch.dtype]:
    return unit_states.update_kinds(unit) if engine.has_moments(unit) else unit_states.value_kinds(unit)


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
    machinery: PartitionedModel,
) -> int:
    """Rank 0: the small tensors, the manifest, and the name. Returns the bytes written."""
    tensors = {f"buffer.{name}": buffer for name, buffer in _buffers(model)}
    plain_extra = _take_tensors(extra, "extra", tensors)
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


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    wanted = set(persistent_buffers(model))
    return ((name, buffer) for name, buffer in model.named_buffers(remove_duplicate=False) if name in wanted)


def _take_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with each tensor replaced by a mark; the tensors go into `tensors`. TypeError for what is no JSON."""
    if isinstance(value, Tensor):
        name = f"extra.{len(tensors)}"
        tensors[name] = value
        return {_TENSOR_MARK: name}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{path}: key {key!r} is no string, a checkpoint keeps JSON values and tensors")
            if key == _TENSOR_MARK:
                raise TypeError(f"{path}: key {key!r} means a tensor in a checkpoint, choose another")
        return {key: _take_tensors(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_take_tensors(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{path}: {type(value).__name__} cannot be kept, only JSON values and tensors")


def _give_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if _TENSOR_MARK in value:
            name = value[_TENSOR_MARK]
            if not isinstance(name, str) or name not in tensors:
                raise CheckpointError(f"the manifest is damaged: `extra` names a tensor {name!r} that is not there")
            return tensors[name]
        return {key: _give_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_give_tensors(item, tensors) for item in value]
    return value


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


# -- finding --------------------------------------------------------------------------------------------------


def checkpoints(dir: str | os.PathLike) -> list[Path]:
    """Complete checkpoints in `dir`, oldest first."""
    root = Path(dir)
    if not root.is_dir():
        return []
    numbered = [(layout.number_of(path.name), path) for path in root.iterdir()]
    return [
        path
        for number, path in sorted((n, p) for n, p in numbered if n is not None and (p / layout.MANIFEST).is_file())
    ]


def find(dir: str | os.PathLike) -> Path:
    """`dir` itself, when it is a checkpoint, or the newest in it."""
    root = Path(dir)
    if (root / layout.MANIFEST).is_file():
        return root
    complete = checkpoints(root)
    if not complete:
        raise CheckpointError(f"{root} is no checkpoint and holds no complete one")
    return complete[-1]


def read_manifest(path: Path) -> Manifest:
    """CheckpointError when it is damaged, or when a file is shorter than it says."""
    try:
        manifest = Manifest.decode((path / layout.MANIFEST).read_bytes())
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{path / layout.MANIFEST}: {error}") from error
    for rank in range(manifest.ranks):
        file = path / layout.rank_file(rank)
        if not file.is_file() or file.stat().st_size < manifest.file_nbytes():
            raise CheckpointError(f"{file} is missing or shorter than the manifest says")
    return manifest


# -- loading --------------------------------------------------------------------------------------------------


def load(dir: str | os.PathLike, model: nn.Module, optimizer: AdamW | None) -> Any:
    """Read a checkpoint, or the newest complete one in a folder; returns its `extra`. Collective.

    Training goes on bit for bit, on any number of ranks and any placement of the same dtype. CheckpointError names
    what is damaged or does not fit; shapes and names are compared before anything is changed.
    """
    engine, machinery = engine_of(model)
    path = find(dir)
    manifest = read_manifest(path)
    with _together(machinery, "comparing the checkpoint with the model"):
        places = _match(manifest, engine, machinery)
        tensors = read_tensors(path, manifest)
        _match_buffers(model, tensors)
        _match_groups(manifest, optimizer)
        random_state = _random_state(manifest, machinery.ranks.rank)
        extra = _give_tensors(manifest.extra, tensors)
    if optimizer is not None:
        optimizer.forget()
    _settle(engine, machinery)
    with _together(machinery, "loading the checkpoint"), PieceReader(path, manifest) as reader:
        for unit in machinery.units:
            _load_unit(engine, unit, places, reader)
    with torch.no_grad():
        for name, buffer in _buffers(model):
            buffer.copy_(tensors[f"buffer.{name}"])
    _load_optimizer(manifest, optimizer, places, engine)
    if random_state is not None:
        torch.set_rng_state(random_state)
    engine.newest_checkpoint = str(path)
    return extra


Place = tuple[UnitRecord, SlotRecord]


def _match(manifest: Manifest, engine: OffloadEngine, machinery: PartitionedModel) -> dict[ParamSlot, Place]:
    """Where each of the model's parameters is in the checkpoint. CheckpointError with all that does not fit."""
    known = {name: (unit, slot) for unit in manifest.units for slot in unit.slots for name in slot.names}
    places: dict[ParamSlot, Place] = {}
    faults = []
    for slot in (slot for unit in machinery.units for slot in unit.slots):
        place = next((known[name] for name in slot.names if name in known), None)
        if place is None:
            faults.append(f"{slot.name} is missing")
        elif tuple(place[1].shape) != tuple(slot.shape):
            faults.append(f"{slot.name} has shape {tuple(place[1].shape)}, the model {tuple(slot.shape)}")
        else:
            faults += _unlike_kinds(engine, slot, place[0])
            places[slot] = place
    used = {id(place[1]) for place in places.values()}
    faults += [f"{s.names[0]} is not in the model" for u in manifest.units for s in u.slots if id(s) not in used]
    if faults:
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(faults[:10]))
    return places


def _unlike_kinds(engine: OffloadEngine, slot: ParamSlot, record: UnitRecord) -> list[str]:
    for kind, dtype in unit_states.value_kinds(slot.unit).items():
        saved = record.kinds.get(kind)
        if saved is None or DTYPES[saved.dtype] is not dtype:
            return [f"{slot.name} was saved as {record.kinds['param'].dtype}, the model trains in {slot.unit.dtype}"]
    return []


class PieceReader:
    """Elements of a kind's shards, every piece checked against its checksum. Keeps the newest pieces."""

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._manifest = path, manifest
        self._kept: dict[tuple, Tensor] = {}

    def __enter__(self) -> PieceReader:
        self._io = deepnvme.Engine()
        files = range(self._manifest.ranks)
        self._files = [deepnvme.File(self._path / layout.rank_file(rank), "r") for rank in files]
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.clear()
        for file in self._files:
            file.close()
        self._io.close()

    def read(self, unit: UnitRecord, kind: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """[start, stop) of the unit's flat buffer, all ranks' shards one after the other: (start, elements)."""
        numel = self._manifest.piece_numel
        while start < stop:
            rank, within = divmod(start, unit.shard_numel)
            piece, offset = divmod(within, numel)
            elements = self._piece(unit, kind, rank, piece)
            count = min(stop - start, elements.numel() - offset)
            yield start, elements[offset : offset + count]
            start += count

    def _piece(self, unit: UnitRecord, kind: str, rank: int, piece: int) -> Tensor:
        key = (id(unit), kind, rank, piece)
        if key not in self._kept:
            self._kept[key] = self._read_checked(unit, kind, rank, piece)
            while len(self._kept) > _KEPT_PIECES:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def _read_checked(self, unit: UnitRecord, kind: str, rank: int, piece: int) -> Tensor:
        record, numel = unit.kinds[kind], self._manifest.piece_numel
        dtype = DTYPES[record.dtype]
        count = min(numel, unit.shard_numel - piece * numel)
        elements = deepnvme.empty(count * dtype.itemsize).torch()
        self._io.read(self._files[rank], elements, record.file_offset + piece * numel * dtype.itemsize).wait()
        if deepnvme.crc32c(elements) != record.crc32c[rank][piece]:
            names = _names_within(unit, rank * unit.shard_numel + piece * numel, count)
            raise CheckpointError(
                f"{self._path / layout.rank_file(rank)}: {kind} of {', '.join(names)} is damaged "
                f"({count * dtype.itemsize} bytes at {record.file_offset + piece * numel * dtype.itemsize})"
            )
        return elements.view(dtype)


_KEPT_PIECES = 4


def _names_within(unit: UnitRecord, start: int, count: int) -> list[str]:
    return [s.names[0] for s in unit.slots if s.offset < start + count and start < s.offset + s.numel] or [unit.name]


def _load_unit(engine: OffloadEngine, unit: Unit, places: dict[ParamSlot, Place], reader: PieceReader) -> None:
    """Fill this rank's shard of `unit`, every kind, piece by piece."""
    first = unit.rank * unit.shard_numel  # of this rank's shard in the unit's flat buffer
    for kind, dtype in _saved_kinds(engine, unit).items():
        for start, stop in pieces(unit.shard_numel):
            with engine.host_buffer(stop - start, dtype) as part:
                part.zero_()
                for slot in unit.slots:
                    low = max(slot.offset, first + start)
                    high = min(slot.offset + slot.numel, first + stop)
                    record, saved = places[slot]
                    if low < high and kind in record.kinds:
                        shift = low - slot.offset + saved.offset  # of `low`, in the checkpoint's unit
                        for at, elements in reader.read(record, kind, shift, shift + high - low):
                            to = low + at - shift - first - start
                            part[to : to + elements.numel()] = elements
                engine.write(unit, kind, part, start)
    unit.model.values_changed(unit)


def _match_buffers(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, buffer in _buffers(model):
        saved = tensors.get(f"buffer.{name}")
        if saved is None or saved.shape != buffer.shape:
            found = "is missing" if saved is None else f"has shape {tuple(saved.shape)}, the model's {tuple(buffer.shape)}"
            raise CheckpointError(f"the checkpoint does not fit the model: buffer {name} {found}")


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


def _load_optimizer(
    manifest: Manifest, optimizer: AdamW | None, places: dict[ParamSlot, Place], engine: OffloadEngine
) -> None:
    if optimizer is None:
        return
    for slot, (_, saved) in places.items():
        if slot.param in optimizer.state:
            optimizer.state[slot.param]["step"] = saved.step or 0
    for group, settings in zip(optimizer.param_groups, manifest.optimizer.groups, strict=False):
        group.update(settings)
    if manifest.optimizer.loss_scale is not None:
        optimizer.loss_scale.load(manifest.optimizer.loss_scale)
    engine.will_accumulate(slot.unit for slot, (_, saved) in places.items() if saved.accumulates)


def read_tensors(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    blob = (path / layout.TENSORS).read_bytes()
    if deepnvme.crc32c(bytearray(blob)) != manifest.tensors_crc32c:
        raise CheckpointError(f"{path / layout.TENSORS} is damaged")
    return load_tensors(blob)


# -- verifying ------------------------------------------------------------------------------------------------


def verify(dir: str | os.PathLike) -> list[str]:
    """Read every byte of a checkpoint; what is damaged, in words ([] when all is well)."""
    path = find(dir)
    manifest = read_manifest(path)
    damaged = []
    try:
        read_tensors(path, manifest)
    except (CheckpointError, OSError, ValueError) as error:
        damaged.append(str(error))
    with PieceReader(path, manifest) as reader:
        for unit, kind, rank in _all_shards(manifest):
            for piece in range(-(-unit.shard_numel // manifest.piece_numel)):
                try:
                    reader._read_checked(unit, kind, rank, piece)
                except (CheckpointError, OSError) as error:
                    damaged.append(str(error))
    return damaged


def _all_shards(manifest: Manifest) -> Iterable[tuple[UnitRecord, str, int]]:
    for unit in manifest.units:
        for kind in unit.kinds:
            for rank in range(manifest.ranks):
                yield unit, kind, rank
