"""The safetensors format: eight bytes of header length, a JSON header with every tensor's dtype, shape and place,
then the elements. Simple enough to be written by hand, as a stream (safetensors' own writer wants all tensors at
once), and to be read by direct I/O, only the part of a tensor that is wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import deepnvme

from .errors import CheckpointError
from .read_ahead import Stretch

# Names in a folder of Hugging Face's layout: its one file; or, of several, what tells which tensor is where.
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

# The format asks for a multiple of 8; with this one direct I/O reads the elements in place.
_HEADER_ALIGNMENT = 4096


@dataclass(frozen=True)
class Entry:
    """A tensor to be written. TypeError for a dtype that the format does not have."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _CODES:
            raise TypeError(f"{self.name} is {self.dtype}, which safetensors files do not have")

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


def refuse_unwritable(what: str, tensor: Tensor) -> None:
    """TypeError for a tensor that files of this format cannot hold."""
    if tensor.is_meta:
        raise TypeError(f"{what} is on the meta device, where tensors have no values")
    if tensor.layout is not torch.strided or tensor.dtype not in _CODES:
        kind = tensor.dtype if tensor.layout is torch.strided else tensor.layout
        raise TypeError(f"{what} is {kind}, which safetensors files do not have")


def header(entries: Iterable[Entry]) -> bytes:
    """Length and JSON of the header of a file that holds `entries` in this order."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        content[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


class SafetensorsFile:
    """Where the tensors of a file lie. CheckpointError, naming the file, when it is damaged.

    names   of its tensors
    """

    def __init__(self, path: Path):
        try:
            with safe_open(str(path), framework="pt") as file:  # checks the header against itself and the length
                self.names: list[str] = list(file.keys())
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error
        with path.open("rb") as plain:
            length = int.from_bytes(plain.read(8), "little")
            self._places = json.loads(plain.read(length))
        self._elements_at = 8 + length
        self._file = deepnvme.File(path, "r")

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._places[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        code = self._places[name]["dtype"]
        if code not in _DTYPES:
            raise CheckpointError(f"{self._file.paths[0]}: tensor {name!r} is of dtype {code}, which is not read here")
        return _DTYPES[code]

    def stretch(self, name: str, start: int, stop: int) -> Stretch:
        """Where elements [start, stop), in row-major order, lie."""
        itemsize = self.dtype(name).itemsize
        offset = self._elements_at + self._places[name]["data_offsets"][0]
        return Stretch(self._file, offset + start * itemsize, (stop - start) * itemsize)
