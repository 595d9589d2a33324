"""Whether the blocks of a model are checkpointed, where the settings leave it open: it changes memory, no number."""

from __future__ import annotations

import torch

from zinf.config import PRESETS
from zinf.placement import available_memory
from zinf.training.ranks import Ranks
from zinf.training.settings import TrainSettings
from zinf.training.task import Task

# What autograd keeps of a block: 34 bytes a token and unit of width in 16 bits, as Korthikanti et al. count them
# (arXiv 2205.05198, equation 2, without the attention matrix); twice that here, since norms compute in float32, and on
# many CPUs all else. SmolLM2 in float32 keeps 64.
_BLOCK_BYTES = 68

# Of the memory that is free. zinf's own budget is a half of it; a gradient, logits and the rest share the last quarter.
_PART = 0.25


def activations_tier(settings: TrainSettings, task: Task, ranks: Ranks) -> str | None:
    """Config's `activations`: None, where all activations of a micro-batch fit; else the parameters' tier."""
    if settings.activations is not None:
        return None if settings.activations == "none" else settings.activations
    tokens = settings.batch * settings.seq // (ranks.count * settings.accumulate)
    if tokens * task.layers * task.hidden * _BLOCK_BYTES <= _PART * _free(ranks.device):
        return None
    return PRESETS.get(settings.preset, {}).get("params")  # an unknown preset is zinf.Config's to refuse


def _free(device: torch.device) -> int:
    return available_memory() if device.type == "cpu" else torch.accelerator.get_memory_info(device)[0]
