"""export() and load_pretrained(): safetensors in Hugging Face's layout, streamed between file and tier.

A folder holds `model.safetensors`, or several files and `model.safetensors.index.json`. Writing goes unit by unit,
each gathered once; reading slices of every tensor only the rows that this rank keeps. The whole model is never in
memory. The file format is simple enough to write by hand, as a stream: eight bytes of header length, a JSON header
with every tensor's dtype, shape and place, then the elements (safetensors' own writer wants all tensors at once).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zero3 import full_state as zero3_full_state
from zero3 import gathered, parameter_forms

from . import checkpoint_files
from .checkpoint_format import DTYPES, KindRecord, UnitRecord
from .companion_files import from_tensors, read_companions, write_companions
from .errors import CheckpointError
from .offload_engine import engine_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Bytes of one file, as the Hub's tools cut them.
_FILE_BYTES = 5 * 10**9

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = self.dtype.itemsize
        for extent in self.shape:
            count *= extent
        return count


# -- writing --------------------------------------------------------------------------------------------------


class _Writer:
    """Files of a folder, written in the order of `entries`, under their names only when all are complete."""

    def __init__(self, folder: Path, entries: list[_Entry], file_bytes: int = _FILE_BYTES):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files = _cut(entries, file_bytes)
        self._names = [_file_name(number, len(self._files)) for number in range(len(self._files))]
        self._order = [(entry, number) for number, file in enumerate(self._files) for entry in file]
        self._next = 0
        self._left = 0  # bytes of the current tensor that are still to come
        self._open: BinaryIO | None = None
        self._open_number = -1

    def begin(self, name: str) -> None:
        """The elements of tensor `name` follow."""
        entry, number = self._order[self._next]
        assert entry.name == name, (entry.name, name)
        assert not self._left, self._left
        self._next += 1
        self._left = entry.nbytes
        if number != self._open_number:
            self._close_file()
            self._open = self._beside(number).open("wb")
            self._open.write(_header(self._files[number]))
            self._open_number = number

    def elements(self, part: Tensor) -> None:
        """The next elements of the current tensor."""
        self._left -= part.nbytes
        self._open.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)  # type: ignore[union-attr]

    def finish(self) -> int:
        """Give the files their names; returns the bytes of the tensors."""
        self._close_file()
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

    def _close_file(self) -> None:
        if self._open is not None:
            self._open.flush()
            os.fsync(self._open.fileno())
            self._open.close()
            self._open = None


def _cut(entries: list[_Entry], file_bytes: int) -> list[list[_Entry]]:
    """Files of at most `file_bytes`, a tensor never cut; at least one file."""
    files: list[list[_Entry]] = [[]]
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


def _header(entries: Iterable[_Entry]) -> bytes:
    """Length and JSON of a file's header, padded so that the elements begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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
    entries = [_Entry(slot.name, slot.unit.dtype, tuple(slot.shape)) for slot in slots]
    entries += [_Entry(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]
    writes = machinery.ranks.rank == 0
    writer = _Writer(Path(dir), entries) if writes else None
    try:
        for unit in machinery.units:
            with gathered([slot.param for slot in unit.slots]):
                for slot in unit.slots if writer is not None else []:
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


def export_checkpoint(checkpoint: str | os.PathLike, dir: str | os.PathLike) -> int:
    """Write a checkpoint's parameters and buffers to `dir` as safetensors, without building the model.

    The configuration and tokenizer files that the model came with are written too. Returns the bytes of the tensors.
    CheckpointError names what is damaged.
    """
    path = checkpoint_files.find(checkpoint)
    manifest = checkpoint_files.read_manifest(path)
    tensors = checkpoint_files.read_tensors(path, manifest)
    buffers = {name.removeprefix("buffer."): t for name, t in tensors.items() if name.startswith("buffer.")}
    places = [(unit, slot) for unit in manifest.units for slot in unit.slots]
    entries = [_Entry(slot.names[0], _param_dtype(unit), tuple(slot.shape)) for unit, slot in places]
    entries += [_Entry(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]
    writer = _Writer(Path(dir), entries)
    try:
        with checkpoint_files.PieceReader(path, manifest) as reader:
            for unit, slot in places:
                writer.begin(slot.names[0])
                for _, part in reader.read(unit, "param", slot.offset, slot.offset + slot.numel):
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
    that is there may be missing. `strict`: else names must agree, or RuntimeError lists them; a shape that differs
    is always a RuntimeError, and nothing is loaded then. Optimizer moments stay; a pending update is settled first.
    Returns (missing_keys, unexpected_keys).
    """
    engine, machinery = engine_of(model)
    machinery.border()
    if engine.optimizer is not None:
        engine.optimizer.settle()
    with contextlib.ExitStack() as stack:
        source = _Folder(Path(dir), stack, _aliases(model))
        result = zero3_full_state.load_from(model, source, strict)
    engine.companions = read_companions(Path(dir))
    return result


def _aliases(model: nn.Module) -> list[list[str]]:
    """Names of parameters that have several."""
    names: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [group for group in names.values() if len(group) > 1]


class _Folder:
    """All tensors of a folder's safetensors files, by name, opened lazily; a tied name stands for its twin."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, aliases: list[list[str]]):
        self._files: dict[str, zero3_full_state.SafetensorsFile] = {}
        opened = {}
        for name, file in _weight_map(folder):
            if file not in opened:
                opened[file] = zero3_full_state.SafetensorsFile(stack.enter_context(_opened(folder / file)))
            if name not in opened[file].names:
                raise CheckpointError(f"{folder / file} lacks {name!r}, which the index places there")
            self._files[name] = opened[file]
        self._stands_for: dict[str, str] = {}
        for group in aliases:
            present = [name for name in group if name in self._files]
            for name in group if present else []:
                if name not in self._files:
                    self._stands_for[name] = present[0]
        self.names = [*self._files, *self._stands_for]

    def shape(self, name: str) -> tuple[int, ...]:
        name = self._stands_for.get(name, name)
        return self._files[name].shape(name)

    def flat_part(self, name: str, start: int, stop: int) -> Tensor:
        name = self._stands_for.get(name, name)
        return self._files[name].flat_part(name, start, stop)


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
    with _opened(folder / SINGLE) as file:
        names = list(file.keys())
    yield from ((name, SINGLE) for name in names)


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
