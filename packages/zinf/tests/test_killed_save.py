"""A run that is killed at any moment of its saves goes on bit for bit from a complete checkpoint."""

from __future__ import annotations

import pytest
import torch
from zinf_testing import config, offloaded, train

KILLED = """
import os, random, sys
import torch, zinf
from zinf import checkpoint_files, checkpoint_writer, shard_copy
from zinf_testing import config, offloaded, train

nvme, folder, lives = sys.argv[1], sys.argv[2], int(sys.argv[3])

def live(seed):
    model, optimizer = offloaded(config(nvme, dtype=torch.bfloat16))
    done = zinf.load(folder, model, optimizer)["done"] if checkpoint_files.checkpoints(folder) else 0
    chance = random.Random(seed)
    left = chance.randrange(1, 150)  # calls until the end

    def dying(function):
        def call(*args, **kwargs):
            nonlocal left
            left -= 1
            last = left == 0  # of itself: it may call others that count
            if last and chance.random() < 0.5:
                os.kill(os.getpid(), 9)
            try:
                return function(*args, **kwargs)
            finally:  # a file is looked for before it is made, and that fails
                if last:
                    os.kill(os.getpid(), 9)
        return call

    os.rename, os.fsync, os.open = map(dying, (os.rename, os.fsync, os.open))
    shard_copy.ShardCopy._start_write = dying(shard_copy.ShardCopy._start_write)
    checkpoint_writer.shutil.rmtree = dying(checkpoint_writer.shutil.rmtree)
    while done < 4 * lives:
        print("loss", done, *(loss.hex() for loss in train(model, optimizer, [done])), flush=True)
        done += 1
        zinf.save(folder, model, optimizer, extra={"done": done}, keep=2)

for seed in range(lives):
    child = os.fork()  # before this process has used a thread: a life costs no start of an interpreter
    if child == 0:
        try:
            live(seed)
            print("whole", flush=True)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    faults = [fault for path in checkpoint_files.checkpoints(folder) for fault in checkpoint_files.verify(path)]
    print("life", os.WTERMSIG(status), len(os.listdir(nvme)), len(faults), flush=True)
"""


def killed(lives, nvme, tmp_path, run_python):
    """Lives that each end by SIGKILL within a save or come through: the losses go on bit for bit from life to life."""
    wanted = [loss.hex() for loss in train(*offloaded(config(nvme, dtype=torch.bfloat16)), 4 * lives)]
    lines = run_python(KILLED, nvme, tmp_path / "run", lives, timeout=20 + 10 * lives).splitlines()
    words = [line.split() for line in lines]
    assert sum(word[:2] == ["life", "9"] for word in words) >= lives // 2
    assert all(word[2:] == ["0", "0"] for word in words if word[0] == "life")  # nothing in the directory, no damage
    losses = [(int(word[1]), word[2]) for word in words if word[0] == "loss"]
    assert len(losses) > lives  # most came further than their first step
    assert all(loss == wanted[step] for step, loss in losses)
    assert max(step for step, _ in losses) > 2  # lives build upon one another


def test_killed_at_any_moment_of_a_save(nvme, tmp_path, run_python):
    killed(4, nvme, tmp_path, run_python)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_fifty_moments(nvme, tmp_path, run_python):
    killed(50, nvme, tmp_path, run_python)
