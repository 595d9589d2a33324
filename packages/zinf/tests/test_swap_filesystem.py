"""What the kernel says of a directory, and the warning where it is no drive."""

from __future__ import annotations

import logging
import os
import subprocess

import pytest
from zinf_testing import config, offloaded

from zinf import swap_filesystem

MOUNTS = """\
22 1 0:20 / / rw - overlay overlay rw
23 22 8:1 / /data rw shared:1 - ext4 /dev/sda1 rw
24 23 0:30 / /data/my\\040share rw - nfs4 server:/x rw
25 22 0:31 / /mnt rw - ext4 /dev/sdb rw
26 22 0:32 / /mnt rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "overlay"),
        ("/data", "ext4"),
        ("/data/a/b", "ext4"),
        ("/database", "overlay"),
        ("/data/my share/x", "nfs4"),
        ("/mnt/x", "tmpfs"),
    ],
)
def test_the_innermost_mount_counts(tmp_path, path, kind):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert swap_filesystem.filesystem_of(path, str(tmp_path / "mountinfo")) == kind


def test_the_kernels_own_tool_agrees(tmp_path):
    for path in (str(tmp_path), "/dev/shm", "/proc"):
        if os.path.isdir(path):
            found = subprocess.run(["findmnt", "-n", "-o", "FSTYPE", "-T", path], capture_output=True, text=True)
            if found.returncode == 0:
                assert swap_filesystem.filesystem_of(path) == found.stdout.split()[-1]


@pytest.mark.parametrize(
    ("kind", "words"), [("tmpfs", "takes memory"), ("overlay", "layers"), ("nfs4", "network"), ("ext4", None)]
)
def test_a_model_on_no_drive_is_warned_of_once(nvme, monkeypatch, caplog, kind, words):
    monkeypatch.setattr(swap_filesystem, "filesystem_of", lambda _: kind)
    with caplog.at_level(logging.WARNING):
        offloaded(config(nvme))
    warnings = [record.getMessage() for record in caplog.records if "lies on" in record.getMessage()]
    assert len(warnings) == (words is not None)
    assert all(words in text and str(nvme) in text for text in warnings)


def test_other_ranks_are_silent_but_for_errors(monkeypatch, caplog):
    for rank, expected in (("0", ["one", "two"]), ("1", ["two"])):
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        swap_filesystem.log.warning("one")
        swap_filesystem.log.error("two")
        assert [record.getMessage() for record in caplog.records] == expected
