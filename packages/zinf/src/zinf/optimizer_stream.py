"""The optimizer step in pieces (paper, 5.2): read(k+1) | adam(k) | write(k-1), in bounded memory.

A unit's states may be far larger than the memory there is for them, so they pass in pieces through buffers of the
one pinned pool. While Adam updates one piece, later ones are on their way in and earlier ones on their way out.
States that lie in host memory are updated in place, by the same code, without a buffer. A gradient that waits on a
drive comes along with the states, from the moment on at which it is final.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cpu_adam
from zero3.buffer_pool import PooledBuffer
from zero3.uninterrupted import uninterrupted
from zero3.unit import Unit

from . import unit_states
from .offload_engine import OffloadEngine, pieces
from .tiers import Wait

# Settings of one parameter's update, as cpu_adam's segments take them; None: the parameter is left alone.
SlotSettings = Mapping[int, dict[str, Any] | None]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a unit's shard."""

    unit: Unit
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass
class _Loaded:
    """The states of a piece in host memory, and what must be written back."""

    states: dict[str, Tensor]
    arriving: list[Wait] = field(default_factory=list)
    buffer: PooledBuffer | None = None
    foreign: set[str] = field(default_factory=set)  # kinds that lie in `buffer`, not in place
    gradient: Tensor | None = None  # room in `buffer` for the gradient that waits
    gradient_asked: bool = False  # it is there, or on its way

    def forget_views(self) -> None:
        """Of the buffer, so that the pool can have it back."""
        self.states.clear()
        self.gradient = None


class OptimizerStream:
    """Streams pieces of units through Adam.

    budget            bytes of buffers at a time, reads and writes on their way included
    ahead             whether anything is read before its turn
    read_late         kinds that are not read ahead, since the update will mostly bring them along
    gradients_wait    whether an update mostly takes the gradient that waits on its tier
    broken            an update was cut short, or what one wrote is lost: the states are of two steps
    """

    def __init__(
        self,
        engine: OffloadEngine,
        budget: int,
        ahead: bool,
        read_late: Iterable[str] = (),
        gradients_wait: bool = True,
    ):
        self._engine = engine
        self._pool = engine.tiers.host_pool
        self._spans = engine.tiers.spans
        self.budget = budget
        self._ahead = ahead
        self._read_late = frozenset(read_late)
        self._gradients_wait = gradients_wait
        self._final: set[Unit] = set()  # their gradients that wait will not change until the update
        self._expected: deque[Piece] = deque()
        self._loaded: dict[Piece, _Loaded] = {}
        self._writing: deque[tuple[list[Wait], PooledBuffer]] = deque()
        self._in_use = 0
        self.broken = False

    # -- looking ahead ---------------------------------------------------------------------------------------

    def gradients_are_final(self, units: Iterable[Unit]) -> None:
        """The gradients of these units wait, and will not change any more: they are read ahead with the states."""
        self._final.update(units)
        for piece, loaded in self._loaded.items():
            self._ask_for_gradient(piece, loaded)

    def expect(self, units: Iterable[Unit]) -> None:
        """These units will be updated next, in this order: read ahead as far as the budget goes."""
        if not self._ahead:
            return
        known = {piece.unit for piece in self._expected} | {piece.unit for piece in self._loaded}
        for unit in units:
            if unit not in known:
                self._engine.create_moments(unit)  # for what was frozen when the optimizer was made
                self._expected.extend(Piece(unit, start, stop) for start, stop in pieces(unit.shard_numel))
        self._read_ahead()

    def _read_ahead(self) -> None:
        self._reap(wait_for=0)
        while self._expected and self._in_use + self._need(self._expected[0]) <= self.budget:
            piece = self._expected.popleft()
            self._loaded[piece] = self._load(piece)

    def forget_expected(self) -> None:
        """What was read ahead is not wanted: the states are about to change, or the step was aborted."""
        self._expected.clear()
        self._final.clear()
        while self._loaded:
            self._forget(next(iter(self._loaded)))

    def forget_read(self, unit: Unit) -> None:
        """The states of `unit` are about to change: what was read of them is read again."""
        for piece in [piece for piece in self._loaded if piece.unit is unit]:
            self._forget(piece)

    def _forget(self, piece: Piece) -> None:
        loaded = self._loaded[piece]
        Wait.of_all(loaded.arriving).settle()  # a read that fails was for nobody
        del self._loaded[piece]
        self._give_back(loaded)

    # -- the update ------------------------------------------------------------------------------------------

    def update(
        self,
        unit: Unit,
        settings: SlotSettings,
        grad_scale: float,
        gradient: Tensor | None = None,
        param_in: Tensor | None = None,
        param_out: Tensor | None = None,
    ) -> None:
        """One Adam step on all of `unit`, whatever Ctrl-C says; an exception leaves the stream `broken`.

        settings   slot index -> lr, betas, eps, weight_decay, step; None leaves the parameter as it is
        gradient   (shard_numel,) in host memory; None: the one that waits on its tier
        param_in   (shard_numel,) in the unit's dtype: the parameters, for a stream that reads them late
        param_out  (shard_numel,) in the unit's dtype: receives the updated parameters, for a gather at hand
        """
        self._engine.create_moments(unit)
        self._engine.before_change(unit)
        with uninterrupted():
            whole, self.broken = self.broken, True
            self._update_pieces(unit, settings, grad_scale, gradient, param_in, param_out)
            self.broken = whole
        self._final.discard(unit)

    def _update_pieces(
        self,
        unit: Unit,
        settings: SlotSettings,
        grad_scale: float,
        gradient: Tensor | None,
        param_in: Tensor | None,
        param_out: Tensor | None,
    ) -> None:
        for start, stop in pieces(unit.shard_numel):
            piece = Piece(unit, start, stop)
            runs = _runs(piece, settings)
            loaded = self._take(piece, gradient is None, param_in)
            if gradient is not None:
                loaded.states["grad"] = gradient[start:stop]
            with self._spans.running("optimizer", unit.name):
                for run in runs:
                    _adam(loaded.states, run, grad_scale)
            if param_out is not None:
                param_out[start:stop].copy_(loaded.states["param"])
            self._store(piece, loaded)
            self._read_ahead()

    def _take(self, piece: Piece, with_gradient: bool, param_in: Tensor | None) -> _Loaded:
        if piece in self._expected:
            self._expected.remove(piece)
        loaded = self._loaded.pop(piece, None)
        if loaded is None:
            self._reap(wait_for=self._need(piece))
            loaded = self._load(piece)
        self._bring_late(piece, loaded, param_in)
        if with_gradient:
            self._final.add(piece.unit)
            self._ask_for_gradient(piece, loaded)
        with self._spans.running("stall", f"states of {piece.unit.name}"):
            for wait in loaded.arriving:
                wait()
            if with_gradient:
                loaded.states["grad"] = self._gradient(piece, loaded)
        return loaded

    def _bring_late(self, piece: Piece, loaded: _Loaded, param_in: Tensor | None) -> None:
        """What was not read ahead: out of memory where it is at hand, else from its tier."""
        for kind in self._read_late & loaded.foreign & unit_states.read_kinds(piece.unit.dtype):
            if kind == "param" and param_in is not None:
                loaded.states[kind].copy_(param_in[piece.start : piece.stop])
            else:
                loaded.arriving.append(self._start_read(piece, kind, loaded.states[kind]))

    def _start_read(self, piece: Piece, kind: str, out: Tensor) -> Wait:
        engine, unit = self._engine, piece.unit
        return engine.tier(unit, kind).start_read(engine.key(unit, kind), out, piece.start)

    def _ask_for_gradient(self, piece: Piece, loaded: _Loaded) -> None:
        room, dtype = loaded.gradient, self._engine.waiting_dtype(piece.unit)
        if piece.unit not in self._final or loaded.gradient_asked or room is None or room.dtype != dtype:
            return  # the room is too narrow for the first gradient that is a sum
        loaded.arriving.append(self._start_read(piece, "grad", room))
        loaded.gradient_asked = True

    def _gradient(self, piece: Piece, loaded: _Loaded) -> Tensor:
        """The gradient that waits; read now, where there was no room for it."""
        engine, unit = self._engine, piece.unit
        if loaded.gradient_asked and loaded.gradient is not None:
            return loaded.gradient
        kept = engine.in_place(unit, "grad")
        if kept is not None:
            return kept[piece.start : piece.stop]
        return engine.read(unit, "grad", engine.waiting_dtype(unit), piece.start, piece.stop)

    # -- buffers ---------------------------------------------------------------------------------------------

    def _foreign(self, unit: Unit) -> dict[str, torch.dtype]:
        """Kinds that host code cannot use where they lie."""
        kinds = unit_states.update_kinds(unit.dtype)
        return {kind: dtype for kind, dtype in kinds.items() if self._engine.in_place(unit, kind) is None}

    def in_place(self, unit: Unit) -> bool:
        """Whether all states of `unit` are updated where they lie."""
        return not self._foreign(unit)

    def _need(self, piece: Piece) -> int:
        return piece.numel * sum(dtype.itemsize for dtype in self._buffered(piece.unit).values())

    def _buffered(self, unit: Unit) -> dict[str, torch.dtype]:
        """Kinds that pass through a buffer, widest first, so that all are aligned: the gradient too, where it waits."""
        kinds = self._foreign(unit)
        if self._gradients_wait and self._engine.tier_name(unit, "grad") == "nvme":
            kinds["grad"] = self._engine.waiting_dtype(unit)
        return dict(sorted(kinds.items(), key=lambda item: -item[1].itemsize))

    def _load(self, piece: Piece) -> _Loaded:
        engine, unit = self._engine, piece.unit
        buffered = self._buffered(unit)
        states = {}
        for kind in unit_states.update_kinds(unit.dtype):
            if kind not in buffered:
                states[kind] = engine.in_place(unit, kind)[piece.start : piece.stop]  # type: ignore[index]
        if not buffered:
            return _Loaded(states)
        buffer = self._pool.take(self._need(piece), f"optimizer states of {unit.name}")
        self._in_use += buffer.nbytes
        loaded = _Loaded(states, buffer=buffer, foreign=buffered.keys() - {"grad"})
        offset = 0
        for kind, dtype in buffered.items():
            nbytes = piece.numel * dtype.itemsize
            room = buffer.storage[offset : offset + nbytes].view(dtype)
            offset += nbytes
            if kind == "grad":
                loaded.gradient = room
                self._ask_for_gradient(piece, loaded)
                continue
            states[kind] = room
            if kind in unit_states.read_kinds(unit.dtype) - self._read_late:
                loaded.arriving.append(self._start_read(piece, kind, room))
        return loaded

    def _store(self, piece: Piece, loaded: _Loaded) -> None:
        engine, unit = self._engine, piece.unit
        waits = [
            engine.tier(unit, kind).start_write(engine.key(unit, kind), loaded.states[kind], piece.start)
            for kind in loaded.foreign
        ]
        loaded.forget_views()
        if loaded.buffer is not None:
            self._writing.append((waits, loaded.buffer))

    def _reap(self, wait_for: int) -> None:
        """Take back buffers whose writes are done; wait for the oldest until `wait_for` bytes fit."""
        while self._writing:
            waits, _ = self._writing[0]
            if self._in_use + wait_for <= self.budget and not all(wait.done() for wait in waits):
                return
            try:
                with self._spans.running("stall", "writing optimizer states"):
                    Wait.of_all(waits)()
            except Exception:
                self.broken = True
                self._take_back()
                raise
            self._take_back()

    def _take_back(self) -> None:
        """The oldest write is over."""
        buffer = self._writing.popleft()[1]
        self._in_use -= buffer.nbytes
        self._pool.give_back(buffer)

    def _give_back(self, loaded: _Loaded) -> None:
        loaded.forget_views()
        if loaded.buffer is not None:
            self._in_use -= loaded.buffer.nbytes
            self._pool.give_back(loaded.buffer)

    def come_to_rest(self) -> None:
        """Nothing is read ahead, and all writes are on their tiers."""
        self.forget_expected()
        self.drain()

    def forget(self) -> None:
        """All states are about to be replaced: nothing is on its way, and what was broken does not matter any more."""
        self.forget_expected()
        while self._writing:
            Wait.of_all(self._writing[0][0]).settle()
            self._take_back()
        self.broken = False

    def drain(self) -> None:
        """All writes are on their tiers."""
        while self._writing:
            self._reap(wait_for=self.budget + 1)


@dataclass(frozen=True)
class _Run:
    """A stretch of a piece without a parameter that must be left alone."""

    start: int
    stop: int
    segments: list[tuple[int, int, dict[str, Any]]]


def _runs(piece: Piece, settings: SlotSettings) -> list[_Run]:
    runs: list[_Run] = []
    open_run = False
    for slot in piece.unit.slots:
        start, stop = max(slot.start, piece.start) - piece.start, min(slot.stop, piece.stop) - piece.start
        if start >= stop:
            continue
        wanted = settings.get(slot.index)
        if wanted is None:
            open_run = False
            continue
        if open_run:
            last = runs.pop()
            runs.append(_Run(last.start, stop, [*last.segments, (start - last.start, stop - last.start, wanted)]))
        else:
            runs.append(_Run(start, stop, [(0, stop - start, wanted)]))
        open_run = True
    return runs


def _adam(states: Mapping[str, Tensor], run: _Run, grad_scale: float) -> None:
    part = {kind: tensor[run.start : run.stop] for kind, tensor in states.items()}
    first = run.segments[0][2]
    param = part["param"]
    extra: dict[str, Any] = {}
    if "remainder" in part:
        extra["param_lo"] = part["remainder"]
    elif "master" in part:
        param, extra["param_out"] = part["master"], part["param"]
    cpu_adam.step(
        param,
        part["grad"],
        part["exp_avg"],
        part["exp_avg_sq"],
        grad_scale=grad_scale,
        segments=run.segments,
        **first,
        **extra,
    )
