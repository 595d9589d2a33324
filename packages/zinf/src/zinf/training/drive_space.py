"""Whether the drives have room for a model's states and checkpoints, asked before a byte of them is made."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from zinf.config import PRESETS
from zinf.training.settings import DTYPES, TrainSettings
from zinf.unit_states import state_bytes


def check_space(settings: TrainSettings, numel: int, *, hosts: int) -> None:
    """Raises OSError (ENOSPC) unless states and checkpoints of `numel` parameters fit on the drives.

    Each of `hosts` machines keeps its share of the states, spread evenly over its directories. A checkpoint is written
    before the oldest of the `keep` is removed.
    """
    nbytes = state_bytes(DTYPES[settings.dtype])
    tiers = PRESETS.get(settings.preset, {})  # an unknown preset is zinf.Config's to refuse
    swapped = sum(nbytes[kind] for kind in nbytes if tiers.get(kind) == "nvme") * numel
    checkpoints = min(settings.keep + 1, -(-settings.steps // (settings.save_every or settings.steps)))
    saved = (nbytes["params"] + nbytes["optimizer"]) * numel * checkpoints
    needs: Counter[Path] = Counter()
    for directory in settings.swap_directories:
        needs[_existing(directory)] += swapped // hosts // len(settings.swap_directories)
    needs[_existing(settings.out)] += saved
    for directories in _by_filesystem(needs):
        needed, free = sum(needs[directory] for directory in directories), shutil.disk_usage(directories[0]).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"too little space: states and checkpoints of {numel:,} parameters take {needed:,} bytes, "
                f"{free:,} are free; lower --keep, or take a smaller model or another drive",
                str(directories[0]),
            )


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there already."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _by_filesystem(directories: Iterable[Path]) -> list[list[Path]]:
    """The directories, those that share their free space together."""
    grouped: dict[int, list[Path]] = {}
    for directory in directories:
        grouped.setdefault(os.stat(directory).st_dev, []).append(directory)
    return list(grouped.values())
