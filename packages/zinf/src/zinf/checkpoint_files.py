"""A checkpoint on disk: finding it, and reading it with every piece checked against its checksum."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

import deepnvme

from . import checkpoint_format as layout
from .checkpoint_format import DTYPES, Manifest, UnitRecord
from .errors import CheckpointError
from .read_ahead import ReadAhead, Stretch


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
    """Buffers, and the tensors of `extra`. CheckpointError when the file is damaged or cannot be read."""
    file = path / layout.TENSORS
    try:
        blob = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    if deepnvme.crc32c(bytearray(blob)) != manifest.tensors_crc32c:
        raise CheckpointError(f"{file} is damaged")
    try:
        return load_tensors(blob)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


@dataclass(frozen=True)
class Piece:
    """What one checksum covers: a kind of a unit's shard of a rank, by number."""

    unit: UnitRecord = field(compare=False)
    unit_id: int
    kind: str
    rank: int
    number: int


class PieceReader:
    """Elements of a kind's shards, every piece checked against its checksum."""

    def __init__(self, path: Path, manifest: Manifest):
        self._path, self._manifest = path, manifest

    def __enter__(self) -> PieceReader:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            files = range(self._manifest.ranks)
            self._files = [
                stack.enter_context(deepnvme.File(self._path / layout.rank_file(rank), "r")) for rank in files
            ]
            self._ahead = stack.enter_context(ReadAhead(checksum=True))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def will_read(self, order: Iterable[tuple[UnitRecord, str, int, int]]) -> None:
        """The stretches of units for which `read` will be called, (unit, kind, start, stop): they are read ahead."""
        self._ahead.expect(self._stretch(piece) for wanted in order for piece, _ in self._pieces(*wanted))

    def read(self, unit: UnitRecord, kind: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """[start, stop) of the unit's flat buffer, all ranks' shards one after the other: (start, elements).

        Elements are valid until the next ones. CheckpointError names what is damaged.
        """
        for piece, first in self._pieces(unit, kind, start, stop):
            elements = self.read_checked(piece)
            low, high = max(start, first), min(stop, first + elements.numel())
            yield low, elements[low - first : high - first]

    def read_checked(self, piece: Piece) -> Tensor:
        """The elements of one piece."""
        content, crc32c = self._ahead.get(self._stretch(piece))
        if crc32c is not None:
            self.check(piece, crc32c)
        return content.view(DTYPES[piece.unit.kinds[piece.kind].dtype])

    def flat_numel(self, unit: UnitRecord) -> int:
        """Elements of the unit's flat buffer."""
        return unit.shard_numel * self._manifest.ranks

    def whole_piece(self, unit: UnitRecord, kind: str, start: int, stop: int) -> Piece | None:
        """The piece that is exactly [start, stop) of the unit's flat buffer, if there is one."""
        pieces = list(self._pieces(unit, kind, start, stop))
        if len(pieces) != 1:
            return None
        [(piece, first)] = pieces
        return piece if (first, first + self._count(piece)) == (start, stop) else None

    def start_read(self, piece: Piece, out: Tensor) -> deepnvme.Request:
        """Fill `out`, of the piece's bytes; `check` what the request then has as crc32c."""
        return self._ahead.start_read(self._stretch(piece), out)

    def check(self, piece: Piece, crc32c: int | None) -> None:
        """CheckpointError where this is not what it must be, and names what is damaged."""
        record = piece.unit.kinds[piece.kind]
        if crc32c != record.crc32c[piece.rank][piece.number]:
            stretch = self._stretch(piece)
            names = _names_within(piece.unit, self._first(piece), self._count(piece))
            raise CheckpointError(
                f"{self._path / layout.rank_file(piece.rank)}: {piece.kind} of {', '.join(names)} is damaged "
                f"({stretch.nbytes} bytes at {stretch.file_offset})"
            )

    def all_pieces(self) -> Iterator[Piece]:
        """Every piece of the checkpoint."""
        for unit in self._manifest.units:
            for kind in unit.kinds:
                yield from (piece for piece, _ in self._pieces(unit, kind, 0, self.flat_numel(unit)))

    def _pieces(self, unit: UnitRecord, kind: str, start: int, stop: int) -> Iterator[tuple[Piece, int]]:
        """The pieces that hold [start, stop), and where in the unit's flat buffer each begins."""
        numel = self._manifest.piece_numel
        while start < stop:
            rank, within = divmod(start, unit.shard_numel)
            piece = Piece(unit, id(unit), kind, rank, within // numel)
            first = self._first(piece)
            yield piece, first
            start = min(first + numel, (rank + 1) * unit.shard_numel)

    def _first(self, piece: Piece) -> int:
        return piece.rank * piece.unit.shard_numel + piece.number * self._manifest.piece_numel

    def _stretch(self, piece: Piece) -> Stretch:
        record = piece.unit.kinds[piece.kind]
        itemsize = DTYPES[record.dtype].itemsize
        offset = record.file_offset + piece.number * self._manifest.piece_numel * itemsize
        return Stretch(self._files[piece.rank], offset, self._count(piece) * itemsize)

    def _count(self, piece: Piece) -> int:
        """Elements."""
        numel = self._manifest.piece_numel
        return min(numel, piece.unit.shard_numel - piece.number * numel)


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
        reader.will_read((unit, kind, 0, reader.flat_numel(unit)) for unit in manifest.units for kind in unit.kinds)
        for piece in reader.all_pieces():
            try:
                reader.read_checked(piece)
            except (CheckpointError, OSError) as error:
                damaged.append(str(error))
    return damaged
