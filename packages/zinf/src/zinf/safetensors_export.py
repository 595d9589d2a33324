"""export(): safetensors in Hugging Face's layout, streamed from the tiers.

A folder holds `model.safetensors`, or several files and `model.safetensors.index.json`. It is written unit by unit,
each gathered once, the next ones on their way from their tier. The whole model is never in memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from zero3 import gathered, parameter_forms
from zero3.full_state import persistent_buffers
from zero3.unit import Unit

from . import checkpoint_files
from .checkpoint_format import DTYPES, KindRecord, UnitRecord, tiles_by_name
from .companion_files import from_tensors, write_companions
from .named_file import named_file
from .offload_engine import engine_of
from .safetensors_file import INDEX, SINGLE, Entry, header
from .sequential_file import SequentialFile, as_bytes

# Bytes of one file, as the Hub's tools cut them.
_FILE_BYTES = 5 * 10**9

# Names of several files of weights, as in `_file_name`.
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")

# Bytes of units that are read while another is written.
_AHEAD_BYTES = 32 << 20


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
        """Give the files their names, in place of all weights that were there; returns the bytes of the tensors."""
        if not self._order:
            self._begin_file(0)
        self._finish_file()
        for number, name in enumerate(self._names):
            os.replace(self._beside(number), self._folder / name)
        total = sum(entry.nbytes for entry, _ in self._order)
        if len(self._names) == 1:
            (self._folder / INDEX).unlink(missing_ok=True)
        else:
            weight_map = {entry.name: self._names[number] for entry, number in self._order}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            beside = self._folder / f".{INDEX}"
            with named_file(beside):
                beside.write_text(text)
            os.replace(beside, self._folder / INDEX)
        self._remove_older()
        return total

    def _remove_older(self) -> None:
        """Weights that were exported here before, in other files: readers would find those, or both."""
        for path in self._folder.iterdir():
            if path.name not in self._names and (path.name == SINGLE or _SHARD.fullmatch(path.name)):
                path.unlink()

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
    engine.refuse_half_loaded()
    machinery.border()
    slots = [slot for unit in machinery.units for slot in unit.slots]
    wanted = set(persistent_buffers(model))
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
        with checkpoint_files.PieceReader(path, manifest) as reader:
            reader.will_read(stretches)
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
