"""Drives that are full, missing, forbidden or fail: one clear error before training, or at the call that waits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from zinf_testing import HERE, config, make, offloaded, train

import zinf


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(zinf.ConfigError, match="does not exist"):
        zinf.shard(make(), config(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(zinf.ConfigError, match="file"):
        zinf.shard(make(), config(tmp_path / "file"))


@pytest.mark.parametrize("build", ["shard", "init"])
def test_too_little_space_is_known_before_a_byte_is_moved(nvme, build, monkeypatch):
    monkeypatch.setattr("zinf.partitioning.free_space", lambda dirs: 10_000)

    def under_init():
        with zinf.init(config(nvme)):
            model = make()
        return model

    built = under_init if build == "init" else lambda: zinf.shard(make(), config(nvme))
    with pytest.raises(zinf.ConfigError, match=r"needs .* but .* free"):
        built()
    assert os.listdir(nvme) == []


FULL = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
import torch, zinf
from torch import nn
folder = sys.argv[2]
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sys.argv[5]}M", "none", folder], check=True)
from zinf_testing import config
kind = sys.argv[3]
build = lambda: nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(4)])
cfg = config(folder, dtype=torch.bfloat16, unit_size="2MiB", grads=sys.argv[4])
try:
    if kind == "shard":
        model = zinf.shard(build(), cfg)
    else:
        with zinf.init(cfg):
            model = build()
    zinf.AdamW(model.parameters())
except zinf.ConfigError as error:
    print("ConfigError:", error)
    print("left:", os.listdir(folder), os.statvfs(folder).f_bavail == os.statvfs(folder).f_blocks)
else:
    print("no error")
"""


def as_root_of_own_mounts(script, *arguments):
    """Run `script` where it may mount; skips where user namespaces are forbidden."""
    allowed = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip("unshare -Urm is forbidden here")
    command = ["unshare", "-Urm", sys.executable, "-c", textwrap.dedent(script), str(HERE), *map(str, arguments)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("build", ["shard", "init"])
@pytest.mark.parametrize(("grads", "megabytes"), [("cpu", 2), ("cpu", 24), ("nvme", 52)])
def test_a_full_filesystem(tmp_path, build, grads, megabytes):
    """A model of 4 million parameters wants 48 MB, 56 with gradients: where there is less, it never comes to a step."""
    text = as_root_of_own_mounts(FULL, tmp_path, build, grads, megabytes)
    assert text.startswith("ConfigError: "), text
    assert str(tmp_path) in text
    assert "left: [] True" in text


NOT_ENOUGH_FOR_A_CHECKPOINT = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
import torch, zinf
from zinf_testing import config, offloaded, train
torch.set_num_threads(1)
folder = sys.argv[2]
os.makedirs(folder + "/run")
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", folder + "/run"], check=True)
model, optimizer = offloaded(config(folder + "/nvme", dtype=torch.bfloat16))
train(model, optimizer, 2)
names = []
for _ in range(6):
    try:
        zinf.save(folder + "/run", model, optimizer)
        names.append("saved")
    except OSError as error:
        names.append(f"errno {error.errno}")
print(*names)
print(*[name for name in os.listdir(folder + "/run") if name.startswith(".")])
print(*train(model, optimizer, range(2, 5)))
"""


def crowded(rank, world, nvme, free):
    zinf.partitioning.free_space = lambda dirs: free
    try:
        zinf.shard(make(), config(nvme))
    finally:
        zinf.partitioning.free_space = zinf.tier_set.free_space


def test_ranks_on_one_drive_need_its_space_together(ranks, nvme):
    """Each of two ranks has half of the states; together they need all."""
    numel = sum(param.numel() for param in make().parameters())
    ranks(crowded, 2, str(nvme), numel * 12)
    with pytest.raises(AssertionError, match="ConfigError"):
        ranks(crowded, 2, str(nvme), numel * 12 - 4096)


def test_two_directories_on_one_filesystem_have_its_space_once(tmp_path):
    from zinf.tier_set import free_space

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    both = free_space([str(tmp_path / "one"), str(tmp_path / "two")])
    assert both == pytest.approx(free_space([str(tmp_path)]), rel=0.01)


def test_a_checkpoint_that_does_not_fit_leaves_what_was_there(tmp_path, nvme):
    lines = as_root_of_own_mounts(NOT_ENOUGH_FOR_A_CHECKPOINT, tmp_path).splitlines()
    assert lines[0].startswith("saved")
    assert lines[0].endswith("errno 28")
    assert lines[1] == ""
    wanted = train(*offloaded(config(nvme, dtype=torch.bfloat16)), 5)
    assert [float(loss) for loss in lines[2].split()] == wanted[2:]


UNWRITABLE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import zinf
from zinf_testing import config, make
os.setgid(65534); os.setuid(65534)
try:
    zinf.shard(make(), config(sys.argv[2]))
except zinf.ConfigError as error:
    print(error)
"""


@pytest.mark.root
def test_a_directory_that_cannot_be_written(nvme):
    for folder in (nvme, *nvme.parents):
        if folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o005)
    command = [sys.executable, "-c", UNWRITABLE, str(HERE), str(nvme)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot be written" in done.stdout


@pytest.mark.root
def test_a_small_filesystem_of_its_own(tmp_path):
    """ext4 on a loop device, with O_DIRECT: too small is a ConfigError, large enough trains."""
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    mounted.mkdir()
    with open(image, "wb") as file:
        file.truncate(40 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
    try:
        large = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(4)])
        with pytest.raises(zinf.ConfigError, match="needs"):
            zinf.shard(large, config(mounted, dtype=torch.bfloat16))
        assert train(*offloaded(config(mounted)), 3) == train(*offloaded(config(tmp_path)), 3)
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


@pytest.mark.parametrize("overlap", ["next-forward", "backward", False])
def test_bytes_that_changed_on_the_drive_are_noticed(nvme, overlap):
    """Written past us into the swap: the read that meets them raises, naming the tensor."""
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    train(model, optimizer, 2)
    optimizer.settle()
    swap = model._zero3_model.store.tiers.nvme._swap
    with open(swap.path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        for offset in range(0, size, 4096):
            file.seek(offset)
            file.write(b"\xff\x00")
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with pytest.raises(OSError, match=r"param|exp_avg"):
        train(model, optimizer, 1)
