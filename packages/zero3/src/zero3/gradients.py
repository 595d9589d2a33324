"""From autograd's gradients of parameters to the reduced shard in its store.

Each trainable parameter reports when its gradient of this backward is complete. When no more will come for a
unit, its gradients are copied into one flat buffer, reduce-scattered to their mean over the ranks, and this
rank's shard goes to the store. That is repeatable: a second completion in one step (the next micro-batch, the
next segment of a reentrant checkpoint) adds to what is there.

The end of a backward is no reliable event (nested backwards end too). The borders are the next outermost
forward, an optimizer's step, and anybody's look at a gradient: there `settle` brings all to rest and the ranks
agree which parameters have a gradient at all.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import collectives
from .own_hook import OwnHook
from .parameter_forms import ShardGradient, raw_grad, set_raw_grad, without_noticing
from .unit_state import GradState, move_grad

if TYPE_CHECKING:
    from .partitioned_model import PartitionedModel
    from .unit import ParamSlot, Unit

log = logging.getLogger(__name__)

# Bytes of reductions that may be on their way before backward waits for the oldest.
_IN_FLIGHT_BYTES = 256 << 20


class _Reduction:
    """A unit's reduce-scatter on its way: the wait, and the memory that it uses until then."""

    def __init__(self, unit: Unit, wait, buffers, slots: list[int]):
        self.unit, self.wait, self.buffers, self.slots = unit, wait, buffers, slots
        self.nbytes = sum(buffer.nbytes for buffer in buffers)


class Gradients:
    """The gradients of one partitioned model."""

    def __init__(self, model: PartitionedModel, reduce_dtype: torch.dtype | None):
        self._model = model
        self._reduce_dtype = reduce_dtype
        self._hooks: dict[ParamSlot, torch.utils.hooks.RemovableHandle] = {}
        self._in_flight: list[_Reduction] = []
        self._reduced: set[Unit] = set()  # in the backward that is not settled yet
        self._unsettled = False
        self.sync = True  # False inside no_sync
        self._missing: list[str] = []

    # -- events ----------------------------------------------------------------------------------------------

    def watch(self, unit: Unit) -> None:
        """Hook the trainable parameters of a unit that is used and not hooked yet (some may have been thawed)."""
        if unit.plain:
            return
        for slot in [slot for slot in unit.unwatched if slot.param.requires_grad]:
            unit.unwatched.remove(slot)
            hook = OwnHook(functools.partial(self._arrived, slot))
            self._hooks[slot] = slot.param.register_post_accumulate_grad_hook(hook)

    def unwatch(self, unit: Unit) -> None:
        for slot in unit.slots:
            if slot in self._hooks:
                self._hooks.pop(slot).remove()

    def _arrived(self, slot: ParamSlot, _param: Tensor) -> None:
        """Autograd has finished this parameter's gradient of the running backward."""
        grad = raw_grad(slot.param)
        set_raw_grad(slot.param, None)
        if grad is None:
            return
        unit = slot.unit
        task = torch._C._current_graph_task_id()
        awaited = unit.awaited.get(task)
        if awaited is None:
            self._unsettled = True
            self._model.backward_runs()
            awaited = unit.awaited[task] = self._will_come(unit)
            self._begin(unit)
        earlier = unit.fresh_grads.get(slot.index)
        unit.fresh_grads[slot.index] = grad if earlier is None else earlier.add_(grad)
        awaited.discard(slot.index)
        if not awaited:
            del unit.awaited[task]
            if not unit.awaited:
                self._complete(unit)

    def _begin(self, unit: Unit) -> None:
        """→ ACCUMULATING. An earlier part of the same backward (a reentrant segment) may still be on its way."""
        if unit.reducing is not None:
            self._finish(unit)
        if unit.grad_state is not GradState.ACCUMULATING:
            move_grad(unit, GradState.ACCUMULATING)

    def _will_come(self, unit: Unit) -> set[int]:
        """Slots whose gradient the running backward will finish; a unit with unused ones is complete early."""
        return {
            slot.index
            for slot in unit.slots
            if slot.param.requires_grad and torch._C._will_engine_execute_node(slot.accumulator())
        }

    def _complete(self, unit: Unit) -> None:
        if self.sync:
            self._reduce(unit)
        else:
            self._keep_unsynced(unit)
        self._model.backward_done_with(unit)

    # -- reduction -------------------------------------------------------------------------------------------

    def _wire_dtype(self, unit: Unit) -> torch.dtype:
        return self._reduce_dtype or unit.dtype

    def _fill(self, unit: Unit, flat: Tensor) -> list[int]:
        """The unit's fresh gradients into `flat` (padded_numel,); nothing where there is none."""
        slots = sorted(unit.fresh_grads)
        for start, stop in unit.gaps(unit.padded_numel):
            flat[start:stop].zero_()
        for slot in unit.slots:
            if slot.index not in unit.fresh_grads:
                flat[slot.offset : slot.offset + slot.numel].zero_()
        if slots:
            views = [unit.slots[i].view_of(flat) for i in slots]
            torch._foreach_copy_(views, [unit.fresh_grads[i] for i in slots])
        unit.fresh_grads.clear()
        return slots

    def _reduce(self, unit: Unit) -> None:
        pool, dtype = self._model.pool, self._wire_dtype(unit)
        buffer = pool.take(unit.padded_numel * dtype.itemsize, unit.name)
        buffers = [buffer]
        flat = buffer.flat(unit.padded_numel, dtype)
        slots = self._fill(unit, flat)
        if unit.unsynced is not None:
            slots = sorted({*slots, *unit.unsynced_slots})
            flat.add_(unit.unsynced)
            unit.unsynced, unit.unsynced_slots = None, set()

        def scratch(numel: int) -> Tensor:
            buffers.append(pool.take(numel * dtype.itemsize, unit.name))
            return buffers[-1].flat(numel, dtype)

        move_grad(unit, GradState.REDUCING)
        self._reduced.add(unit)
        what = f"reducing the gradient of unit {unit.name}"
        if self._model.shard_ranks > 1:
            wait = collectives.reduce_scatter(self._model.ranks, flat, scratch, unit.index, what)
        else:
            settled = collectives.all_reduce_mean(self._model.ranks, flat, what)

            def wait() -> Tensor:
                settled()
                return flat

        self._in_flight.append(_Reduction(unit, wait, buffers, slots))
        unit.reducing = self._in_flight[-1]
        if self._model.ranks.size == 1:
            self._finish(unit)
        else:
            while sum(reduction.nbytes for reduction in self._in_flight[:-1]) > _IN_FLIGHT_BYTES:
                self._finish(self._in_flight[0].unit)

    def _finish(self, unit: Unit) -> None:
        """Wait for the unit's reduction and hand the shard to the store."""
        reduction: _Reduction = unit.reducing
        shard = reduction.wait()
        self._in_flight.remove(reduction)
        self._clear_absent(unit)
        for index in reduction.slots:
            unit.slots[index].has_grad = True
        move_grad(unit, GradState.REDUCED)
        self._model.store.gradient_arrived(unit, shard)
        self._let_go(unit, reduction)
        self._model.scheduler.gradient_complete(unit)

    def _let_go(self, unit: Unit, reduction: _Reduction) -> None:
        unit.reducing = None
        buffers, reduction.buffers, reduction.wait = reduction.buffers, [], None
        for buffer in buffers:
            self._model.pool.give_back(buffer)

    def _clear_absent(self, unit: Unit) -> None:
        """Parts of the stored gradient whose parameter had its `.grad` set to None must not be added to."""
        if all(slot.has_grad for slot in unit.slots) or not any(slot.has_grad for slot in unit.slots):
            return
        stored = self._model.store.gradient(unit)
        if stored is not None:
            for slot in unit.slots:
                if not slot.has_grad:
                    stored[slot.start : slot.stop].zero_()

    def _keep_unsynced(self, unit: Unit) -> None:
        """no_sync: the full gradient waits on this rank."""
        if unit.unsynced is None:
            unit.unsynced = torch.zeros(unit.padded_numel, dtype=self._wire_dtype(unit), device=unit.device)
        slots = sorted(unit.fresh_grads)
        unit.unsynced_slots |= set(slots)
        views = [unit.slots[i].view_of(unit.unsynced) for i in slots]
        torch._foreach_add_(views, [unit.fresh_grads[i].to(unit.unsynced.dtype) for i in slots])
        unit.fresh_grads.clear()

    # -- borders ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring every reduction to rest. Collective: all ranks come here at the same borders."""
        if not self._unsettled or torch._C._current_graph_task_id() != -1:
            return
        self._unsettled = False
        self._drop_broken()
        if self.sync:
            self._agree()
        self._reduced.clear()
        while self._in_flight:
            self._finish(self._in_flight[0].unit)
        self._note_missing()

    def missing_names(self) -> list[str]:
        """Trainable parameters that got no gradient in the last backward, by their first name. Collective."""
        self.settle()
        plain = [slot for unit in self._model.units if unit.plain for slot in unit.slots]
        return self._missing + [slot.name for slot in plain if slot.param.requires_grad and slot.param.grad is None]

    def _note_missing(self) -> None:
        self._missing = [
            slot.name
            for unit in self._model.units
            for slot in unit.slots
            if not unit.plain
            and slot.param.requires_grad
            and not slot.has_grad
            and slot.index not in unit.unsynced_slots
        ]

    def _drop_broken(self) -> None:
        """A backward that raised leaves units half complete; their gradients count for nothing."""
        for unit in self._model.units:
            if unit.awaited:
                log.warning("unit %s: its gradient of an aborted backward is dropped", unit.name)
                unit.awaited.clear()
                unit.fresh_grads.clear()
                if unit.grad_state is GradState.ACCUMULATING and unit.unsynced is None:
                    move_grad(unit, GradState.NONE)
                    if any(slot.has_grad for slot in unit.slots):
                        unit.grad_state = GradState.REDUCED

    def _agree(self) -> None:
        """Units that only other ranks used in this backward: take part in their reduction, with zeros."""
        model = self._model
        if model.ranks.size == 1:
            return
        units = [unit for unit in model.units if not unit.plain]
        slots = [slot for unit in units for slot in unit.slots]
        mine = [unit in self._reduced for unit in units]
        mine += [slot.has_grad or (slot.unit.reducing is not None and slot.index in slot.unit.reducing.slots) for slot in slots]
        flags = torch.tensor(mine, dtype=torch.uint8)
        all_flags = model.ranks.maximum(flags, "agreeing which parameters have a gradient").tolist()
        for unit, flag in zip(units, all_flags, strict=False):
            if flag and unit not in self._reduced:
                self._begin(unit)
                self._reduce(unit)
        for slot, flag in zip(slots, all_flags[len(units) :], strict=True):
            if flag and slot.unit.reducing is not None:
                slot.unit.reducing.slots = sorted({*slot.unit.reducing.slots, slot.index})
            elif flag:
                slot.has_grad = True

    # -- what user code sees ---------------------------------------------------------------------------------

    def visible(self, slot: ParamSlot) -> Tensor | None:
        """`param.grad`: this rank's part of the reduced gradient."""
        self.settle()
        if not slot.has_grad:
            return None
        stored = self._model.store.gradient(slot.unit)
        if stored is None:
            return None
        part = slot.piece_of(stored).as_subclass(ShardGradient)
        part._zero3 = slot
        return part

    def assign(self, slot: ParamSlot, value: Tensor | None) -> None:
        """`param.grad = value`."""
        self.settle()
        unit = slot.unit
        if value is None:
            slot.has_grad = False
            unit.unsynced_slots.discard(slot.index)
            if unit.unsynced is not None:
                slot.view_of(unit.unsynced).zero_()
            if not any(other.has_grad for other in unit.slots) and unit.grad_state is not GradState.NONE:
                unit.unsynced, unit.unsynced_slots = None, set()
                self._model.store.drop_gradient(unit)
                if unit.grad_state in (GradState.ACCUMULATING, GradState.REDUCED, GradState.COMMITTED):
                    move_grad(unit, GradState.NONE)
            return
        stored = self._model.store.gradient(unit)
        if stored is None:
            zeros = torch.zeros(unit.shard_numel, dtype=unit.master_dtype, device=unit.device)
            move_grad(unit, GradState.ACCUMULATING)
            move_grad(unit, GradState.REDUCING)
            self._model.store.gradient_arrived(unit, zeros)
            move_grad(unit, GradState.REDUCED)
            stored = self._model.store.gradient(unit)
        with without_noticing(), torch.no_grad():
            slot.piece_of(stored).copy_(value.view(slot.piece_of(stored).shape))
        slot.has_grad = True
