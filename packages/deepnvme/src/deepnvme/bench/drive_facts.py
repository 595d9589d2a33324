"""What can be learned about a directory's drive without measuring: filesystem, device, limits, wear."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import struct
from pathlib import Path
from typing import Any

from .. import _core
from ..drive_profile import drive_key, load_profile
from ..engine import DEFAULT_BOUNCE_BUFFERS, backends
from ..file import File

_NVME_ADMIN = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD
_DATA_UNIT = 512_000  # bytes, as the NVMe specification counts written data


def facts(directory: str) -> dict[str, Any]:
    """Everything that `deepnvme-bench info` prints."""
    device = os.stat(directory).st_dev
    filesystem = _filesystem(directory)
    free = os.statvfs(directory)
    file = _file_facts(directory)
    return {
        "directory": os.path.abspath(directory),
        "filesystem": filesystem,
        "free_bytes": free.f_bavail * free.f_frsize,
        "drive": {"key": drive_key(device), **_block_device(device)},
        "direct": file,
        "backends": backends(),
        "limits": _limits(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "bounce_buffers": _core.bounce_pages(DEFAULT_BOUNCE_BUFFERS << 20),
        "checksum_kernels": _core.crc32c_kernels(),
        "profile": vars(profile) if (profile := load_profile(device)) else None,
        "endurance": endurance(device),
    }


def endurance(device: int) -> dict[str, Any]:
    """How worn the drive is, by its own account: {"percentage_used", "written_bytes"}, or {"why_not"}."""
    disk = _disk(device)
    if disk is None or not disk.name.startswith("nvme"):
        return {"why_not": "only NVMe drives are asked, and this is none that the system shows"}
    try:
        log = _smart_log(f"/dev/{disk.name}")
    except OSError as e:
        return {"why_not": f"the drive's health log cannot be read: {e.strerror} (root can)"}
    return {"percentage_used": log[5], "written_bytes": int.from_bytes(log[48:64], "little") * _DATA_UNIT}


def _smart_log(path: str) -> bytes:
    """NVMe "get log page", SMART / health information, 512 bytes."""
    log = ctypes.create_string_buffer(512)
    get_log_page, health, dwords = 0x02, 0x02, 512 // 4 - 1
    # struct nvme_admin_cmd: opcode, flags, reserved, nsid, cdw2, cdw3, metadata, addr, metadata_len, data_len,
    # cdw10 .. cdw15, timeout_ms, result
    command = struct.pack(
        "=BBHIIIQQIIIIIIIIII",
        *(get_log_page, 0, 0, 0xFFFFFFFF, 0, 0, 0, ctypes.addressof(log), 0, 512),
        *(health | dwords << 16, 0, 0, 0, 0, 0, 0, 0),
    )
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _NVME_ADMIN, command)
    finally:
        os.close(fd)
    return log.raw


def _file_facts(directory: str) -> dict[str, Any]:
    try:
        file = File.anonymous(directory, direct=True)
    except OSError as e:
        return {"possible": False, "why_not": e.strerror}
    with file:
        found = _core.direct_alignment(file._open_core().filenos()[0])
    memory, offset = found or (None, None)
    return {"possible": True, "memory_alignment": memory, "offset_alignment": offset}


def _filesystem(directory: str) -> dict[str, str]:
    """Type, mount point and options: the longest mount point that the directory lies under."""
    target = os.path.realpath(directory)
    best = {"type": "unknown", "mount": "", "options": ""}
    for line in _read("/proc/self/mounts").splitlines():
        _, mount, kind, options, *_ = line.split()
        mount = mount.replace("\\040", " ")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best["mount"]):
            best = {"type": kind, "mount": mount, "options": options}
    return best


def _disk(device: int) -> Path | None:
    node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if not node.exists():
        return None
    disk = node.resolve()
    return disk.parent if (disk / "partition").exists() else disk


def _block_device(device: int) -> dict[str, Any]:
    disk = _disk(device)
    if disk is None:
        return {"name": None}
    queue = {
        name: _read(str(disk / "queue" / name))
        for name in ("logical_block_size", "max_sectors_kb", "max_segments", "nr_requests", "scheduler", "rotational")
    }
    return {"name": disk.name, "model": _read(str(disk / "device/model")), "queue": queue}


def _limits() -> dict[str, Any]:
    def limit(which: int) -> str:
        soft = resource.getrlimit(which)[0]
        return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)

    return {
        "locked memory (ulimit -l), bytes": limit(resource.RLIMIT_MEMLOCK),
        "open files (ulimit -n)": limit(resource.RLIMIT_NOFILE),
        "file size (ulimit -f), bytes": limit(resource.RLIMIT_FSIZE),
        "fs.aio-max-nr": _read("/proc/sys/fs/aio-max-nr"),
        "kernel.io_uring_disabled": _read("/proc/sys/kernel/io_uring_disabled") or "not there",
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
