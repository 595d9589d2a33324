"""export() and load_pretrained(): safetensors in Hugging Face's layout, streamed between file and tier.

A folder holds `model.safetensors`, or several files and `model.safetensors.index.json`. Writing goes unit by unit,
each gathered once, the next one on its way from its tier; reading takes of every tensor only what this rank keeps,
read ahead and written behind. The whole model is never in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3 import full_state as zero3_full_state
from zero3 import gathered, parameter_forms
from zero3.unit import ParamSlot, Unit

from . import checkpoint_files, unit_states
from .checkpoint_format import DTYPES, KindRecord, UnitRecord, tiles_by_name
from .companion_files import from_tensors, read_companions, write_companions
from .errors import CheckpointError
from .hub_names import names_in_model
from .offload_engine import OffloadEngine, engine_of, pieces
from .read_ahead import ReadAhead, Stretch, as_elements
from .safetensors_file import Entry, SafetensorsFile, header
from .sequential_file import SequentialFile, as_bytes
from .tier_fill import TierFill

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Bytes of one file, as the Hub's tools cut them.
_FILE_BYTES = 5 * 10**9

# Bytes of units that are read while another is written.
_AHEAD_BYTES = 32 << 20


# -- writing --------------------------------------------------------------------------------------------------


class _Writer:
    """Files of a folder, written in the order of `entries`, under their names only when all are complete."""

    def __init__(self, folder: Path, entries: list[Entry], file_bytes: int = _FILE_BYTES):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files = _cut(entries, file_bytes)
        self._names = [_file_name(number, len(self._files)) for number in range(len(self._files))]
        self._order = [(entry, number) for number, file in enumerate(self._files) for entry in file]
        self._next = 0
        self._left = 0  # bytes of the current tensor that are still to come
        self._open: SequentialFile | None = None
        self._open_number = -1

    def begin(self, name: str) -> None:
        """The elements of tensor `name` follow."""
        entry, number = self._order[self._next]
        assert entry.name == name, (entry.name, name)
        assert not self._left, self._left
        self._next += 1
        self._left = entry.nbytes
        if number != self._open_number:
            self._finish_file()
            self._begin_file(number)

    def elements(self, part: Tensor) -> None:
        """The next elements of the current tensor."""
        self._left -= part.nbytes
        self._open.write(part.contiguous().view(-1).view(torch.uint8))  # type: ignore[union-attr]

    def finish(self) -> int:
        """Give the files their names; returns the bytes of the tensors."""
        if not self._order:
            self._begin_file(0)
        self._finish_file()
        for number, name in enumerate(self._names):
            os.replace(self._beside(number), self._folder / name)
        total = sum(entry.nbytes for entry, _ in self._order)
        if len(self._names) > 1:
            weight_map = {entry.name: self._names[number] for entry, number in self._order}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            beside = self._folder / f".{INDEX}"
            beside.write_text(text)
            os.replace(beside, self._folder / INDEX)
        return total

    def discard(self) -> None:
        """Leave nothing behind."""
        if self._open is not None:
            self._open.close()
        for number in range(len(self._names)):
            self._beside(number).unlink(missing_ok=True)

    def _beside(self, number: int) -> Path:
        return self._folder / f".{self._names[number]}"

    def _begin_file(self, number: int) -> None:
        self._beside(number).unlink(missing_ok=True)  # of an export that was killed, perhaps longer
        head = header(self._files[number])
        nbytes = len(head) + sum(entry.nbytes for entry in self._files[number])
        self._open, self._open_number = SequentialFile(self._beside(number), nbytes), number
        self._open.write(as_bytes(head))

    def _finish_file(self) -> None:
        if self._open is not None:
            self._open.finish()
            self._open = None


def _cut(entries: list[Entry], file_bytes: int) -> list[list[Entry]]:
    """Files of at most `file_bytes`, a tensor never cut; at least one file."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def export(model: nn.Module, dir: str | os.PathLike) -> int:
    """Write the model's parameters and buffers to `dir` as safetensors; returns the bytes of the tensors. Collective.

    Values are those that the model computes with, in their dtype. A tied parameter is written under its first name.
    If the model came from `load_pretrained`, its configuration and tokenizer files are written too. OSError from
    the drive; then the files have not got their names.
    """
    engine, machinery = engine_of(model)
    machinery.border()
    slots = [slot for unit in machinery.units for slot in unit.slots]
    wanted = set(zero3_full_state.persistent_buffers(model))
    buffers = {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in wanted}
    entries = [Entry(slot.name, slot.unit.dtype, tuple(slot.owner.shape)) for slot in slots if slot.first == 0]
    entries += [Entry(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]
    writes = machinery.ranks.rank == 0
    writer = _Writer(Path(dir), entries) if writes else None
    try:
        for number, unit in enumerate(machinery.units):
            with gathered([slot.param for slot in unit.slots]):
                for following in _following(machinery.units, number):
                    machinery.start_read(following)  # they arrive while this one is written
                for slot in unit.slots if writer is not None else []:
                    if slot.first == 0:  # other tiles go on where the one before ended
                        writer.begin(slot.name)  # type: ignore[union-attr]
                    writer.elements(parameter_forms.raw_data(slot.param).cpu())  # type: ignore[union-attr]
        if writer is not None:
            for name, buffer in buffers.items():
                writer.begin(name)
                writer.elements(buffer)
            writer.finish()
            write_companions(engine.companions, Path(dir), (entry.dtype for entry in entries))
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    return sum(entry.nbytes for entry in entries)


def _following(units: Sequence[Unit], number: int) -> Iterator[Unit]:
    """The unit behind this one, and as many more as keep a drive busy without taking much memory."""
    nbytes = 0
    for unit in units[number + 1 :]:
        if nbytes and nbytes + unit.nbytes > _AHEAD_BYTES:
            return
        nbytes += unit.nbytes
        yield unit


def export_checkpoint(checkpoint: str | os.PathLike, dir: str | os.PathLike) -> int:
    """Write a checkpoint's parameters and buffers to `dir` as safetensors, without building the model.

    The configuration and tokenizer files that the model came with are written too. Returns the bytes of the tensors.
    CheckpointError names what is damaged.
    """
    path = checkpoint_files.find(checkpoint)
    manifest = checkpoint_files.read_manifest(path)
    tensors = checkpoint_files.read_tensors(path, manifest)
    buffers = {name.removeprefix("buffer."): t for name, t in tensors.items() if name.startswith("buffer.")}
    known = tiles_by_name(manifest.units)
    firsts = list(dict.fromkeys(slot.names[0] for unit in manifest.units for slot in unit.slots))
    entries = [Entry(name, _param_dtype(known[name][0][0]), known[name][0][1].full_shape) for name in firsts]
    entries += [Entry(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]
    places = [place for name in firsts for place in known[name]]
    stretches = [(unit, "param", slot.offset, slot.offset + slot.numel) for unit, slot in places]
    writer = _Writer(Path(dir), entries)
    try:
        with checkpoint_files.PieceReader(path, manifest, stretches) as reader:
            for (_, slot), stretch in zip(places, stretches, strict=True):
                if slot.first == 0:
                    writer.begin(slot.names[0])
                for _, part in reader.read(*stretch):
                    writer.elements(part)
        for name, buffer in buffers.items():
            writer.begin(name)
            writer.elements(buffer)
        nbytes = writer.finish()
        write_companions(from_tensors(tensors), Path(dir), (entry.dtype for entry in entries))
        return nbytes
    except BaseException:
        writer.discard()
        raise


def _param_dtype(unit: UnitRecord) -> torch.dtype:
    record: KindRecord = unit.kinds["param"]
    return DTYPES[record.dtype]


# -- reading --------------------------------------------------------------------------------------------------


def load_pretrained(model: nn.Module, dir: str | os.PathLike, strict: bool = True) -> Any:
    """Load safetensors (one file, or several with an index) into a zinf model, streamed. Collective.

    Each rank reads only what it keeps; elements are converted to the master's dtype. A name that is tied to one
    that is there may be missing; one that lacks the model's `base_model_prefix`, or has it for nothing, is found as
    transformers finds it. `strict`: else names must agree, or RuntimeError lists them; a shape that differs
    is always a RuntimeError, and nothing is loaded then. Optimizer moments stay; a pending update is settled first.
    CheckpointError for a file that is damaged. Returns (missing_keys, unexpected_keys).
    """
    engine, machinery = engine_of(model)
    machinery.border()
    for unit in machinery.units:
        machinery.release(unit, force=True)
    if engine.optimizer is not None:
        engine.optimizer.settle()
    with contextlib.ExitStack() as stack:
        folder = _Folder(Path(dir), stack, model)
        entries, result = zero3_full_state.compare(model, folder, strict)
        sources = _sources(entries, folder)
        whole = [unit for unit in machinery.units if all(slot in sources for slot in unit.slots)]
        _fill(engine, whole, sources, folder)
        filled = {slot for unit in whole for slot in unit.slots}

        def is_filled(entry: Tensor) -> bool:
            slots = parameter_forms.slots_of(entry)
            return bool(slots) and filled.issuperset(slots)

        rest = {name: entry for name, entry in entries.items() if not is_filled(entry)}
        with ReadAhead() as folder.ahead:
            zero3_full_state.load_entries(rest, folder)
    engine.companions = read_companions(Path(dir))
    return result


def _sources(entries: Mapping[str, Tensor], folder: _Folder) -> dict[ParamSlot, str]:
    """The name under which the folder has each parameter."""
    available, sources = set(folder.names), {}
    for name, entry in entries.items():
        for slot in parameter_forms.slots_of(entry) if name in available else []:
            sources[slot] = name
    return sources


def _fill(engine: OffloadEngine, units: list[Unit], sources: Mapping[ParamSlot, str], folder: _Folder) -> None:
    """New values for whole shards: nothing of the old ones is read."""
    order = (
        folder.stretch(sources[slot], low, high)
        for unit in units
        for start, stop in pieces(unit.shard_numel)
        for slot, low, high, _ in _own_parts(unit, start, stop)
    )
    with ReadAhead(order) as folder.ahead, TierFill(engine, units) as fill:
        for unit in units:
            for start, stop in pieces(unit.shard_numel):
                own = list(_own_parts(unit, start, stop))
                with engine.host_buffer(stop - start, unit.master_dtype) as values:
                    if sum(high - low for _, low, high, _ in own) < values.numel():
                        values.zero_()  # what pads the shard
                    for slot, low, high, to in own:
                        values[to : to + high - low] = folder.flat_part(sources[slot], low, high)
                    with fill.parts(unit, unit_states.value_kinds(unit.dtype), start, stop) as parts:
                        unit_states.split_into(parts, unit.dtype, values)
    for unit in units:
        unit.model.values_changed(unit)


def _own_parts(unit: Unit, start: int, stop: int) -> Iterator[tuple[ParamSlot, int, int, int]]:
    """Parameters in [start, stop) of this rank's shard: (slot, [low, high) of its elements, where they go)."""
    for slot in unit.slots:
        low, high = max(slot.start, start), min(slot.stop, stop)
        if low < high:
            first = slot.own_range()[0] - slot.start + slot.first  # from the shard's count to the parameter's
            yield slot, low + first, high + first, low - start


def _aliases(model: nn.Module) -> list[list[str]]:
    """Names of parameters that have several."""
    names: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [group for group in names.values() if len(group) > 1]


class _Folder:
    """All tensors of a folder's safetensors files, by their names in the model; a tied name stands for its twin.

    ahead   reads their elements
    """

    ahead: ReadAhead

    def __init__(self, folder: Path, stack: contextlib.ExitStack, model: nn.Module):
        stored: dict[str, SafetensorsFile] = {}
        opened: dict[str, SafetensorsFile] = {}
        for name, file in _weight_map(folder):
            if file not in opened:
                opened[file] = stack.enter_context(SafetensorsFile(folder / file))
            if name not in opened[file].names:
                raise CheckpointError(f"{folder / file} lacks {name!r}, which the index places there")
            stored[name] = opened[file]
        own = zero3_full_state.state_dict(model).keys()
        names = names_in_model(model, own, stored)
        self._places = {name: (stored[stored_name], stored_name) for name, stored_name in names.items()}
        for group in _aliases(model):
            present = [name for name in group if name in self._places]
            self._places |= {name: self._places[present[0]] for name in group if present and name not in self._places}
        self.names = list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored_name = self._places[name]
        return file.shape(stored_name)

    def stretch(self, name: str, start: int, stop: int) -> Stretch:
        file, stored_name = self._places[name]
        return file.stretch(stored_name, start, stop)

    def flat_part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order; valid until the next ones."""
        if start >= stop:
            return torch.empty(0)
        content, _ = self.ahead.get(self.stretch(name, start, stop))
        file, stored_name = self._places[name]
        return as_elements(content, file.dtype(stored_name))


def _weight_map(folder: Path) -> Iterator[tuple[str, str]]:
    """(tensor, file) of all tensors. File names that lead out of the folder are refused."""
    if (folder / INDEX).is_file():
        try:
            weight_map: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is damaged: {error!r}") from error
        for name, file in weight_map.items():
            if os.path.basename(file) != file or not (folder / file).is_file():
                raise CheckpointError(f"{folder / INDEX} places {name!r} in {file!r}, which is no file of the folder")
            yield name, file
        return
    if not (folder / SINGLE).is_file():
        raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    with SafetensorsFile(folder / SINGLE) as single:
        names = single.names
    yield from ((name, SINGLE) for name in names)
