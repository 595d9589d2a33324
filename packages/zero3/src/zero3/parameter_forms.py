"""What the model's Parameter object is at each moment. Its identity never changes; its class and data do.

    form      when                        data                                           class
    released  at rest, between uses       one NaN element expanded to the full shape     Released
    filled    used outside of any         a view of the unit's flat buffer               Released
              forward, or in backward
              by who has kept it
    gathered  unit in use                 a view of the unit's flat buffer               Gathered
    piece     inside optimizer.step()     this rank's part, with the parameter's ndim    Parameter

Why the full shape while released: autograd's accumulation checks a gradient against it, and everybody who
asks for `shape`, `ndim` or `numel()` gets the plain model's answer. Why NaN: an access that escapes our notice
must never look like a number. Why two classes: `__torch_function__` costs 2-3 µs a call, so only the form whose
values are absent has it; there it notices any use from anywhere and gathers first (paper, 7.1). Why filled: outside of
any forward our saved-tensor hooks are on top only while a noticed function runs, without which autograd would save the
Parameter itself, whose data goes. And backward needs no more than saved views, unless somebody has kept the Parameter
itself past our hooks, for code that asks no class.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .errors import UnsupportedError
from .unit import ParamSlot, Unit
from .untraced import untraced

# torch's own attributes, past our properties. Bound once: they are called for every parameter at every gather.
_data_slot: Any = torch._C.TensorBase.data
_grad_slot: Any = torch._C.TensorBase.grad
_get_data, _set_data = _data_slot.__get__, _data_slot.__set__
_get_grad, _set_grad = _grad_slot.__get__, _grad_slot.__set__
without_noticing = torch._C.DisableTorchFunctionSubclass


def raw_data(param: Tensor) -> Tensor:
    """`param.data` past our property."""
    with without_noticing():
        return _get_data(param)


def set_raw_data(param: Tensor, value: Tensor) -> None:
    with without_noticing():
        _data_slot.__set__(param, value)


def raw_grad(param: Tensor) -> Tensor | None:
    """The gradient slot that autograd itself writes. Reading it must not count as an access."""
    with without_noticing():
        return _get_grad(param)


def set_raw_grad(param: Tensor, value: Tensor | None) -> None:
    with without_noticing():
        _set_grad(param, value)


def take_raw_grads(params: Sequence[Any]) -> list[Tensor | None]:
    """The gradients that autograd has left in its slots, which are empty afterwards."""
    grads = []
    with without_noticing():
        for param in params:
            grads.append(param._zero3_grad)
            param._zero3_grad = None
    return grads


def has_raw_grads(params: Sequence[Any]) -> bool:
    """Whether autograd has left any gradient in its slots."""
    with without_noticing():
        return any(param._zero3_grad is not None for param in params)


class ShardGradient(Tensor):
    """This rank's part of a parameter's gradient, as user code sees it.

    A norm or an overflow check over such parts would be local and silently wrong, so torch's own helpers for
    both are answered globally, also of a copy or a multiple of the part; everything else works on the part as on any
    tensor. What is written to its `data` goes to where the gradient is kept.
    """

    _zero3: ParamSlot  # missing where it is a whole gradient, of this rank alone (no_sync)

    def set_(self, source: Any = None, *place: Any) -> Any:
        """As `data = source`; torch's own asks no class."""
        if not isinstance(source, Tensor) or place:
            raise UnsupportedError("set_ of a partitioned gradient takes a tensor of its shape and dtype")
        self.data = source
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, protocol):
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # pickled, it is a plain tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        from . import gradient_norm  # imports the model's machinery, which imports this file

        kwargs = kwargs or {}
        with without_noticing():
            return gradient_norm.intercept(func, args, kwargs)


class _Partitioned(torch.nn.Parameter):
    """What both forms share: `grad` is this rank's reduced part, `data` is watched."""

    _zero3: ParamSlot
    # torch's own attributes, past our properties
    _zero3_data, _zero3_grad = _data_slot, _grad_slot

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the reduced gradient, with the parameter's ndim; None when there is none."""
        slot = self._zero3
        return slot.unit.model.gradients.visible(slot)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        slot = self._zero3
        slot.unit.model.gradients.assign(slot, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        slot = self._zero3
        slot.unit.model.notice(slot)
        touch(slot)
        return raw_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        slot = self._zero3
        current = slot.unit
        if value.dtype != current.dtype or value.device != current.device or value.shape != slot.shape:
            raise UnsupportedError(
                f"parameter {slot.name} is partitioned: its data cannot become {tuple(value.shape)} "
                f"{value.dtype} on {value.device} (it is {tuple(slot.shape)} {current.dtype} on "
                f"{current.device}). Convert the model before zero3.shard(), or give shard(dtype=...)."
            )
        current.model.notice(slot)
        touch(slot)
        with torch.no_grad():
            raw_data(self).copy_(value)

    def set_(self, source: Any = None, *place: Any) -> Any:
        """As `data = source`, which parametrizations mean by it: the memory under the parameter is its unit's."""
        if not isinstance(source, Tensor) or place:
            raise UnsupportedError(
                f"parameter {slots_of(self)[0].name} is partitioned: set_ takes a tensor of its shape and dtype, which "
                "is copied"
            )
        self.data = source
        return self

    def as_subclass(self, cls: type) -> Any:
        """torch's own asks no class whether it may."""
        slot = self._zero3
        slot.unit.model.notice(slot)
        touch(slot)
        return super().as_subclass(cls)

    def share_memory_(self) -> Any:
        """Refused: it would give other memory to a buffer that serves many units, or to a shard."""
        raise UnsupportedError(
            f"parameter {slots_of(self)[0].name} is partitioned: its memory cannot be shared between processes. Share "
            "copy.deepcopy(model), which is a plain model."
        )

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Refused: it would be called with this rank's own gradient, before the reduction."""
        _refuse_hook(self._zero3)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """A deep copy is a plain, whole parameter."""
        if id(self) not in memo:
            slot = self._zero3
            slot.unit.model.notice(slot)
            memo[id(self)] = torch.nn.Parameter(raw_data(self).clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return copy.deepcopy(self).__reduce_ex__(protocol)


class Gathered(_Partitioned):
    """The values are there. Function calls go straight to torch (Parameter's own disabled torch function)."""


class Released(_Partitioned):
    """The values are not there, or filled in: any function that reads them gathers the unit first."""

    detach_gathers = True  # False while a module lists its parameters for state_dict (full_state.py)

    @classmethod
    @untraced
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in METADATA and (func is not Tensor.detach or cls.detach_gathers):
            leaves = tree_leaves((args, kwargs))
            slots = [leaf._zero3 for leaf in leaves if isinstance(leaf, _Partitioned)]
            if any(type(leaf) is ShardGradient for leaf in leaves):
                _refuse_part(slots)
            if func is Tensor.copy_ and _overwritten(*args, **kwargs):
                return args[0]
            units = {slot.unit for slot in slots}
            for slot in slots:
                slot.unit.model.notice(slot, beside=units)
                if func in RAW_ACCESS:
                    touch(slot)
            if func is torch.autograd.grad:  # runs user code, in which accesses must be noticed
                _refuse_unreduced(slots)
                for unit in units:
                    unit.model.show(unit)  # or it would be asked again
                return func(*args, **kwargs)
            with ExitStack() as stack:
                for model in {unit.model for unit in units}:
                    stack.enter_context(model.keeping_views())
                stack.enter_context(without_noticing())
                return func(*args, **kwargs)
        with without_noticing():
            return func(*args, **kwargs)


def _overwritten(param: Tensor, values: Any, *_: Any, **__: Any) -> bool:
    """`released.copy_(values)`: as torch loads a state. No gather, and the shard takes more than gathered precision."""
    if type(param) is not Released or not isinstance(values, Tensor) or isinstance(values, _Partitioned):
        return False
    slot: ParamSlot = param._zero3
    unit = slot.unit
    if unit.shown is not False or unit in unit.model.in_backward:  # somebody uses the values that are there
        return False
    if values.shape != slot.shape or (torch.is_grad_enabled() and param.requires_grad):
        return False
    flat = values.detach().reshape(-1)
    slot.unit.model.assign(slot, lambda start, stop: flat[start:stop])
    return True


def _refuse_part(slots: list[ParamSlot]) -> None:
    """A whole parameter beside a part of a gradient: an error of torch's on some ranks, and on others a broadcast."""
    for slot in slots:
        if slot.unit.model.shard_ranks > 1:
            refuse_beside_whole(slot)


def refuse_beside_whole(slot: ParamSlot) -> None:
    raise UnsupportedError(
        f"a gradient is this rank's part of it, and {slot.name} is whole outside of an optimizer's step: they "
        "do not fit together. Use an optimizer of torch.optim."
    )


def _refuse_unreduced(slots: list[ParamSlot]) -> None:
    for slot in slots:
        if slot.unit.model.ranks.size > 1:
            raise UnsupportedError(
                f"torch.autograd.grad with respect to the partitioned parameter {slot.name} would give this rank's own "
                "gradient, not the mean over ranks. Use loss.backward() and read param.grad."
            )


def touch(slot: ParamSlot) -> None:
    """Somebody gets the memory itself: remember the values, since a change through it shows in no counter."""
    if slot.touched is None:
        slot.touched = raw_data(slot.param).clone()


def changed(slot: ParamSlot) -> bool:
    """Whether a gathered parameter was changed in place since it was gathered or last asked about."""
    count = slot.param._version - slot.version
    slot.version += count
    was, slot.touched = slot.touched, None
    if was is not None and not same_bits(was, raw_data(slot.param)):
        count += 1
    slot.changes += count
    return count > 0


def changes_of(slot: ParamSlot) -> int:
    """How often the values were changed, up to now, by itself or with the whole unit."""
    changes, param = slot.unit.generation + slot.changes, slot.param
    if type(param) is Gathered:
        return changes + param._version - slot.version
    if type(param) is not Released or slot.unit.shown is False:
        return changes
    with without_noticing():
        return changes + param._version - slot.version


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits, NaN included."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def release(params: Sequence[Any], placeholders: Sequence[Tensor]) -> None:
    """Give the parameters their placeholders."""
    with without_noticing():
        for param, placeholder in zip(params, placeholders, strict=True):
            if type(param) is not Released:  # what was filled is; to set a class takes as long as to set the data
                param.__class__ = Released  # first: where an interrupt comes between, a use is noticed
            param._zero3_data = placeholder


def fill(params: Sequence[Any], views: Sequence[Tensor]) -> None:
    """Put its view under each parameter; a use of it is still noticed."""
    with without_noticing():
        for param, view in zip(params, views, strict=True):
            param._zero3_data = view


def gather(params: Sequence[Any], views: Sequence[Tensor]) -> None:
    """Make each parameter its view (its full shape, the unit's dtype)."""
    with without_noticing():
        for param, view in zip(params, views, strict=True):
            param._zero3_data = view
            param.__class__ = Gathered  # last, for the same reason as in release


def watch(params: Sequence[Any]) -> None:
    """Let uses of gathered parameters be noticed again; their values stay."""
    for param in params:
        param.__class__ = Released


def may_have_changed(unit: Unit) -> list[ParamSlot]:
    """Those of a unit's gathered parameters of which `changed` has something to find out."""
    with without_noticing():
        return [slot for slot in unit.slots if slot.touched is not None or slot.param._version != slot.version]


def will_come(unit: Unit, engine_will_run: Callable[[Any], bool]) -> set[int]:
    """Numbers of the slots whose gradient the running backward will finish."""
    with without_noticing():
        trained = [slot for slot in unit.slots if slot.param.requires_grad]
        nodes = zip(trained, unit.accumulators_of(trained), strict=True)
        return {slot.index for slot, node in nodes if engine_will_run(node)}


def mark_changed(slot: ParamSlot) -> None:
    """The memory under a gathered parameter was rewritten behind torch's back: let torch's own check know."""
    with without_noticing():
        torch.autograd.graph.increment_version(slot.param)
    slot.version = slot.param._version


def present_piece(slot: ParamSlot, piece: Tensor, grad: Tensor | None) -> None:
    """Make the parameter this rank's part, for an optimizer."""
    param = slot.param
    param.__class__ = torch.nn.Parameter
    _set_grad(param, None)  # its shape would be checked against the new data
    _set_data(param, piece)
    slot.version = param._version
    _set_grad(param, grad)


def withdraw_piece(slot: ParamSlot) -> None:
    """Back from the optimizer's part to the placeholder. An optimizer may also change what has no gradient."""
    slot.changes += slot.param._version != slot.version
    _set_grad(slot.param, None)
    if slot.unit.dtype != slot.unit.master_dtype:
        slot.forget_accumulator()  # torch has dropped the node when the dtype changed
    slot.version = slot.param._version
    release([slot.param], [slot.placeholder])


def _refuse_hook(slot: ParamSlot) -> None:
    raise UnsupportedError(
        f"parameter {slot.name} is partitioned: a post-accumulate-grad hook on it (an optimizer that steps inside "
        "backward, for example) would see this rank's unreduced gradient. Step after backward, or use "
        'zinf.Config(overlap_optimizer="backward").'
    )


def adopt(slot: ParamSlot) -> None:
    """Tie a parameter to its slot, and release it."""
    if slot.param._post_accumulate_grad_hooks and not is_partitioned(slot.param):
        _refuse_hook(slot)
    slot.param._zero3 = slot
    slot.unswappable = weakref.ref(slot.param)
    with without_noticing():
        slot.version = slot.param._version
    set_raw_grad(slot.param, None)
    release([slot.param], [slot.placeholder])


def is_partitioned(param: Any) -> bool:
    """Whether its values lie in a unit, or, of one in tiles (tiles.py), in several."""
    return getattr(param, "_zero3", None) is not None or getattr(param, "_zero3_tiles", None) is not None


def slots_of(param: Any) -> list[ParamSlot]:
    """The slots of a parameter: one; one a tile, where it is in tiles; none of a plain one."""
    tiles = getattr(param, "_zero3_tiles", None)
    if tiles is not None:
        return tiles.slots
    slot = getattr(param, "_zero3", None)
    return [] if slot is None else [slot]


def dtypes_of(param: Tensor, wanted: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of the shard, dtype when gathered) of a parameter, plain or partitioned, where `wanted` is asked for."""
    tiles = getattr(param, "_zero3_tiles", None)
    if tiles is not None:
        param = tiles.params[0]
    unit = slot_of(param).unit if is_partitioned(param) else None
    master = param.dtype if unit is None or unit.plain else unit.master_dtype
    return master, wanted if wanted is not None and master.is_floating_point else master


def slot_of(param: Any) -> ParamSlot:
    """The slot of a partitioned parameter; TypeError for anything else."""
    slot = getattr(param, "_zero3", None)
    if slot is None:
        found = f"{type(param).__name__} {tuple(param.shape)}" if isinstance(param, Tensor) else type(param).__name__
        raise TypeError(
            f"expected a parameter of a partitioned model, got {found}. What was made or put into the model after "
            "shard() is an ordinary parameter: partition the model when it is complete, and take its parameters then."
        )
    return slot


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


def _setters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__set__ for name in names]


# What tells about a tensor without reading its values. Strides are missing on purpose: the placeholder's are 0.
METADATA = frozenset(
    [
        *_getters(
            "shape", "dtype", "device", "ndim", "layout", "is_leaf", "requires_grad", "grad_fn", "_version",
            "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_mps", "is_xpu", "is_nested",
            "is_quantized", "is_mkldnn", "is_vulkan", "is_ipu", "is_mtia", "is_maia", "itemsize", "nbytes",
            "retains_grad", "output_nr", "name", "_backward_hooks", "_post_accumulate_grad_hooks", "_base",
            "grad_dtype",
        ),
        *_setters("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"),
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.element_size,
        Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_inference,
        torch.is_floating_point, torch.is_complex, torch.is_inference, torch.numel,
        Tensor.get_device, Tensor.register_hook, Tensor.requires_grad_,
        Tensor.__hash__, Tensor.__len__, Tensor.is_same_size,
    ]
)  # fmt: skip

# Routes that hand out the memory itself: what is done through them shows in no version counter.
RAW_ACCESS = frozenset(
    [
        Tensor.numpy, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.__dlpack__,
        Tensor.__array__,
    ]
)  # fmt: skip
