"""A checkpoint on disk: finding it, and reading it with every piece checked against its checksum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import load as load_tensors
from torch import Tensor

import deepnvme

from . import checkpoint_format as layout
from .checkpoint_format import DTYPES, Manifest, UnitRecord
from .errors import CheckpointError


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


def read_tensors(path: Path, manifest: Manifest) -> dict[str, Tensor]:
    blob = (path / layout.TENSORS).read_bytes()
    if deepnvme.crc32c(bytearray(blob)) != manifest.tensors_crc32c:
        raise CheckpointError(f"{path / layout.TENSORS} is damaged")
    return load_tensors(blob)


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
            self._kept[key] = self.read_checked(unit, kind, rank, piece)
            while len(self._kept) > _KEPT_PIECES:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def read_checked(self, unit: UnitRecord, kind: str, rank: int, piece: int) -> Tensor:
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
                    reader.read_checked(unit, kind, rank, piece)
                except (CheckpointError, OSError) as error:
                    damaged.append(str(error))
    return damaged


def _all_shards(manifest: Manifest) -> Iterable[tuple[UnitRecord, str, int]]:
    for unit in manifest.units:
        for kind in unit.kinds:
            for rank in range(manifest.ranks):
                yield unit, kind, rank
