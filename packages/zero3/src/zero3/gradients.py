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

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import collectives, unit_state
from .errors import UnsupportedError
from .first_rank_log import first_rank_logger
from .own_hook import OwnHook
from .parameter_forms import ShardGradient, has_raw_grads, take_raw_grads, will_come, without_noticing
from .unit_state import ACCUMULATING, COMMITTED, NONE, REDUCED, REDUCING, move_grad
from .untraced import untraced

if TYPE_CHECKING:
    from .buffer_pool import PooledBuffer
    from .partitioned_model import PartitionedModel
    from .unit import ParamSlot, Unit

log = first_rank_logger(__name__)


_DENSE = torch.strided
_current_task = torch._C._current_graph_task_id
_will_run = torch._C._will_engine_execute_node

# Bytes of reductions on their way that are not worth a wait.
_SMALL_IN_FLIGHT = 256 << 10


class _Reduction:
    """A unit's reduce-scatter on its way: the wait, and the memory that it uses until then."""

    def __init__(self, unit: Unit, wait, buffers, slots: list[int]):
        self.unit, self.wait, self.buffers, self.slots = unit, wait, buffers, set(slots)
        self.nbytes = sum(buffer.nbytes for buffer in buffers)


def _collected(unit: Unit) -> dict[int, Tensor]:
    """The whole gradients that autograd has left, by the slots' numbers; none is there afterwards."""
    grads = {}
    for index, grad in enumerate(take_raw_grads(unit.params)):
        if grad is None:
            continue
        if grad.layout is not _DENSE:
            raise UnsupportedError(
                f"the gradient of {unit.slots[index].name} is {grad.layout}: a partitioned one must be dense "
                "(for an embedding: sparse=False)"
            )
        grads[index] = grad
    return grads


class Gradients:
    """The gradients of one partitioned model."""

    def __init__(self, model: PartitionedModel):
        self._model = model
        self._in_flight: list[_Reduction] = []
        self._largest_reduction = 0  # bytes
        self._reduced: set[Unit] = set()  # in the backward that is not settled yet
        self._arrivals: set[ParamSlot] = set()  # in that backward
        self._unsettled = False
        self._sync = True  # False inside no_sync
        self._holds_unsynced = False  # a no_sync block has run since the last reduction; the same on every rank
        self._missing: list[str] = []

    # -- events ----------------------------------------------------------------------------------------------

    def watch(self, unit: Unit) -> None:
        """Hook the trainable parameters of a unit that is used and not hooked yet (some may have been thawed)."""
        if unit.plain:
            return
        for slot in [slot for slot in unit.unwatched if slot.param.requires_grad]:
            with without_noticing():
                if not self._own_hooks(slot):  # an interrupt may have come right behind it
                    hook = OwnHook(self._arrived, unit, slot.index)
                    Tensor.register_post_accumulate_grad_hook(slot.param, hook)
            unit.unwatched.remove(slot)

    def unwatch(self, unit: Unit) -> None:
        for slot in unit.slots:
            with without_noticing():
                for number in self._own_hooks(slot):
                    del slot.param._post_accumulate_grad_hooks[number]

    def _own_hooks(self, slot: ParamSlot) -> list[int]:
        """By which numbers torch has our hooks on the parameter."""
        hooks = slot.param._post_accumulate_grad_hooks or {}
        return [number for number, hook in hooks.items() if isinstance(hook, OwnHook) and hook.func == self._arrived]

    @untraced
    def _arrived(self, unit: Unit, index: int, _param: Tensor) -> None:
        """Autograd has finished a parameter's gradient of the running backward. It waits where autograd left it."""
        awaited = unit.awaited.get(_current_task())
        if awaited is None:
            awaited = self._first_arrival(unit)
        awaited.discard(index)
        if not awaited:
            self._last_arrival(unit)

    def _first_arrival(self, unit: Unit) -> set[int]:
        """The slots whose gradient this backward will finish; a unit with unused ones is complete early."""
        self._unsettled = True
        self._model.backward_runs()
        awaited = unit.awaited[_current_task()] = will_come(unit, _will_run)
        self._begin(unit)
        return awaited

    def _last_arrival(self, unit: Unit) -> None:
        if len(unit.awaited) == 1:
            unit.fresh_grads = _collected(unit)
        del unit.awaited[_current_task()]
        if not unit.awaited:
            self._complete(unit)

    def _begin(self, unit: Unit) -> None:
        """→ ACCUMULATING. An earlier part of the same backward (a reentrant segment) may still be on its way."""
        if unit.reducing is not None:
            self._finish(unit)
        if unit.grad_state is COMMITTED:
            self._model.store.before_use(unit)  # the update that owns the gradient must run before it changes
            move_grad(unit, NONE)
        if unit.grad_state is not ACCUMULATING:
            move_grad(unit, ACCUMULATING)

    def _complete(self, unit: Unit) -> None:
        self._arrivals.update(map(unit.slots.__getitem__, unit.fresh_grads))
        if self._sync:
            self._reduce(unit)
        else:
            self._keep_unsynced(unit)
        self._model.backward_done_with(unit)

    # -- reduction -------------------------------------------------------------------------------------------

    def _fill(self, unit: Unit, flat: Tensor, views: list[Tensor]) -> list[int]:
        """The unit's fresh gradients into `flat` (padded_numel,), of which `views` are the slots; zeros elsewhere."""
        unit.clear_gaps(flat)
        grads, unit.fresh_grads = unit.fresh_grads, {}
        if len(grads) < len(views):
            for index, view in enumerate(views):
                if index not in grads:
                    view.zero_()
            views = [views[index] for index in grads]
        if grads:
            torch._foreach_copy_(views, list(grads.values()))
        return list(grads)

    def _reduce(self, unit: Unit) -> None:
        self._bound_in_flight()
        pool, dtype = self._model.pool, unit.wire_dtype
        buffers = [pool.take(unit.padded_numel * dtype.itemsize, unit.name)]
        flat, views = buffers[0].laid_out(unit.wire_layout)
        slots = self._fill(unit, flat, views)
        if unit.unsynced_slots:
            slots += unit.unsynced_slots
            flat.copy_(self._unsynced(unit).add_(flat))
            self._drop_unsynced(unit)

        def scratch(numel: int) -> Tensor:
            buffers.append(pool.take(numel * dtype.itemsize, unit.name))
            return buffers[-1].flat(numel, dtype)

        move_grad(unit, REDUCING)
        self._reduced.add(unit)
        if self._model.ranks.size == 1:  # nobody to wait for
            self._hand_over(unit, flat, slots, buffers)
            return
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
        self._largest_reduction = max(self._largest_reduction, unit.reducing.nbytes)

    def _bound_in_flight(self) -> None:
        """Before the next reduction: at most as much is on its way as the largest takes. Waits for the oldest.

        Waiting within backward asks the other ranks to reduce the same units; what is small does not wait, so that
        small models may differ between ranks freely.
        """
        if not self._in_flight:
            return
        bound = max(self._largest_reduction, _SMALL_IN_FLIGHT)
        while sum(reduction.nbytes for reduction in self._in_flight) > bound:
            self._finish(self._in_flight[0].unit)

    def _finish(self, unit: Unit) -> None:
        """Wait for the unit's reduction and hand the shard to the store."""
        reduction: _Reduction = unit.reducing
        with self._model.scheduler.awaiting("reduce", unit):
            shard = reduction.wait()
        self._in_flight.remove(reduction)
        unit.reducing = None
        buffers, reduction.buffers, reduction.wait = reduction.buffers, [], None
        self._hand_over(unit, shard, reduction.slots, buffers)

    def _hand_over(self, unit: Unit, shard: Tensor, slots: Iterable[int], buffers: list[PooledBuffer]) -> None:
        """The reduced gradient goes to the store, and the memory that the reduction took to the pool."""
        self._clear_absent(unit)
        unit.with_grad.update(slots)
        move_grad(unit, REDUCED)
        self._model.store.gradient_arrived(unit, shard)
        for buffer in buffers:
            self._model.pool.give_back(buffer)
        self._model.scheduler.gradient_complete(unit)

    def _clear_absent(self, unit: Unit) -> None:
        """Parts of the stored gradient whose parameter had its `.grad` set to None must not be added to."""
        if len(unit.with_grad) in (0, len(unit.slots)):
            return
        stored = self._model.store.gradient(unit)
        if stored is not None:
            for slot in unit.slots:
                if not slot.has_grad:
                    stored[slot.start : slot.stop].zero_()

    # -- no_sync ---------------------------------------------------------------------------------------------

    def _keep_unsynced(self, unit: Unit) -> None:
        """The full gradient waits on this rank, where the store puts it; a sum of several is float32 at least."""
        grads, unit.fresh_grads = unit.fresh_grads, {}
        if unit.unsynced_slots:
            flat = self._unsynced(unit)
        else:
            dtype = torch.promote_types(unit.wire_dtype, torch.float32)
            flat = torch.zeros(unit.padded_numel, dtype=dtype, device=unit.device)
        unit.unsynced_slots |= set(grads)
        views = [unit.slots[i].view_of(flat) for i in grads]
        torch._foreach_add_(views, [grad.to(flat.dtype) for grad in grads.values()])
        self._model.store.keep_full_gradient(unit, flat)
        unit.unsynced = None

    def _unsynced(self, unit: Unit) -> Tensor:
        """The full gradient that waits, in hand until it is kept again; zeros where user code dropped a part of it."""
        if unit.unsynced is None:
            unit.unsynced = self._model.store.take_full_gradient(unit)
            for slot in unit.slots:
                if slot.index not in unit.unsynced_slots:
                    slot.view_of(unit.unsynced).zero_()
        return unit.unsynced

    def _drop_unsynced(self, unit: Unit) -> None:
        if unit.unsynced is None:
            self._model.store.drop_full_gradient(unit)
        unit.unsynced, unit.unsynced_slots = None, set()

    # -- borders ---------------------------------------------------------------------------------------------

    def expect_backward(self) -> None:
        """A forward that may be differentiated begins: all ranks agree on its gradients at the next border."""
        self._unsettled = True

    def synchronise(self, sync: bool) -> None:
        """Whether gradients are reduced when they are complete, from here on."""
        self.settle()
        self._sync = sync
        self._holds_unsynced = True

    def settle(self, reduce_all: bool = False) -> None:
        """Bring every reduction to rest. Collective: all ranks come here at the same borders.

        reduce_all   what no_sync has left waiting is reduced too
        """
        if torch._C._current_graph_task_id() != -1:
            return
        if not (self._unsettled or (reduce_all and self._sync and self._holds_unsynced)):
            return
        self._unsettled = False
        self._drop_broken()
        self._model.abort()
        arrivals, self._arrivals = self._arrivals, set()
        if self._sync:
            arrivals = self._agree(arrivals | self._other_tiles(arrivals))
            self._holds_unsynced = False
        self._reduced.clear()
        while self._in_flight:
            self._finish(self._in_flight[0].unit)
        self._note_missing(arrivals)

    def _drop_broken(self) -> None:
        """A backward that raised leaves units half complete; their gradients count for nothing."""
        for unit in self._model.units:
            if not unit.plain and self._is_broken(unit):
                log.warning("unit %s: its gradient of an aborted backward is dropped", unit.name)
                unit.awaited.clear()
                unit.fresh_grads.clear()
                take_raw_grads(unit.params)
                if not unit.unsynced_slots:
                    unit_state.forget_fresh(unit, reduced=bool(unit.with_grad))

    def _is_broken(self, unit: Unit) -> bool:
        """Whether a gradient of it is neither where autograd takes it from nor where we keep it."""
        if unit.awaited or unit.fresh_grads or has_raw_grads(unit.params):
            return True
        if unit.grad_state is REDUCING:
            return unit.reducing is None
        return unit.grad_state is ACCUMULATING and not unit.unsynced_slots

    def _agree(self, arrivals: set[ParamSlot]) -> set[ParamSlot]:
        """Reduce what is left: what no_sync kept, and, with zeros, units that only other ranks used.

        Returns the parameters that got a gradient on any rank.
        """
        ranks = self._model.ranks
        units = [unit for unit in self._model.units if not unit.plain]
        slots = [slot for unit in units for slot in unit.slots]
        late = {slot.unit for slot in arrivals if slot.tile is not None}  # tiles that nobody used, others beside them
        flags = [unit in self._reduced or bool(unit.unsynced_slots) or unit in late for unit in units]
        flags += [slot in arrivals or slot.index in slot.unit.unsynced_slots for slot in slots]
        if ranks.size > 1:
            what = "agreeing which parameters have a gradient"
            flags = ranks.maximum(torch.tensor(flags, dtype=torch.uint8, device=self._model.device), what).tolist()
        for unit, due in zip(units, flags, strict=False):
            if due and unit not in self._reduced:
                self._begin(unit)
                self._reduce(unit)
        with_gradient = {slot for slot, flag in zip(slots, flags[len(units) :], strict=True) if flag}
        for slot in with_gradient:
            if slot.unit.reducing is not None:
                slot.unit.reducing.slots.add(slot.index)
            elif slot.unit.grad_state is REDUCED:  # else it was used up already, by an update in backward
                slot.has_grad = True
        return with_gradient

    def _other_tiles(self, arrivals: set[ParamSlot]) -> set[ParamSlot]:
        """A parameter in tiles has a gradient or has none: where some of its tiles have one, the others have zeros."""
        others: set[ParamSlot] = set()
        for tiles in self._model.tiled:
            slots = tiles.slots
            if any(slot in arrivals or slot.index in slot.unit.unsynced_slots for slot in slots):
                others.update(slot for slot in slots if slot.param.requires_grad)
        return others

    # -- what user code sees ---------------------------------------------------------------------------------

    def missing_names(self) -> list[str]:
        """Trainable parameters that got no gradient in the last backward, by their first name. Collective."""
        self.settle()
        plain = [slot for unit in self._model.units if unit.plain for slot in unit.slots]
        return self._missing + [slot.name for slot in plain if slot.param.requires_grad and slot.param.grad is None]

    def _note_missing(self, arrivals: set[ParamSlot]) -> None:
        slots = [slot for unit in self._model.units if not unit.plain for slot in unit.slots]
        missing = (slot.name for slot in slots if slot.param.requires_grad and slot not in arrivals)
        self._missing = list(dict.fromkeys(missing))

    def visible(self, slot: ParamSlot) -> Tensor | None:
        """`param.grad`: this rank's part of the reduced gradient; inside no_sync, all of this rank's own."""
        self.settle(reduce_all=True)
        unit = slot.unit
        if slot.has_grad:
            stored = self._model.store.gradient(unit)
            if stored is None:
                return None
            part = slot.piece_of(stored).as_subclass(ShardGradient)
            part._zero3 = slot
            return part
        if slot.index in unit.unsynced_slots:
            return slot.view_of(self._unsynced(unit)).as_subclass(ShardGradient)
        self._model.store.check_gradient(unit)
        return None

    def assign(self, slot: ParamSlot, value: Tensor | None) -> None:
        """`param.grad = value`."""
        self.settle()
        if value is None:
            self._drop(slot)
            return
        unit = slot.unit
        whole = bool(unit.unsynced_slots) and not slot.has_grad  # inside no_sync, as `visible`
        piece = slot.view_of(self._unsynced(unit)) if whole else slot.piece_of(self._stored(unit))
        if value.shape != piece.shape:
            seen = "it" if whole else "this rank's part of it"
            raise UnsupportedError(
                f"the gradient of {slot.name} cannot become {tuple(value.shape)}: {seen} is {tuple(piece.shape)}"
            )
        with without_noticing(), torch.no_grad():
            piece.copy_(value)
        if whole:
            unit.unsynced_slots.add(slot.index)
        else:
            slot.has_grad = True

    def _drop(self, slot: ParamSlot) -> None:
        unit = slot.unit
        slot.has_grad = False
        if slot.index in unit.unsynced_slots:
            unit.unsynced_slots.discard(slot.index)
            if not unit.unsynced_slots:
                self._drop_unsynced(unit)
            elif unit.unsynced is not None:
                slot.view_of(unit.unsynced).zero_()
        if unit.with_grad or unit.unsynced_slots:
            return
        self._model.store.drop_gradient(unit)
        if unit.grad_state in (ACCUMULATING, REDUCED, COMMITTED):
            move_grad(unit, NONE)

    def _stored(self, unit: Unit) -> Tensor:
        """The stored gradient of the unit's shard; zeros when there was none."""
        stored = self._model.store.gradient(unit)
        if stored is None:
            zeros = torch.zeros(unit.shard_numel, dtype=unit.master_dtype, device=unit.device)
            for state in (ACCUMULATING, REDUCING):
                move_grad(unit, state)
            self._model.store.gradient_arrived(unit, zeros)
            move_grad(unit, REDUCED)
            stored = self._model.store.gradient(unit)
        return stored  # type: ignore[return-value]
