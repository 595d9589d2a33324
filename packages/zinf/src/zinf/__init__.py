"""zinf: trains models far larger than memory, in an ordinary PyTorch loop.

    cfg = zinf.Config.preset("inf-nvme", nvme=["/mnt/nvme"])
    with zinf.init(cfg):
        model = Model()
    optimizer = zinf.AdamW(model.parameters(), lr=3e-4)
    loss = model(x); loss.backward(); optimizer.step(); optimizer.zero_grad()

ZeRO-Infinity (arXiv 2104.07857); the model's code stays as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager as _Context
from typing import Any

import torch as _torch
from torch import nn as _nn

import zero3 as _zero3

from .activation_offload import checkpoint, offload_saved
from .checkpoint_loading import load
from .config import Config
from .durable_save import SaveResult, save
from .errors import AbortedStepError, CheckpointError, ConfigError, ZinfError
from .memory_centric_tiling import tiled
from .offload_engine import engine_of as _engine_of
from .offloaded_adamw import AdamW
from .parameter_state import full_grad, full_state, set_full_state
from .partitioning import init, shard
from .safetensors_export import export
from .safetensors_loading import load_pretrained
from .tiled_cross_entropy import cross_entropy
from .timeline import trace

__version__ = "0.1.0"

__all__ = [
    "AbortedStepError",
    "AdamW",
    "CheckpointError",
    "Config",
    "ConfigError",
    "SaveResult",
    "ZinfError",
    "checkpoint",
    "clip_grad_norm_",
    "cross_entropy",
    "export",
    "full_grad",
    "full_state",
    "init",
    "load",
    "load_pretrained",
    "no_sync",
    "offload_saved",
    "report",
    "save",
    "set_full_state",
    "shard",
    "tiled",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name == "jax":  # loaded on first access: few need it, and importing jax takes as long as all of this package
        import importlib

        return importlib.import_module(".jax", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def report(model: _nn.Module) -> dict[str, Any]:
    """What the last step did, as plain data.

    seconds    {compute, nc, cg, gg, reduce, optimizer, stall, step}
    bytes      {nvme_read, nvme_written, by_kind: {parameters, gradients, optimizer, activations}: {read, written}}
    peak       {device, host}: bytes of gathered units (on a CPU too), and of all of ours in host memory
    prefetch   {hits, misses}
    placement  {parameter: {params, grads, optimizer}}: tiers
    limit      {compute, drive, link, memory}: seconds that each needs at least for such a step
    io         {backend, direct, dirs}
    grad_norm  global norm before clipping, where it was computed, else None
    """
    engine, machinery = _engine_of(model)
    return engine.reporter.report(machinery)


def clip_grad_norm_(model: _nn.Module, max_norm: float) -> _torch.Tensor:
    """Clip the global 2-norm of all gradients, over ranks and tiers; returns the norm before (0-dim, float32).

    With a zinf.AdamW the scaling happens within its update, in the same pass over memory. Collective. ValueError for a
    max_norm that is negative or no number.
    """
    engine, _ = _engine_of(model)
    if engine.optimizer is None:
        return _zero3.clip_grad_norm_(model, max_norm)
    return engine.optimizer.clip(max_norm)


def no_sync(model: _nn.Module) -> _Context[None]:
    """Accumulate unreduced gradients inside: no communication; the full gradient waits on the gradients' tier."""
    _engine_of(model)
    return _zero3.no_sync(model)
