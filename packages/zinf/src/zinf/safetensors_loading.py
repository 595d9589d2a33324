"""load_pretrained(): safetensors in Hugging Face's layout, streamed to the tiers.

Of every tensor only what this rank keeps is read. What a file holds in the dtype that the model computes in goes
through one buffer from file to tier; what must be converted is read ahead. The whole model is never in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero3 import full_state as zero3_full_state
from zero3 import parameter_forms
from zero3.unit import ParamSlot, Unit

from . import unit_states
from .companion_files import read_companions
from .errors import CheckpointError
from .hub_names import names_in_model
from .offload_engine import OffloadEngine, engine_of, pieces
from .read_ahead import ReadAhead, Stretch, as_elements
from .ring_copy import Buffers, Copy, RingCopy
from .safetensors_file import INDEX, SINGLE, SafetensorsFile
from .tiers import NO_WAIT, Wait


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
        stack.enter_context(engine.loading(dir, moments=False, all_values=not result.missing_keys))
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


@dataclass(frozen=True)
class _Part:
    """[start, stop) of a unit's shard, and the parameters in it, of this rank: see `_own_parts`."""

    unit: Unit
    start: int
    stop: int
    own: list[tuple[ParamSlot, int, int, int]]

    @property
    def is_full(self) -> bool:
        """Whether no element only pads the shard."""
        return sum(high - low for _, low, high, _ in self.own) == self.stop - self.start


def _fill(engine: OffloadEngine, units: list[Unit], sources: Mapping[ParamSlot, str], folder: _Folder) -> None:
    """New values for whole shards: nothing of the old ones is read."""
    parts = [
        _Part(unit, start, stop, list(_own_parts(unit, start, stop)))
        for unit in units
        for start, stop in pieces(unit.shard_numel)
    ]
    as_stored = [_holds_param(part, sources, folder) for part in parts]
    converted = (part for part, as_it_is in zip(parts, as_stored, strict=True) if not as_it_is)
    order = (folder.stretch(sources[slot], low, high) for part in converted for slot, low, high, _ in part.own)
    with ReadAhead(order) as folder.ahead, RingCopy.for_pieces(engine, units, "loading weights") as ring:
        ring.run(
            (_read_param if as_it_is else _convert)(engine, part, sources, folder)
            for part, as_it_is in zip(parts, as_stored, strict=True)
        )
    for unit in units:
        unit.model.values_changed(unit)


def _holds_param(part: _Part, sources: Mapping[ParamSlot, str], folder: _Folder) -> bool:
    """Whether what the files hold of a part is its param as it is, the master having room for all of it."""
    unit = part.unit
    fits = torch.promote_types(unit.dtype, unit.master_dtype) is unit.master_dtype
    return fits and all(unit_states.is_param(unit.dtype, folder.dtype(sources[slot])) for slot, *_ in part.own)


def _read_param(engine: OffloadEngine, part: _Part, sources: Mapping[ParamSlot, str], folder: _Folder) -> Copy:
    """From the files to where it is written from."""
    unit = part.unit

    def read(buffers: Buffers) -> Wait:
        if not part.is_full:
            buffers[0].zero_()
        param = buffers[0].view(unit.dtype)
        return Wait(
            [
                folder.ahead.start_read(
                    folder.stretch(sources[slot], low, high), param[to : to + high - low].view(torch.uint8)
                )
                for slot, low, high, to in part.own
            ]
        )

    def write(buffers: Buffers, _: Wait) -> Wait:
        rest = [kind for kind in unit_states.value_kinds(unit.dtype) if kind != "param"]
        written = engine.start_write(unit, "param", buffers[0].view(unit.dtype), part.start)
        cleared = [engine.start_clear(unit, kind, part.start, part.stop - part.start) for kind in rest]
        return Wait.of_all([written, *cleared])

    return Copy([(part.stop - part.start) * unit.dtype.itemsize], read, write)


def _convert(engine: OffloadEngine, part: _Part, sources: Mapping[ParamSlot, str], folder: _Folder) -> Copy:
    """Through the master's dtype into the kinds that it is split into."""
    unit, numel = part.unit, part.stop - part.start
    kinds = unit_states.value_kinds(unit.dtype)

    def write(buffers: Buffers, _: Wait) -> Wait:
        states = {kind: buffer.view(dtype) for (kind, dtype), buffer in zip(kinds.items(), buffers, strict=True)}
        with engine.host_buffer(numel, unit.master_dtype) as values:
            if not part.is_full:
                values.zero_()
            for slot, low, high, to in part.own:
                values[to : to + high - low] = folder.flat_part(sources[slot], low, high)
            unit_states.split_into(states, unit.dtype, values)
        return Wait.of_all(engine.start_write(unit, kind, state, part.start) for kind, state in states.items())

    return Copy([numel * dtype.itemsize for dtype in kinds.values()], lambda _: NO_WAIT, write)


def _own_parts(unit: Unit, start: int, stop: int) -> Iterator[tuple[ParamSlot, int, int, int]]:
    """Parameters in [start, stop) of this rank's shard: (slot, [low, high) of its elements, where they go)."""
    for slot in unit.slots:
        low, high = max(slot.start, start), min(slot.stop, stop)
        if low < high:
            first = slot.own_range()[0] - slot.start + slot.first  # from the shard's count to the parameter's
            yield slot, low + first, high + first, low - start


def _aliases(model: nn.Module, own: Set[str]) -> list[list[str]]:
    """Names of parameters, and of buffers, that have several among `own`."""
    names: dict[Tensor, list[str]] = {}
    for tensors in (model.named_parameters, model.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            if name in own:
                names.setdefault(tensor, []).append(name)
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
        for group in _aliases(model, own):
            present = [name for name in group if name in self._places]
            self._places |= {name: self._places[present[0]] for name in group if present and name not in self._places}
        self.names = list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored_name = self._places[name]
        return file.shape(stored_name)

    def stretch(self, name: str, start: int, stop: int) -> Stretch:
        file, stored_name = self._places[name]
        return file.stretch(stored_name, start, stop)

    def dtype(self, name: str) -> torch.dtype:
        file, stored_name = self._places[name]
        return file.dtype(stored_name)

    def flat_part(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) in row-major order; valid until the next ones."""
        if start >= stop:
            return torch.empty(0)
        content, _ = self.ahead.get(self.stretch(name, start, stop))
        return as_elements(content, self.dtype(name))


def _weight_map(folder: Path) -> Iterator[tuple[str, str]]:
    """(tensor, file) of all tensors. File names that lead out of the folder are refused."""
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():  # of both, transformers takes the one file
        try:
            weight_map: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / INDEX} is damaged: {error!r}") from error
        for name, file in weight_map.items():
            if os.path.basename(file) != file or not (folder / file).is_file():
                raise CheckpointError(f"{folder / INDEX} places {name!r} in {file!r}, which is no file of the folder")
            yield name, file
        return
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no directory: give one that holds {SINGLE} or {INDEX}; nothing is fetched"
        )
    if not (folder / SINGLE).is_file():
        raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    with SafetensorsFile(folder / SINGLE) as single:
        names = single.names
    yield from ((name, SINGLE) for name in names)
