"""What stands before the first step: checked inputs, model, optimizer and schedule, fresh or from a checkpoint."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import zinf
from zinf.checkpoint_files import checkpoints
from zinf.errors import ZinfError
from zinf.training.activation_memory import activations_tier
from zinf.training.drive_space import check_space
from zinf.training.faults import CannotStart, describe
from zinf.training.ranks import Ranks
from zinf.training.run_directory import check_writable
from zinf.training.settings import DTYPES, TrainSettings, lr_factor
from zinf.training.task import Task, open_task
from zinf.training.token_data import check_sizes, validation_batches

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices; biases and norms are not decayed


@dataclass(frozen=True)
class Inputs:
    """What the settings name, read and checked before anything is built."""

    task: Task
    validation: list[tuple[Tensor, Tensor]]  # tokens and targets of all ranks, each (batch, seq) int64


@dataclass
class Run:
    """A model in training, and where it stands."""

    settings: TrainSettings
    ranks: Ranks
    inputs: Inputs
    model: nn.Module
    optimizer: zinf.AdamW
    scheduler: LambdaLR
    step: int = 0  # steps that were taken
    validation_before: float | None = None  # loss before the first of them


def read_inputs(settings: TrainSettings, ranks: Ranks) -> Inputs:
    """Reads the text and checks all that can be checked without making anything. Collective.

    Raises CannotStart, on every rank with the words of the first that found a fault.
    """
    inputs, fault = None, None
    try:
        inputs = _read_inputs(settings, ranks)
    except (ValueError, OSError, CannotStart) as error:
        fault = describe(error)
    fault = ranks.first_fault(fault)
    if inputs is None or fault:
        raise CannotStart(fault)
    return inputs


def prepare(settings: TrainSettings, inputs: Inputs, ranks: Ranks) -> Run:
    """Builds model, optimizer and schedule, and takes up the newest checkpoint where the settings say so.

    Raises CannotStart when the settings do not fit one another, the drives or the checkpoint.
    """
    try:
        torch.manual_seed(settings.seed)
        with zinf.init(_zinf_config(settings, inputs.task, ranks)):
            model = inputs.task.build()
        optimizer = zinf.AdamW(
            [
                {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
                {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=BETAS,
            grad_clip=settings.grad_clip,
            accumulate=settings.accumulate,
        )
        scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, warmup=settings.warmup, decay=settings.decay))
        run = Run(settings, ranks, inputs, model, optimizer, scheduler)
        if not (settings.resume and _resume(run)):
            inputs.task.load_weights(model)
    except (ZinfError, OSError) as error:
        raise CannotStart(describe(error)) from error
    return run


def _read_inputs(settings: TrainSettings, ranks: Ranks) -> Inputs:
    settings.check_divisible(ranks.count)
    for directory in settings.nvme:
        check_writable(directory)
    for path in filter(None, (settings.metrics, settings.trace)):
        check_writable(path.absolute().parent)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory, not a file", str(path))
    if settings.out.exists():
        check_writable(settings.out)
    task = open_task(settings)
    check_space(settings, task.numel, hosts=ranks.hosts)
    sizes = {"batch": settings.batch, "seq": settings.seq}
    check_sizes(task.data, **sizes, unit=task.unit)
    return Inputs(task, validation_batches(task.data, batches=settings.validation_batches, **sizes))


def _zinf_config(settings: TrainSettings, task: Task, ranks: Ranks) -> zinf.Config:
    changes: dict[str, Any] = {
        "dtype": DTYPES[settings.dtype],
        "prefetch": settings.prefetch,
        "activations": activations_tier(settings, task, ranks),
    }
    if settings.dtype == "fp16":
        changes["loss_scale"] = "dynamic"
    for name in ("host_memory", "device_memory", "resident", "overlap_optimizer"):
        if getattr(settings, name) is not None:
            changes[name] = getattr(settings, name)
    return zinf.Config.preset(settings.preset, nvme=[str(path) for path in settings.swap_directories], **changes)


def _resume(run: Run) -> bool:
    """Takes up the newest checkpoint; False when there is none yet: the run starts at step 0."""
    if not checkpoints(run.settings.out):
        return False
    extra = zinf.load(run.settings.out, run.model, run.optimizer)
    if not (isinstance(extra, dict) and extra.keys() >= {"step", "validation_before", "scheduler", "settings"}):
        raise CannotStart(
            f"the newest checkpoint in {run.settings.out} is not one of `zinf train`: no settings are in it"
        )
    differing = [
        f"{name} is {value}, was {extra['settings'].get(name)}"
        for name, value in _defining(run).items()
        if value != extra["settings"].get(name)
    ]
    if differing:
        raise CannotStart(f"{run.settings.out} was trained with other settings: {'; '.join(differing)}")
    run.step = extra["step"]
    run.validation_before = extra["validation_before"]
    run.scheduler.load_state_dict(extra["scheduler"])
    return True


def _defining(run: Run) -> dict[str, Any]:
    """What the numbers of a run depend on; a resumed run must have the same."""
    task = run.inputs.task
    return {"model": task.identity, **run.settings.defining(), "data": task.data.fingerprint}


def checkpoint_extra(run: Run) -> dict[str, Any]:
    """What `prepare` needs, beside model and optimizer, to continue the run exactly."""
    return {
        "step": run.step,
        "validation_before": run.validation_before,
        "scheduler": run.scheduler.state_dict(),
        "settings": _defining(run),
    }
