"""zero3: parameters, gradients and optimizer states of any PyTorch model, partitioned over ranks.

    model = zero3.shard(Model())           # or: with zero3.init(): model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(x); loss.backward(); optimizer.step(); optimizer.zero_grad()

ZeRO-3 of ZeRO-Infinity (arXiv 2104.07857); the model's code stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch as _torch
from torch import nn as _nn

from .errors import RankMismatchError, StaleViewError, StateError, UnsupportedError, Zero3Error
from .external_parameters import register_external
from .full_state import load_state_dict, state_dict
from .gathering import gathered
from .gradient_norm import clip_grad_norm_
from .parameter_forms import slot_of as _slot_of
from .partition_model import model_of as _model_of
from .partition_model import shard
from .partitioned_init import init
from .scheduler import Scheduler
from .shard_store import ShardStore
from .tiles import tiles_of as _tiles_of
from .unit import Unit
from .unit_grouping import mark_as_unit as as_unit

__version__ = "0.1.0"

__all__ = [
    "RankMismatchError",
    "Scheduler",
    "ShardStore",
    "StaleViewError",
    "StateError",
    "Unit",
    "UnsupportedError",
    "Zero3Error",
    "as_unit",
    "clip_grad_norm_",
    "full_shape",
    "gathered",
    "init",
    "load_state_dict",
    "missing_grads",
    "no_sync",
    "register_external",
    "shard",
    "state_dict",
    "units",
]


@contextmanager
def no_sync(model: _nn.Module) -> Iterator[None]:
    """Accumulate unreduced gradients inside: no communication, one full gradient on every rank.

    The first backward outside reduces all of it, or else the optimizer's step. Without it, reduced shards accumulate.
    """
    gradients = _model_of(model).gradients
    gradients.synchronise(False)
    try:
        yield
    finally:
        gradients.synchronise(True)


def full_shape(param: _torch.Tensor) -> _torch.Size:
    """Shape of the whole parameter, whichever form it has now."""
    return param.shape if _tiles_of(param) is not None else _slot_of(param).shape


def missing_grads(model: _nn.Module) -> list[str]:
    """Names of trainable parameters that got no gradient, on any rank, in the last backward. Collective."""
    return _model_of(model).gradients.missing_names()


def units(model: _nn.Module) -> list[Unit]:
    """The model's units: `name`, `numel` (elements), `state`, `grad_state`, ... for people and tests."""
    return list(_model_of(model).units)
