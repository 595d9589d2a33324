"""Activations on any tier (paper, 5.1: CPU offload of activations; and NVMe, which it leaves as future work).

    checkpoint(fn, *args)    runs `fn` again in backward; its inputs wait on the activations' tier of the running model
    offload_saved(model)     inside, every tensor that autograd saves goes to that tier
    checkpoint_blocks(...)   Config(activations=...): every block of a list of equal blocks is checkpointed by itself

All three come through the door of saved-tensor hooks. What is written lies in the tensor's own strides, so backward
computes with exactly what forward saw; what backward needs next is read ahead, in the order in which it was saved.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from zero3.buffer_pool import PooledBuffer
from zero3.hooks import running_again, running_model
from zero3.partitioned_model import PartitionedModel
from zero3.saved_views import SavedView
from zero3.untraced import untraced

from .buffers_in_replay import Replayable
from .errors import ConfigError
from .offload_engine import OffloadEngine, engine_of
from .tiers import Key, Wait

# Tensors smaller than this stay where they are: a transfer would cost more than their memory.
_SMALLEST = 64 << 10

# Bytes of writes that may be on their way, and of reads ahead.
_IN_FLIGHT = 64 << 20


@untraced
def checkpoint(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)` without keeping what lies between: backward runs `fn` again, with the same random numbers.

    If `fn` is a module or a method of one, buffers that it changes change once, as in a plain call.

    The tensors among `args` wait on the activations' tier of the model whose forward is running (`device` where
    Config says None, and outside of any). Gradients are those of a plain call. `use_reentrant=False`, which torch's own
    function wants to be given, may stand among `kwargs`; ValueError for True.
    """
    if kwargs.pop("use_reentrant", False):
        raise ValueError("zinf.checkpoint is not reentrant: leave use_reentrant out, or give False")
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return _checkpoint(module if isinstance(module, nn.Module) else None, fn, *args, **kwargs)


@untraced
def _checkpoint(module: nn.Module | None, fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """As `checkpoint`; `module`: whose buffers `fn` may change."""
    if module is not None and torch.is_grad_enabled():
        fn = Replayable(module, fn)
    model = running_model()
    engine = model.store if model is not None and isinstance(model.store, OffloadEngine) else None
    if model is None or engine is None or engine.config.activations in (None, "device") or not torch.is_grad_enabled():
        return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)
    # Only the inputs are saved under our hooks: within `fn`, the checkpoint's own are above them.
    with _saving_to(engine, model):
        return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)


@contextmanager
def offload_saved(model: nn.Module) -> Iterator[None]:
    """Inside, every tensor that autograd saves for backward goes to the activations' tier of `model`.

    ConfigError when Config(activations=...) names none.
    """
    engine, machinery = engine_of(model)
    if engine.config.activations is None:
        raise ConfigError("no tier for saved activations: give Config(activations='cpu') or 'nvme'")
    with _saving_to(engine, machinery):
        yield


def checkpoint_blocks(module: nn.Module) -> None:
    """Checkpoint every block of every list of at least two blocks of one class in `module`."""
    for child in module.modules():
        if isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(block) for block in child}) == 1:
            for block in child:
                # The module's hooks (gather, release) stay outside; only what they enclose runs again.
                block.forward = functools.partial(_checkpoint, block, functools.partial(_run, block, block.forward))


def _run(block: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """The block's forward. Where it runs again its hooks do not come by themselves."""
    if torch._C._current_graph_task_id() == -1:
        return forward(*args, **kwargs)
    with running_again(block):
        return forward(*args, **kwargs)


@contextmanager
def _saving_to(engine: OffloadEngine, machinery: PartitionedModel) -> Iterator[None]:
    hooks = _Hooks(engine.activations, machinery)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield


class _Hooks:
    """Weights become views of their unit; small tensors stay; all else goes to the store."""

    def __init__(self, store: ActivationStore, machinery: PartitionedModel):
        self._store, self._machinery = store, machinery
        in_place = (unit.flat for unit in machinery.units if unit.permanent)
        self._parameters = {flat.untyped_storage()._cdata for flat in in_place if flat is not None}

    @untraced
    def pack(self, tensor: Tensor) -> Any:
        view = SavedView.of(tensor, self._machinery)
        if view is not None:
            return view
        if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in self._parameters:
            return SavedActivation(self._store, tensor)
        return self._store.put(tensor)

    @untraced
    def unpack(self, packed: SavedView | SavedActivation) -> Tensor:
        return packed.rebuild() if isinstance(packed, SavedView) else packed.get()


class SavedActivation:
    """A tensor that autograd saved. Lives as long as the graph node that saved it."""

    def __init__(self, store: ActivationStore, tensor: Tensor):
        self._store = store
        self.tensor: Tensor | None = tensor.detach()  # until it is on its tier
        self._saved_at = tensor._version
        self._found_at = self._saved_at  # the version when it was freed
        self._size = tensor.shape
        if tensor.layout is torch.strided:
            self._stride, self.numel = tensor.stride(), _span(tensor)
        self.dtype = tensor.dtype
        self.room: _Room | None = None  # on its tier

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def free(self) -> None:
        """It is on its tier: let the memory go. From then on it cannot be changed any more."""
        if self.tensor is not None:
            self._found_at = self.tensor._version
            self.tensor = None

    def get(self) -> Tensor:
        """The tensor, with its own strides. RuntimeError when it was changed in place after it was saved.

        torch itself does not look for such changes where hooks are.
        """
        version = self._found_at if self.tensor is None else self.tensor._version
        if version != self._saved_at:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.dtype} {tuple(self._size)} is at version {version}; expected version {self._saved_at}"
            )
        if self.tensor is not None:
            return self.tensor
        assert self.room is not None  # nothing else takes the tensor away
        return self._store.fetch(self.room).as_strided(self._size, self._stride)


class _Room:
    """The place of a saved tensor on its tier, until nobody holds the tensor any more.

    That is asked when the store looks next, not told by a destructor: an interrupt that meets one is lost, since
    Python can raise nothing out of there.
    """

    def __init__(self, key: Key, saved: SavedActivation):
        self.key = key
        self.numel, self.dtype, self.nbytes = saved.numel, saved.dtype, saved.nbytes
        self.saved = weakref.ref(saved)
        self.reading: tuple[Wait, PooledBuffer] | None = None  # a read ahead, and the pool's buffer that it fills

    def is_written(self) -> bool:
        saved = self.saved()
        return saved is not None and saved.tensor is None


class _Write(NamedTuple):
    """A write on its way. deepnvme keeps the memory alive until it is done, whoever else lets go."""

    room: _Room
    done: Wait


class ActivationStore:
    """Activations of one model on their tier; the newest are the first that backward asks for."""

    def __init__(self, engine: OffloadEngine):
        self._tiers = engine.tiers
        self._tier_name = engine.config.activations or "device"
        self._rooms: dict[Key, _Room] = {}  # oldest first
        self._writing: deque[_Write] = deque()
        self._reading_nbytes = 0

    def put(self, tensor: Tensor) -> SavedActivation:
        """Save `tensor`; it may be freed when its write is done."""
        saved = SavedActivation(self, tensor)
        wants_tier = self._tier_name == "nvme" or (self._tier_name == "cpu" and tensor.device.type != "cpu")
        if not wants_tier or saved.nbytes < _SMALLEST or saved.numel > 2 * max(tensor.numel(), 1):
            return saved
        self._drop_newest()
        flat = saved.tensor.as_strided((saved.numel,), (1,), tensor.storage_offset())  # type: ignore[union-attr]
        room = saved.room = _Room(Key(self._tiers.number(), "activation"), saved)
        self._rooms[room.key] = room  # so early, since an interrupt may come at any moment
        self._writing.append(_Write(room, self._tiers.of(self._tier_name).start_put(room.key, flat)))
        self._let_go(_IN_FLIGHT)
        return saved

    def _let_go(self, in_flight: int) -> None:
        """Free what is written; wait for the oldest while more than `in_flight` bytes are on their way."""
        waiting = sum(write.room.nbytes for write in self._writing)
        while self._writing and (waiting > in_flight or self._writing[0].done.done()):
            write = self._writing.popleft()
            waiting -= write.room.nbytes
            write.done()
            saved = write.room.saved()
            if saved is not None:
                saved.free()

    def fetch(self, room: _Room) -> Tensor:
        """The flat elements (numel,), in memory of the pool that is reused when nobody views it any more."""
        self._drop_newest()
        if room.reading is None:
            self._start_reading(room)
        wait, buffer = room.reading  # type: ignore[misc]
        room.reading = None
        self._read_ahead(room)
        with self._tiers.spans.running("stall", "activation"):
            wait()
        self._reading_nbytes -= room.nbytes
        flat = buffer.flat(room.numel, room.dtype)
        self._tiers.device_pool.give_back(buffer)
        return flat

    def _start_reading(self, room: _Room) -> None:
        buffer = self._tiers.device_pool.take(room.nbytes, "activation")
        room.reading = (
            self._tiers.of(self._tier_name).start_get(room.key, buffer.flat(room.numel, room.dtype)),
            buffer,
        )
        self._reading_nbytes += room.nbytes

    def _read_ahead(self, room: _Room) -> None:
        """Backward goes from the newest to the oldest."""
        older = False
        for candidate in reversed(self._rooms.values()):
            if older and candidate.is_written() and candidate.reading is None:
                if self._reading_nbytes + candidate.nbytes > _IN_FLIGHT:
                    return
                self._start_reading(candidate)
            older = older or candidate is room

    def drop_unheld(self) -> None:
        """Give back the rooms of tensors whose graph is gone, or that backward is done with."""
        for room in [room for room in self._rooms.values() if room.saved() is None]:
            self._drop(room)

    def _drop_newest(self) -> None:
        """The same for those behind the newest that is held: backward is done with the newest first."""
        while self._rooms and (newest := next(reversed(self._rooms.values()))).saved() is None:
            self._drop(newest)

    def _drop(self, room: _Room) -> None:
        if room.reading is not None:
            (wait, buffer), room.reading = room.reading, None
            wait.settle()
            self._reading_nbytes -= room.nbytes
            self._tiers.device_pool.give_back(buffer)
        self._tiers.of(self._tier_name).drop(room.key)
        del self._rooms[room.key]


def _span(tensor: Tensor) -> int:
    """Elements of storage from the first to the last that `tensor` touches."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
