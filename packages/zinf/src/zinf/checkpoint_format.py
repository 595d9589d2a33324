"""What a checkpoint looks like on disk, and where a byte of it lies. No file is opened here.

    checkpoint-000012/
        rank-0.bin ...      a rank's shards: unit after unit, kind after kind, in pieces; raw little-endian elements
        tensors.safetensors buffers of the model, and tensors of `extra`
        manifest.json       everything else; written last

The manifest holds no path and nothing is executed from it. Names in it are looked up, never opened.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .errors import CheckpointError

FORMAT = "zinf-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"

# Every shard of a kind begins at a multiple of this: it is read and written in place by O_DIRECT.
ALIGNMENT = 4096

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    )
}  # fmt: skip

_NAME = re.compile(r"checkpoint-(\d{6,})")


def folder_name(number: int) -> str:
    return f"checkpoint-{number:06d}"


def number_of(folder: str) -> int | None:
    """The number in a checkpoint folder's name; None for any other name."""
    match = _NAME.fullmatch(folder)
    return int(match.group(1)) if match else None


def rank_file(rank: int) -> str:
    return f"rank-{rank}.bin"


@dataclass
class SlotRecord:
    """A parameter: its names, its place in the unit, and how often it was updated."""

    names: list[str]
    shape: list[int]
    offset: int
    step: int | None

    @property
    def numel(self) -> int:
        numel = 1
        for extent in self.shape:
            numel *= extent
        return numel


@dataclass
class KindRecord:
    """One kind of a unit's states: where each rank's shard of it begins, and the checksums of its pieces."""

    dtype: str
    file_offset: int
    crc32c: list[list[int]] = field(default_factory=list)
    """[rank][piece]"""


@dataclass
class UnitRecord:
    name: str
    shard_numel: int
    slots: list[SlotRecord]
    kinds: dict[str, KindRecord]


@dataclass
class Manifest:
    """All of a checkpoint but its bytes.

    ranks    files of shards; piece_numel: elements covered by one checksum
    """

    ranks: int
    piece_numel: int
    units: list[UnitRecord]
    optimizer: dict[str, Any]
    extra: Any
    tensors_crc32c: int | None
    random_states: list[str]
    """Of torch's CPU generator, one a rank, in hexadecimal."""

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """CheckpointError for anything that is not such a manifest."""
        try:
            if data["format"] != FORMAT or data["version"] != VERSION:
                raise CheckpointError(
                    f"format {data['format']!r} version {data['version']!r} is not ours ({FORMAT} {VERSION})"
                )
            return cls(
                ranks=_positive(data["ranks"]),
                piece_numel=_positive(data["piece_numel"]),
                units=[_unit(unit) for unit in data["units"]],
                optimizer=dict(data["optimizer"]),
                extra=data["extra"],
                tensors_crc32c=data["tensors_crc32c"],
                random_states=list(data["random_states"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the manifest is damaged: {error!r}") from error

    def file_nbytes(self) -> int:
        """Length that every rank's file must have at least."""
        return max(
            (
                kind.file_offset + unit.shard_numel * DTYPES[kind.dtype].itemsize
                for unit in self.units
                for kind in unit.kinds.values()
            ),
            default=0,
        )


def _unit(data: dict[str, Any]) -> UnitRecord:
    kinds = {name: KindRecord(**kind) for name, kind in data["kinds"].items()}
    for kind in kinds.values():
        if kind.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {kind.dtype!r}")
        _natural(kind.file_offset)
    slots = [SlotRecord(**slot) for slot in data["slots"]]
    for slot in slots:
        _natural(slot.offset)
        for extent in slot.shape:
            _natural(extent)
    return UnitRecord(str(data["name"]), _positive(data["shard_numel"]), slots, kinds)


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _positive(value: Any) -> int:
    if not _natural(value):
        raise ValueError("a count is 0")
    return value
