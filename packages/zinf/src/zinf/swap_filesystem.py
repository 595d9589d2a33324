"""What filesystem swap space would lie on, and a word of warning where it is no drive of this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from zero3.first_rank_log import first_rank_logger

log = first_rank_logger(__name__)

_WARNINGS = {
    "memory": "it takes memory, not room on a drive",
    "overlay": "every transfer goes through a container's layers; mount a drive into the container",
    "network": "it is as fast as the network, and shared with others",
}
_KINDS = {
    **dict.fromkeys(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"), "memory"),
    **dict.fromkeys(("overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs"), "overlay"),
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs",
         "lustre", "gpfs", "beegfs", "afs", "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse"),
        "network",
    ),
}  # fmt: skip


def warn_unless_drives(dirs: Sequence[str]) -> None:
    """Log a warning for each directory on a filesystem that is memory, a container's layers, or a network."""
    for path in dirs:
        kind = filesystem_of(path)
        if kind in _KINDS:
            log.warning("nvme directory %s lies on %s: %s", path, kind, _WARNINGS[_KINDS[kind]])


def filesystem_of(path: str, mountinfo: str = "/proc/self/mountinfo") -> str | None:
    """The type of the filesystem that `path` lies on, as the kernel names it; None where it cannot be found out."""
    real = os.path.realpath(path)
    found, longest = None, -1
    try:
        with open(mountinfo) as file:
            for line in file:
                before, _, after = line.partition(" - ")
                point = before.split()[4].encode().decode("unicode_escape")  # a space in a name stands as \\040
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= longest:  # of several on one point the last one is seen
                    found, longest = after.split()[0], len(point)
    except (OSError, IndexError):
        return None
    return found
