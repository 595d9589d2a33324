"""What a training run is asked to do, and the learning rate that follows from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

FINAL_LR_FRACTION = 0.1  # what the cosine decays to


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The flags of `zinf train`, typed. Sizes in bytes may be strings with a binary unit ("512MiB")."""

    data: str  # a file, or "builtin"
    model: str  # a name (see model_names.py), or a directory in Hugging Face's layout
    preset: str  # of zinf.Config
    nvme: tuple[Path, ...]  # directories, one a drive; none: a folder inside `out`
    steps: int
    batch: int  # sequences of one optimizer step, over all ranks and micro-batches together
    seq: int  # tokens of a sequence
    lr: float  # after warm-up
    warmup: int  # steps
    decay: int  # steps of the cosine; 0: the rate stays
    accumulate: int  # micro-batches that a step's batch is cut into
    grad_clip: float | None
    seed: int
    dtype: str  # a key of DTYPES
    host_memory: str | None
    device_memory: str | None
    resident: str | None
    activations: str | None  # a tier, or "none"; None: checkpointed where they would not fit
    prefetch: bool
    overlap_optimizer: str | bool | None  # None: zinf.Config's own default
    out: Path
    save_every: int  # steps; 0: at the end only
    keep: int  # checkpoints
    resume: bool
    metrics: Path | None  # None: metrics.jsonl inside `out`
    trace: Path | None
    validation_batches: int
    sample_length: int  # tokens

    def check_divisible(self, ranks: int) -> None:
        """Raises ValueError unless every rank's micro-batch is whole and equally large."""
        if self.batch % (ranks * self.accumulate):
            raise ValueError(
                f"--batch {self.batch} cannot be cut into equal parts for {ranks} rank(s) "
                f"of {self.accumulate} micro-batch(es): give a multiple of {ranks * self.accumulate}"
            )

    def defining(self) -> dict[str, Any]:
        """The settings that the numbers of a run depend on, beside its model and its data."""
        names = ("batch", "seq", "lr", "warmup", "decay", "grad_clip", "seed", "dtype")
        return {name: value for name, value in asdict(self).items() if name in names}

    @property
    def metrics_path(self) -> Path:
        return self.metrics or self.out / "metrics.jsonl"

    @property
    def swap_directories(self) -> tuple[Path, ...]:
        """Where states on the drive would lie; a folder of ours only for the preset that cannot do without."""
        if self.nvme or self.preset != "inf-nvme":
            return self.nvme
        return (self.out / "nvme",)


def lr_factor(step: int, *, warmup: int, decay: int) -> float:
    """The learning rate of step `step` (the first is 0) as a fraction of `lr`.

    It rises linearly over `warmup` steps, then falls along a cosine to FINAL_LR_FRACTION at step `decay` and stays.
    It does not depend on how many steps a run takes: a run that is continued is the run that never stopped.
    """
    if step < warmup:
        return (step + 1) / warmup
    if not decay:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, decay - warmup))
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * (1 + math.cos(math.pi * progress)) / 2
