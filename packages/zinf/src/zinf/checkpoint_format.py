"""What a checkpoint looks like on disk, and where a byte of it lies. No file is opened here.

    checkpoint-000012/
        rank-0.bin ...      a rank's shards: unit after unit, kind after kind, in pieces; raw little-endian elements
        tensors.safetensors buffers of the model, and tensors of `extra` and of modules' extra states
        manifest.json       everything else, with a checksum of its own; written last

The manifest holds no path and nothing is executed from it. Names in it are looked up, never opened.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from math import isfinite, prod
from typing import Any

import torch

from cpu_adam.scalars import scheduled_rate
from deepnvme import crc32c

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
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
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
    """A parameter: its names, its place in the unit, how often it was updated, and whether its gradients are sums.

    A tile of one: `first`, the element of the whole with which it begins, and the shape of the `whole`.
    """

    names: list[str]
    shape: list[int]
    offset: int
    step: int | None
    accumulates: bool = False
    first: int = 0
    whole: list[int] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Of the parameter that the model has."""
        return tuple(self.shape if self.whole is None else self.whole)


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
class OptimizerRecord:
    """Settings of the parameter groups, and the loss scale."""

    groups: list[dict[str, Any]]
    loss_scale: dict[str, float] | None


@dataclass
class Manifest:
    """All of a checkpoint but its bytes.

    ranks    files of shards; piece_numel: elements covered by one checksum
    """

    ranks: int
    piece_numel: int
    units: list[UnitRecord]
    optimizer: OptimizerRecord
    extra: Any
    module_states: dict[str, Any]
    """What modules' `get_extra_state` gave, by name; as `extra`."""
    tensors_crc32c: int
    random_states: list[str]
    """Of torch's CPU generator, one a rank, in hexadecimal."""

    def encode(self) -> bytes:
        """JSON: {"crc32c": of the bytes of what follows, "checkpoint": {...}}."""
        body = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()
        return _PREFIX % crc32c(bytearray(body)) + body + b"}"

    @classmethod
    def decode(cls, content: bytes) -> Manifest:
        """CheckpointError for anything that is not such a manifest, or was changed since."""
        match = _ENCODED.fullmatch(content)
        if match is None:
            raise CheckpointError("the manifest is damaged: it does not begin and end as one does")
        if crc32c(bytearray(match[2])) != int(match[1], 16):
            raise CheckpointError("the manifest is damaged: its checksum differs")
        try:
            return cls._from_json(json.loads(match[2]))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"the manifest is damaged: {error!r}") from error

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> Manifest:
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise CheckpointError(
                f"format {data['format']!r} version {data['version']!r} is not ours ({FORMAT} {VERSION})"
            )
        ranks, piece_numel = _positive(data["ranks"]), _positive(data["piece_numel"])
        return cls(
            ranks=ranks,
            piece_numel=piece_numel,
            units=[_unit(unit, ranks, piece_numel) for unit in _list(data["units"])],
            optimizer=_optimizer(data["optimizer"]),
            extra=data["extra"],
            module_states=dict(data.get("module_states", {})),
            tensors_crc32c=_natural(data["tensors_crc32c"]),
            random_states=[bytes.fromhex(_string(state)).hex() for state in _list(data["random_states"])],
        )

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


_PREFIX = b'{"crc32c": "%08x", "checkpoint": '
_ENCODED = re.compile(rb'\{"crc32c": "([0-9a-f]{8})", "checkpoint": (.*)\}', re.DOTALL)


def tiles_by_name(units: list[UnitRecord]) -> dict[str, list[tuple[UnitRecord, SlotRecord]]]:
    """Every name of every parameter -> where it is: its tiles in order, or itself. CheckpointError when rows lack."""
    known: dict[str, list[tuple[UnitRecord, SlotRecord]]] = {}
    for unit in units:
        for slot in unit.slots:
            for name in slot.names:
                known.setdefault(name, []).append((unit, slot))
    for name, places in known.items():
        places.sort(key=lambda place: place[1].first)
        end = 0
        for _, slot in places:
            if slot.first != end or slot.full_shape != places[0][1].full_shape:
                raise CheckpointError(f"the tiles of {name!r} do not fit together")
            end += slot.numel
        if end != prod(places[0][1].full_shape):
            raise CheckpointError(f"{name!r} is not whole: {end} of {prod(places[0][1].full_shape)} elements")
    return known


# -- what a manifest may hold; ValueError (or TypeError, KeyError) for anything else ---------------------------


def _unit(data: dict[str, Any], ranks: int, piece_numel: int) -> UnitRecord:
    shard_numel = _positive(data["shard_numel"])
    pieces = -(-shard_numel // piece_numel)
    kinds = {name: _kind(name, kind, ranks, pieces) for name, kind in data["kinds"].items()}
    if "param" not in kinds:
        raise ValueError(f"unit {data['name']!r} has no values")
    slots = [_slot(slot) for slot in _list(data["slots"])]
    for slot in slots:
        if slot.offset + slot.numel > shard_numel * ranks:
            raise ValueError(f"{slot.names[0]!r} ends behind its unit")
    return UnitRecord(_string(data["name"]), shard_numel, slots, kinds)


def _slot(data: dict[str, Any]) -> SlotRecord:
    names = [_string(name) for name in _list(data["names"])]
    if not names:
        raise ValueError("a parameter has no name")
    shape = [_natural(extent) for extent in _list(data["shape"])]
    step = None if data["step"] is None else _natural(data["step"])
    whole = data.get("whole")
    whole = None if whole is None else [_natural(extent) for extent in _list(whole)]
    first = _natural(data.get("first", 0))
    slot = SlotRecord(names, shape, _natural(data["offset"]), step, data["accumulates"] is True, first, whole)
    if first + slot.numel > prod(slot.full_shape):
        raise ValueError(f"{names[0]!r} has a tile that ends behind it")
    return slot


def _kind(name: str, data: dict[str, Any], ranks: int, pieces: int) -> KindRecord:
    if data["dtype"] not in (_KINDS[name] or DTYPES):
        raise ValueError(f"{name} cannot be {data['dtype']!r}")
    sums = [[_natural(value) for value in _list(row)] for row in _list(data["crc32c"])]
    if len(sums) != ranks or any(len(row) != pieces for row in sums):
        raise ValueError(f"{name} has not a checksum for every piece")
    return KindRecord(data["dtype"], _natural(data["file_offset"]), sums)


# Kinds of state, and the dtype each must have (None: any).
_KINDS: dict[str, tuple[str, ...] | None] = {
    "param": None, "remainder": ("int16",), "master": ("float32",), "exp_avg": ("float32",), "exp_avg_sq": ("float32",),
}  # fmt: skip


def _optimizer(data: dict[str, Any]) -> OptimizerRecord:
    scale = data["loss_scale"]
    if scale is not None:
        scale = {"value": _number(scale["value"]), "good_steps": _natural(scale["good_steps"])}
    return OptimizerRecord([_group(group) for group in _list(data["groups"])], scale)


def _group(data: dict[str, Any]) -> dict[str, Any]:
    """Settings of a parameter group; a list becomes the tuple that it was."""
    if "params" in data:
        raise ValueError("settings of a group hold no parameters")
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    numbers = [scheduled_rate(_number(settings["lr"])), settings["eps"], settings["weight_decay"], *settings["betas"]]
    if len(numbers) != 5 or any(_number(value) < 0 for value in numbers):
        raise ValueError(f"settings {settings!r}")
    return settings


def _list(value: Any) -> list:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return value


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _positive(value: Any) -> int:
    if not _natural(value):
        raise ValueError("a count is 0")
    return value
