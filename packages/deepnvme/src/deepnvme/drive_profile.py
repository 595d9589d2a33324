"""Tuned settings of a drive: find, load, save.

`deepnvme-bench tune` measures them once; an Engine takes them from then on for files of that drive.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DriveProfile:
    """What suits one drive. None: the Engine's own default."""

    drive: str  # see drive_key
    queue_depth: int | None = None
    block_size: int | None = None  # bytes
    threads: int | None = None
    bounce_buffers: int | None = None
    measured: dict[str, Any] = field(default_factory=dict)  # what the tuning saw, for people


def drive_key(device: int) -> str:
    """A name of the drive with this st_dev that stays the same over reboots where the drive tells its identity.

    A filesystem that lies on no drive of its own (overlay, tmpfs, network) is named by its device number.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    node = Path("/sys/dev/block", number)
    if not node.exists():
        return f"device-{number.replace(':', '-')}"
    disk = node.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    for attribute in ("wwid", "device/wwid", "device/serial", "serial"):
        try:
            identity = (disk / attribute).read_text().strip()
        except OSError:
            continue
        if identity:
            return _as_file_name(identity)
    return _as_file_name(disk.name)


def profile_directory() -> Path:
    """$DEEPNVME_PROFILES, else deepnvme/drives in the user's configuration."""
    if chosen := os.environ.get("DEEPNVME_PROFILES"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser(), "deepnvme", "drives")


def load_profile(device: int) -> DriveProfile | None:
    """The profile of the drive with this st_dev, if one was saved and can be read."""
    try:
        directory = profile_directory()
        if not directory.is_dir():
            return None
        found = json.loads((directory / f"{drive_key(device)}.json").read_text())
        return DriveProfile(**found)
    except (OSError, ValueError, TypeError, RuntimeError):
        # Tuning is an improvement, never a condition: a broken profile is as good as none.
        return None


def save_profile(profile: DriveProfile) -> Path:
    """Writes the profile and returns where."""
    directory = profile_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{profile.drive}.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(profile), indent=2) + "\n")
    beside.replace(path)  # an Engine that starts meanwhile reads the old one or the new one
    return path


def _as_file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "drive"
