"""Which parameters form which unit: whole submodules up to a size, bigger ones split at their children.

Pure: looks at the module tree, moves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .tiles import tiles_of

# "auto": a unit is at most this part of the model (so that one computes while others travel) and at most this
# many elements (so that the few in flight stay small beside the memory that people have).
_AUTO_PARTS = 4
_AUTO_NUMEL = 16 << 20

_AS_UNIT = "_zero3_as_unit"

_BINARY_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


@dataclass
class Group:
    """Parameters for one unit.

    host     the module whose forward uses them, and holds the unit meanwhile; None for a tile, which nobody holds
    name     the host's name in the model, with a suffix where one host has several groups
    params   (parameter, all its names), in the order of the module tree
    """

    host: nn.Module | None
    name: str
    params: list[tuple[Tensor, list[str]]] = field(default_factory=list)


def mark_as_unit(module: nn.Module) -> None:
    """Gather the whole subtree of `module` as one unit, whatever its size.

    Counts when the model's units are made: call it before `shard`, or before the block of `init` ends.
    """
    setattr(module, _AS_UNIT, True)


def parse_size(size: int | str) -> int:
    """Bytes: an int, or a string with a binary unit ("512KiB", "8GiB"). ValueError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match and match[2].lower() in _BINARY_UNITS:
        return int(float(match[1]) * _BINARY_UNITS[match[2].lower()])
    raise ValueError(f"size {size!r} is neither a number of bytes nor a string such as '512KiB', '1MiB', '8GiB'")


def group(
    module: nn.Module, unit_size: int | str, dtypes_of: Callable[[Tensor], tuple[torch.dtype, torch.dtype]]
) -> list[Group]:
    """Cut the parameters of `module` into groups, each parameter once (tied ones with their first module).

    Of a parameter in tiles each tile is a group of its own.

    unit_size   bytes of a gathered unit, or "auto"
    dtypes_of   (dtype of the shard, dtype when gathered) of a parameter
    """
    names: dict[Tensor, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    sizes = {param: param.numel() * dtypes_of(param)[1].itemsize for param in names}
    if unit_size == "auto":
        widest = max((dtypes_of(param)[1].itemsize for param in names), default=1)
        limit = min(sum(sizes.values()) // _AUTO_PARTS, _AUTO_NUMEL * widest)
    else:
        limit = parse_size(unit_size)
    tiled = {param: tiles for param in names if (tiles := tiles_of(param)) is not None}
    claimed: dict[Tensor, nn.Module] = {}  # by the outermost module that was marked to be one unit
    for node in module.modules():
        if getattr(node, _AS_UNIT, False):
            claimed.update((p, node) for p in node.parameters() if p not in claimed and p not in tiled)
    taken: set[Tensor] = set(tiled)
    groups: list[Group] = []

    def take(host: nn.Module, name: str, params: list[Tensor]) -> None:
        """Groups of equal dtype and of equal need of a gradient: a frozen unit is never reduced nor updated."""
        kinds: dict[tuple, Group] = {}
        for param in params:
            kind = (*dtypes_of(param), param.requires_grad)
            kinds.setdefault(kind, Group(host, name)).params.append((param, names[param]))
        taken.update(params)
        for number, one in enumerate(kinds.values()):
            one.name = name if number == 0 else f"{name}#{number}"
            groups.append(one)

    def take_tiles(params: Iterator[Tensor]) -> None:
        for param in params:
            for start, stop, tile in tiled.pop(param, ()):
                groups.append(Group(None, f"{names[param][0]}[{start}:{stop}]", [(tile, names[param])]))

    def walk(node: nn.Module, name: str, host: nn.Module) -> None:
        host = node if _is_called(node) else host
        whole = [param for param in _unique(node.parameters()) if param not in taken]
        own = [param for param in _unique(node.parameters(recurse=False)) if param not in taken]
        fits = _is_called(node) and sum(sizes[param] for param in whole) <= limit and claimed.keys().isdisjoint(whole)
        mine = [param for param in (whole if fits else own) if param not in claimed]
        if getattr(node, _AS_UNIT, False):
            mine = [param for param in whole if claimed[param] is node]
        if mine:
            take(host, name, mine)
        take_tiles(node.parameters(recurse=len(mine) == len(whole)))
        if len(mine) == len(whole):
            return
        for child_name, child in node.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name, host)

    walk(module, "", module)
    for one in groups:
        one.name = one.name or "(root)"
    return groups


def _is_called(module: nn.Module) -> bool:
    """Whether the module has a forward of its own; containers such as ModuleList are only looked into."""
    return type(module).forward is not nn.Module.forward


def _unique(params: Iterator[Tensor]) -> list[Tensor]:
    return list(dict.fromkeys(params))
