"""A model whose units are partitioned: the mechanisms that gather and release, and who holds what.

Hooks, noticed accesses and saved views report here what is used; the scheduler decides when the mechanisms run;
the store knows where shards lie. The order of a gather is always

    start_read    SHARDED → READING     the own slice of a pool buffer is filled from the tier
    start_gather  → STAGED → GATHERING  the read is waited for; the other ranks' slices are on their way
    finish_gather → READY               the values are there

Then the parameters become views of the buffer: `show` for a forward, `fill_in` where each use shall be noticed.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import collectives, hooks, one_thread, optimizer_pieces, parameter_forms
from .bandwidth_centric import PARAMETER_ALIGNMENT
from .collectives import Ranks
from .errors import UnsupportedError
from .gathered_memory import GatheredMemory
from .gradients import Gradients
from .host_memory import HeapTrimmer
from .saved_views import SavedViews, take_off
from .scheduler import Phase, Scheduler
from .shard_store import NoStore, ShardStore
from .tiles import Tiles
from .unit import ParamSlot, Unit, placeholder
from .unit_state import GATHERING, READING, READY, SHARDED, STAGED, move_param

log = logging.getLogger(__name__)

_current_task = torch._C._current_graph_task_id
# Not the stack of transforms itself: who has asked for that once makes every thread state of torch's carry one.
_inside_transform = torch._C._are_functorch_transforms_active

# How many units that were gathered because somebody touched a parameter stay gathered at once. Letting go early
# is always safe (the next touch gathers again), keeping them is memory.
_NOTICED_UNITS = 2

# A frozen unit has no gradient whose completion would end its use in backward: this many stay while autograd
# still holds views of them.
_FROZEN_UNITS = 2


@dataclass(frozen=True)
class Settings:
    """How a model is partitioned; see `zero3.shard`."""

    dtype: torch.dtype | None = None
    unit_size: int | str = "auto"
    shard: tuple[str, ...] = ("params", "grads", "optimizer")
    reduce_dtype: torch.dtype | None = None


class PartitionedModel:
    """Units of one module tree, and what they need in common.

    ranks         the data-parallel group
    shard_ranks   over how many ranks a unit is cut (1: every rank holds all of it)
    units         in the order of the module tree, which is the order of a first guess at forward
    """

    def __init__(
        self,
        module: nn.Module | None,
        ranks: Ranks,
        settings: Settings,
        store: ShardStore,
        scheduler: Scheduler,
        device: torch.device,
    ):
        self._module = weakref.ref(module) if module is not None else lambda: None
        self.ranks = ranks
        self.settings = settings
        self.store = store
        self.scheduler = scheduler
        self.device = device
        self.shard_ranks = ranks.size if "optimizer" in settings.shard else 1
        self.shard_rank = ranks.rank if self.shard_ranks > 1 else 0
        self.keeps_gathered = "params" not in settings.shard
        self.units: list[Unit] = []
        self._placeholders: dict[tuple[torch.dtype, torch.Size], Tensor] = {}
        self.tiled: dict[Tiles, None] = {}  # of parameters in tiles that lie in these units
        self._heap = HeapTrimmer()
        self._unit_count = 0
        self.pool = store.pool
        self.gradients = Gradients(self)
        # Handed to an optimizer's step that runs, or that raised, and whether with a gradient.
        self.pieces: dict[ParamSlot, bool] = {}
        self.gathered_memory = GatheredMemory()
        self.saved_views = SavedViews(self)
        self.handles: list[Any] = []  # of all hooks on the module tree
        self.outermost: list[Any] = []  # forwards that run (hooks.py): one, and what other threads try
        self.will_replay = False  # the outermost forward keeps a graph: what runs without one inside is a checkpoint's
        self.in_backward: OrderedDict[Unit, None] = OrderedDict()  # gathered for backward, oldest first
        self._noticed: OrderedDict[Unit, None] = OrderedDict()
        self._backward_task = -1
        self.backward_thread: int | None = None  # in which the last one ran

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied module is a plain one; nothing of the machinery is copied

    def __reduce__(self) -> tuple:
        return type(None), ()

    @property
    def gone(self) -> bool:
        """Whether the module is no more, and with it all values (it is held weakly)."""
        return type(self.store) is NoStore

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the module has now, whether it was partitioned or came later."""
        module = self._module()
        return iter(()) if module is None else module.named_parameters()

    @property
    def under_construction(self) -> bool:
        """Its units are those of a model that is being built under init()."""
        return self._module() is None

    # -- building --------------------------------------------------------------------------------------------

    def dtypes_of(self, param: Tensor) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the shard, dtype when gathered) of a parameter, which may be partitioned already."""
        return parameter_forms.dtypes_of(param, self.settings.dtype)

    def add_unit(self, name: str, params: list[tuple[Tensor, list[str]]]) -> Unit:
        """A new unit of parameters that agree in both dtypes. Its shard is adopted by `fill`."""
        multiple = max(self.store.shard_multiple, PARAMETER_ALIGNMENT)
        self._unit_count += 1
        unit = Unit(self, self._unit_count, name, params, *self.dtypes_of(params[0][0]), multiple)
        self.units.append(unit)
        self.tiled.update(dict.fromkeys(slot.tile.tiles for slot in unit.slots if slot.tile is not None))
        return unit

    def placeholder(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """What every released parameter of this dtype and shape has for its data (shape).

        One for all of them: it is touched at every gather and release, and should be in the processor's cache. A
        parameter's version counter stays its own.
        """
        known = self._placeholders.get((dtype, shape))
        if known is None:
            with torch.inference_mode(False):  # whoever needs it first: training may have it next
                known = self._placeholders[dtype, shape] = placeholder(dtype, self.device).expand(shape)
        return known

    def fill(self, unit: Unit, values: Iterable[tuple[ParamSlot, Tensor]]) -> None:
        """Take over the unit's parameters one after the other; of each only this rank's part stays.

        `values` yields every slot with its whole parameter, contiguous; rank 0's count.
        """
        shard = torch.zeros(unit.shard_numel, dtype=unit.master_dtype, device=self.device)
        for slot, whole in values:
            self.ranks.broadcast(whole, f"rank 0's values of {slot.name}")
            start, stop = slot.own_range()
            shard[slot.start : slot.stop].copy_(whole.view(-1)[start:stop])
            parameter_forms.adopt(slot)
            if slot.tile is not None:
                slot.tile.tiles.adopted(slot)
            del whole
            self._heap.freed(slot.numel * unit.master_dtype.itemsize)
        self.store.adopt(unit, shard)
        resident = self.store.resident(unit) if self.shard_ranks == 1 else None
        unit.permanent = resident is not None
        if resident is not None:
            unit.flat = resident
            unit.plain = (
                self.ranks.size == 1
                and getattr(self.store, "plain_gradients", False)
                and all(slot.tile is None for slot in unit.slots)
            )
            if unit.plain:
                for slot in unit.slots:
                    slot.unswappable = None
                    parameter_forms.present_piece(slot, slot.view_of(resident), None)
            else:
                self.show_resident(unit)
            self.gradients.watch(unit)

    def retire(self, unit: Unit) -> None:
        """An old unit whose parameters have all moved on gives its room back."""
        self.gradients.unwatch(unit)
        if unit in self.units and all(getattr(slot.param, "_zero3", None) is not slot for slot in unit.slots):
            self.units.remove(unit)
            self.store.forget(unit)

    # -- mechanisms ------------------------------------------------------------------------------------------

    def start_read(self, unit: Unit) -> None:
        """SHARDED → READING. Harmless in any other state."""
        if unit.state is not SHARDED:
            return
        if _inside_transform():
            raise UnsupportedError(
                f"unit {unit.name} cannot be gathered inside a torch.func transform (grad, vmap, ...), which would "
                "take the gather for a part of the computation. Use zero3.gathered(model) around it."
            )
        if unit.flat is None:
            unit.buffer = self.pool.take(unit.nbytes, unit.name)
            flat, _ = unit.buffer.laid_out(unit.layout)
            unit.pending = self.store.start_read(unit, unit.own_slice(flat))
            unit.flat = flat
        else:
            self.store.before_use(unit)
        move_param(unit, READING)

    def start_gather(self, unit: Unit) -> None:
        """READING → STAGED → GATHERING: wait for the own slice, send for the others. Else harmless."""
        if unit.state is READING:
            if unit.pending is not None:
                unit.pending()
                unit.pending = None
            move_param(unit, STAGED)
        if unit.state is not STAGED:
            return
        if unit.buffer is not None and self.shard_ranks > 1:
            what = f"gathering unit {unit.name}"
            unit.pending = collectives.all_gather(self.ranks, unit.flat, unit.own_slice(unit.flat), unit.index, what)
        move_param(unit, GATHERING)

    def finish_gather(self, unit: Unit) -> None:
        """GATHERING → READY: the values are there. Harmless when they are already."""
        if unit.state is READY:
            return
        if unit.pending is not None:
            with self.scheduler.awaiting("gather", unit):
                unit.pending()
            unit.pending = None
        if unit.buffer is not None:
            self.gathered_memory.add(unit)
        if unit.unwatched:
            self.gradients.watch(unit)
        move_param(unit, READY)

    def show(self, unit: Unit) -> None:
        """The parameters of a READY unit become views of its buffer. Harmless when they are already."""
        if unit.buffer is not None and not unit.shown:
            _, views = unit.buffer.laid_out(unit.layout)
            unit.shown, unit.used = None, True
            parameter_forms.gather(unit.params, views)
            unit.shown = True

    def fill_in(self, unit: Unit) -> None:
        """As `show`, but the parameters' uses are still noticed."""
        if unit.buffer is not None and not unit.shown:
            _, views = unit.buffer.laid_out(unit.layout)
            unit.shown = None
            parameter_forms.fill(unit.params, views)

    def release(self, unit: Unit, force: bool = False) -> None:
        """READY → SHARDED: only the shard stays. Where parameters are not partitioned, only with `force`."""
        if unit.state is SHARDED or (self.keeps_gathered and not force and not unit.permanent):
            return
        if unit.state is not READY:
            self._let_arrive(unit)
        self._noticed.pop(unit, None)
        self.in_backward.pop(unit, None)
        if unit.buffer is not None:
            if unit.used:
                self.collect_changes(unit)
            self._drop_buffer(unit)
        move_param(unit, SHARDED)

    def _let_arrive(self, unit: Unit) -> None:
        """What is on its way is to be dropped: it comes to rest. A read that fails then was for nobody."""
        try:
            self.start_gather(unit)
        except Exception as error:
            if unit.state is not READING:
                raise
            log.warning("unit %s was read in vain, and the read failed: %s", unit.name, error)
            unit.pending = None
            return
        self.finish_gather(unit)

    def _mend(self, unit: Unit) -> None:
        """An interrupt has cut a gather or a release of `unit` in two, where its state and its memory disagree."""
        if unit.state is SHARDED:
            move_param(unit, READING)
            self.release(unit, force=True)
            return
        buffer, unit.buffer, unit.pending = unit.buffer, None, None
        move_param(unit, SHARDED)
        if buffer is not None:
            self.pool.give_back(buffer)

    def _drop_buffer(self, unit: Unit) -> None:
        self.gathered_memory.remove(unit)
        if unit.shown is not False:
            unit.shown = None
            parameter_forms.release(unit.params, unit.placeholders)
            unit.shown = unit.used = False
        unit.flat = None
        buffer, unit.buffer = unit.buffer, None
        self.pool.give_back(buffer)

    def collect_changes(self, unit: Unit, watch: bool = False) -> None:
        """What somebody wrote into a gathered parameter goes to the shard (own part only, no communication).

        `watch`: whoever got hold of the memory may write again.
        """
        for slot in parameter_forms.may_have_changed(unit):
            handed_out = slot.touched is not None
            if parameter_forms.changed(slot):
                self.write_back(slot)
            if watch and handed_out:
                parameter_forms.touch(slot)

    def write_back(self, slot: ParamSlot) -> None:
        """A gathered parameter has new values: this rank's part of them becomes its shard."""
        unit = slot.unit
        part = unit.own_slice(unit.flat)[slot.start : slot.stop]
        self.store.write_back(unit, part, slot.start, slot.stop)

    def assign(
        self, slot: ParamSlot, flat_part: Callable[[int, int], Tensor], first: int = 0, last: int | None = None
    ) -> None:
        """Give a parameter new values without gathering it: each rank writes its own part, in the master dtype.

        `flat_part(start, stop)` gives elements [start, stop) of the whole parameter in row-major order; it is asked
        for what lies in [first, last) only, and the others stay.
        """
        unit = slot.unit
        own_start, own_stop = slot.own_range()
        start, stop = max(own_start, first), own_stop if last is None else min(own_stop, last)
        if start < stop:
            values = flat_part(start, stop).to(unit.device, unit.master_dtype)
            if not unit.permanent and unit.state is READY:
                self.release(unit, force=True)
            shift = slot.start - own_start
            self.store.write_back(unit, values, start + shift, stop + shift)
        self.values_changed(unit)

    # -- who uses a unit -------------------------------------------------------------------------------------

    def count_replays(self, units: Iterable[Unit]) -> None:
        """A forward that keeps no graph inside one that does will run again; and one within backward is such a run."""
        if not torch.is_grad_enabled() and self.will_replay:
            for unit in units:
                unit.replays += 1
        elif _current_task() != -1:
            for unit in units:
                unit.replays = max(unit.replays - 1, 0)

    @contextmanager
    def in_use(self, unit: Unit) -> Iterator[None]:
        """Gathered inside, and what autograd saves of it is remembered as a place: a tile in its turn.

        It goes at once, in a recomputation too: the other tiles' turns come before its backward.
        """
        phase = self._phase()
        if phase != "access":
            self.count_replays([unit])
        pair = self.saved_views.pair() if not unit.permanent and torch.is_grad_enabled() else None
        if pair is not None:
            pair.put_on_top()
        unit.holds += 1
        try:
            self.scheduler.needs(unit, phase)
            self.show(unit)
            yield
        finally:
            unit.holds -= 1
            if pair is not None:
                take_off([pair])
            if not unit.holds:
                self.scheduler.done_with(unit, phase)

    def hold(self, units: Sequence[Unit]) -> None:
        """A forward begins to use `units`."""
        for unit in units:
            unit.holds += 1
        for unit in units:
            self.scheduler.needs(unit, "forward")
            self.show(unit)

    def find_kept(self, units: Sequence[Unit], references: Sequence[list[int]]) -> None:
        """A forward ends that has counted `references`: whose parameters does somebody keep since then?

        A function's context does, or saved-tensor hooks above ours: backward will look at the parameters themselves.
        """
        for unit, before in zip(units, references, strict=True):
            if unit.references() != before:
                unit.kept = True

    def access(self, unit: Unit) -> None:
        """Somebody wants the parameters themselves, outside of forward and backward."""
        if unit.state is not READY:
            self.scheduler.needs(unit, "access")
        self.show(unit)

    def let_go(self, units: Sequence[Unit]) -> None:
        """A forward has ended. In a recomputation its backward follows at once, so the units stay."""
        recomputing = _current_task() != -1
        for unit in units:
            unit.holds -= 1
            if unit.holds:
                continue
            if recomputing:
                self._keep_for_backward(unit)
            else:
                self.scheduler.done_with(unit, "forward")
                self._notice_again(unit)

    def _notice_again(self, unit: Unit) -> None:
        """A unit that the scheduler keeps has its values, but nobody holds it: uses must be noticed as of any other."""
        if unit.buffer is not None and unit.shown:
            unit.shown = None
            parameter_forms.watch(unit.params)

    def notice(self, slot: ParamSlot, beside: Iterable[Unit] = ()) -> None:
        """A parameter is used from anywhere: gather its unit, and keep few such units at a time.

        `beside`: units that the same call uses; they stay.
        """
        unit = slot.unit
        if unit.state is not READY:
            self.scheduler.needs(unit, self._phase())
            if not unit.holds:
                self._noticed[unit] = None
                self.forget_noticed({unit, *beside}, _NOTICED_UNITS)
        elif unit in self._noticed:
            self._noticed.move_to_end(unit)
        unit.used = unit.kept = True
        if self._phase() == "access":
            self.fill_in(unit)  # no saved-tensor hooks of ours lie on top: they come with each use (`keeping_views`)
        else:
            self.show(unit)

    @contextmanager
    def keeping_views(self) -> Iterator[None]:
        """A function uses released parameters. Outside of any forward, what autograd saves is kept as in a forward."""
        outside = torch.is_grad_enabled() and self._phase() == "access"
        pair = self.saved_views.pair_outside() if outside else None
        if pair is not None:
            pair.put_on_top()
        try:
            yield
        finally:
            if pair is not None:
                take_off([pair])

    def forget_noticed(self, keep: Iterable[Unit] = (), limit: int = 0) -> None:
        """Let go of all but `limit` of the units that are gathered only because they were touched."""
        for unit in list(self._noticed):
            if len(self._noticed) <= limit:
                return
            if unit not in keep and not unit.holds:
                del self._noticed[unit]
                self.scheduler.done_with(unit, self._phase())

    def _phase(self) -> Phase:
        if _current_task() != -1:
            return "backward"
        return "forward" if hooks.runs(self) else "access"

    def needed_by_backward(self, unit: Unit) -> None:
        """Backward is about to use a view of `unit` that forward saved."""
        if unit not in self.in_backward:
            self.backward_runs()
            self.scheduler.needs(unit, "backward")
            if unit.kept:
                self.fill_in(unit)
            self._keep_for_backward(unit)

    def _keep_for_backward(self, unit: Unit) -> None:
        """Gathered until its gradient is complete. Units without one (frozen) go when others are needed."""
        if unit in self.in_backward:
            return
        frozen = [other for other in self.in_backward if not other.trainable and not other.holds]
        for position, other in enumerate(frozen):
            if not other.has_saved_views or position < len(frozen) - _FROZEN_UNITS:
                del self.in_backward[other]
                self.scheduler.done_with(other, "backward")
        self.in_backward[unit] = None

    def backward_done_with(self, unit: Unit) -> None:
        """All gradients of `unit` in this backward are complete."""
        self.in_backward.pop(unit, None)
        self._noticed.pop(unit, None)
        if not unit.holds:
            self.scheduler.done_with(unit, "backward")

    def backward_runs(self) -> None:
        """Called at any event of a backward; tidies up at the end of each."""
        task = _current_task()
        if task != -1 and task != self._backward_task:
            self._backward_task, self.backward_thread = task, threading.get_ident()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """End of a backward, or of one nested in it: idempotent tidying only."""
        self._backward_task = -1
        for unit in list(self.in_backward):
            if not unit.holds:
                del self.in_backward[unit]
                self.scheduler.done_with(unit, "backward")
        self.forget_noticed()
        self.scheduler.backward_ended()

    # -- borders ---------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """The outermost forward begins."""
        self.border()
        for unit in self.units:  # those that no gather will look at
            if unit.unwatched and (unit.permanent or unit.state is READY):
                self.gradients.watch(unit)
        if torch.is_grad_enabled():
            self.gradients.expect_backward()
        self.scheduler.step_begins()

    def border(self) -> None:
        """Between forwards, backwards and steps: gradients at rest, nothing gathered by chance."""
        if _current_task() != -1:
            return
        hooks.end_interrupted()
        one_thread.refuse_beside_another(self)
        if self.pieces:
            optimizer_pieces.recover(self)
        for tiles in self.tiled:
            tiles.keep_changes()
        self.gradients.settle()
        self.forget_noticed()
        for unit in self.units:
            if unit.permanent:
                if not unit.plain:
                    self.collect_changes(unit)
            elif (unit.flat is None) is not (unit.state is SHARDED):
                self._mend(unit)

    def values_changed(self, unit: Unit) -> None:
        """The shard got new values: what is gathered is stale, and what autograd saved too."""
        unit.generation += 1
        if unit.permanent:
            for slot in unit.slots:  # raw views of it that autograd holds must raise, not give the new values
                parameter_forms.mark_changed(slot)
        else:
            self.release(unit, force=True)

    def hide(self, unit: Unit) -> None:
        """The shard is out of date until an update that is owed has run: any look at a parameter must gather."""
        self.release(unit, force=True)
        if unit.permanent:
            for slot in unit.slots:  # what autograd holds of it is of before the update, as in `values_changed`
                parameter_forms.mark_changed(slot)
            parameter_forms.release(unit.params, unit.placeholders)

    def show_resident(self, unit: Unit) -> None:
        """A resident unit is up to date: its parameters are views of the shard again."""
        if unit.permanent:
            parameter_forms.gather(unit.params, [slot.view_of(unit.flat) for slot in unit.slots])

    def abort(self) -> None:
        """If an exception has ended a backward: what it had gathered goes, what is in flight comes to rest."""
        if not self.in_backward and self._backward_task == -1:  # as the end of a backward leaves them
            return
        self._backward_task = -1
        self.scheduler.abort()
        for unit in list(self.in_backward):
            if not unit.holds:
                del self.in_backward[unit]
                self.scheduler.done_with(unit, "backward")

    def unhook(self) -> None:
        """No event of the module reaches this model any more."""
        for unit in self.units:
            self.gradients.unwatch(unit)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def dissolve(self) -> None:
        """The module is gone: give back what its units hold."""
        self.unhook()
        for unit in self.units:
            self.store.forget(unit)
            for slot in unit.slots:
                slot.forget_accumulator()
        self.units = []
        self.store = NoStore()  # what a part of the module that lives on asks, it answers
