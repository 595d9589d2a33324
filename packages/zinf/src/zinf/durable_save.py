"""save(): a checkpoint of model and optimizer, written now or behind the training's back."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero3.partitioned_model import PartitionedModel

from . import checkpoint_format as layout
from .background_save import BackgroundSave
from .checkpoint_writer import CheckpointWriter
from .offload_engine import OffloadEngine, engine_of
from .offloaded_adamw import AdamW
from .rank_failures import together


@dataclass(frozen=True)
class SaveResult:
    """path: the checkpoint's folder.

    method: how the states get there: "copy", they are there; "background copy", they are on their way, each unit
    copied before it changes. nbytes: of the states, of all ranks.
    """

    path: str
    method: str
    nbytes: int


def save(
    dir: str | os.PathLike,
    model: nn.Module,
    optimizer: AdamW | None,
    extra: Any = None,
    keep: int | None = None,
    background: bool = False,
) -> SaveResult:
    """Write a checkpoint of model and optimizer into a new folder `dir`/checkpoint-NNNNNN. Collective.

    extra       anything of JSON values (dicts with strings or whole numbers as keys, lists, numbers, strings, None) and
                tensors: the state of a schedule, for example
    keep        how many complete checkpoints `dir` shall hold afterwards, the new one included; None: all
    background  return at once; a thread writes the state of this moment while training goes on. The folder appears
                when it is complete. The next `save` or `load`, and the end of the process, wait for it

    OSError from the drive (ENOSPC, ...): then `dir` holds what it held before. What fails in the background is logged
    at once, and raised by the next `save` or `load`. TypeError, ValueError: the optimizer is no zinf.AdamW, or another
    model's.
    """
    if keep is not None and not (isinstance(keep, int) and not isinstance(keep, bool) and keep >= 1):
        raise ValueError(f"keep={keep!r} is no number of checkpoints, at least 1")
    engine, machinery = engine_of(model)
    check_optimizer(engine, optimizer)
    engine.refuse_half_loaded()
    finish_background_save(engine, machinery)
    settle(engine, machinery)
    root = Path(dir)
    writer = CheckpointWriter(root, _agree_on_number(root, machinery), model, optimizer, extra, keep)
    try:
        with together(machinery, "making the checkpoint's folder"):
            if writer.is_first:
                writer.make_folder()
        if background:
            with together(machinery, "beginning to save in the background"):
                writer.open()
                engine.saving = BackgroundSave(writer, model)
                engine.saving.copy_what_is_reachable()
            engine.saving.start()
        else:
            _write_now(writer, machinery)
    except BaseException:
        engine.saving = None
        writer.close()
        if writer.is_first:
            writer.discard()
        raise
    engine.newest_checkpoint = str(writer.final)
    return SaveResult(str(writer.final), "background copy" if background else "copy", writer.nbytes)


def check_optimizer(engine: OffloadEngine, optimizer: Any) -> None:
    """Only the model's own zinf.AdamW has states that lie on this model's tiers."""
    if optimizer is None or optimizer is engine.optimizer:
        return
    if isinstance(optimizer, AdamW):
        raise ValueError("the optimizer is another model's: give the one that was made of this model's parameters")
    raise TypeError(
        f"the optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}: a checkpoint holds the states of "
        "a zinf.AdamW. Give None, and keep those of another optimizer yourself"
    )


def _write_now(writer: CheckpointWriter, machinery: PartitionedModel) -> None:
    with together(machinery, "writing the checkpoint's shards"):
        writer.open()
        writer.copy(writer.kinds.items(), lambda _: None)
        writer.seal()
        writer.close()
    with together(machinery, "finishing the checkpoint"):
        if writer.is_first:
            writer.publish()


def finish_background_save(engine: OffloadEngine, machinery: PartitionedModel) -> None:
    """Wait for a save that is under way; raise what it has met, on every rank. Collective where there is one."""
    if engine.saving is None:
        return
    try:
        with together(machinery, "saving in the background"):
            engine.saving.wait()
    finally:
        engine.saving = None


def settle(engine: OffloadEngine, machinery: PartitionedModel) -> None:
    """Nothing gathered, nothing owed, nothing on its way: all states are on their tiers."""
    machinery.border()
    for unit in machinery.units:
        machinery.release(unit, force=True)
    if engine.optimizer is not None:
        engine.optimizer.settle()


def _agree_on_number(root: Path, machinery: PartitionedModel) -> int:
    numbers = [layout.number_of(path.name) or 0 for path in root.iterdir()] if root.is_dir() else []
    number = torch.tensor([max(numbers, default=0) + 1])
    machinery.ranks.broadcast(number, "the number of the checkpoint")
    return int(number)
