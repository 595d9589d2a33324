"""Killed or interrupted at any moment: nothing is left on the drive, and a saved run goes on bit for bit."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from zinf_testing import HERE, config, offloaded, train

import zinf

ENDLESS = """
import itertools, sys
sys.path.insert(0, sys.argv[2])
import torch
from zinf_testing import config, offloaded, train
torch.set_num_threads(1)
model, optimizer = offloaded(config(sys.argv[1], grads="nvme", overlap_optimizer=eval(sys.argv[3])))
for step in itertools.count():
    train(model, optimizer, [step])
    print(step, flush=True)
"""


@pytest.mark.parametrize("overlap", ["next-forward", "backward"])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_on_the_drive(nvme, blow, overlap):
    command = [sys.executable, "-c", ENDLESS, str(nvme), str(HERE), repr(overlap)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as training:
        for line in training.stdout:
            if int(line) >= 2:
                break
        time.sleep(0.05)  # somewhere within a step
        training.send_signal(blow)
        training.communicate(timeout=60)
    assert training.returncode != 0
    assert list(nvme.iterdir()) == []


TO_FIVE = """
import sys, torch, zinf
from zinf_testing import config, offloaded, train
model, optimizer = offloaded(config(sys.argv[1], dtype=torch.bfloat16))
train(model, optimizer, 5)
zinf.save(sys.argv[2], model, optimizer)
"""


def test_a_fresh_process_goes_on_when_the_swap_is_gone(nvme, tmp_path, run_python):
    wanted = train(*offloaded(config(nvme, dtype=torch.bfloat16)), 10)[5:]
    run_python(TO_FIVE, nvme, tmp_path / "run")
    shutil.rmtree(nvme)
    nvme.mkdir()
    model, optimizer = offloaded(config(nvme, dtype=torch.bfloat16), seed=8)
    zinf.load(tmp_path / "run", model, optimizer)
    assert train(model, optimizer, range(5, 10)) == wanted


def two_ranks(rank, world, nvme, folder, steps):
    model, optimizer = offloaded(config(nvme, dtype=torch.bfloat16))
    if steps[0]:
        zinf.load(folder, model, optimizer)
    losses = train(model, optimizer, range(*steps), rank, world)
    if steps[1] == 5:
        zinf.save(folder, model, optimizer)
        losses += train(model, optimizer, range(5, 10), rank, world)
    return losses


def test_two_ranks_resume_bit_for_bit(ranks, nvme, tmp_path):
    wanted = ranks(two_ranks, 2, str(nvme), str(tmp_path / "run"), (0, 5))
    found = ranks(two_ranks, 2, str(nvme), str(tmp_path / "run"), (5, 10))
    assert found == [losses[5:] for losses in wanted]


class Broken(Exception):
    pass


def break_in_backward(model):
    """A user's hook raises within the backward of the first block."""

    def hook(grad):
        raise Broken

    x = model.embedding(model.data(0))
    x = model.blocks[1](model.blocks[0](x).clone())
    x.register_hook(lambda grad: None)
    model.blocks[0].down.register_full_backward_hook(lambda *_: (_ for _ in ()).throw(Broken()))
    with pytest.raises(Broken):
        model.loss(model.data(0)).backward()
    model.blocks[0].down._backward_hooks.clear()


def test_a_broken_backward_in_mode_backward_names_the_checkpoint(nvme, tmp_path):
    """The model is half a step ahead: the next forward, step and save say so; loading the checkpoint mends it."""
    wanted = train(*offloaded(config(nvme)), 5)
    model, optimizer = offloaded(config(nvme, overlap_optimizer="backward"))
    train(model, optimizer, 3)
    path = zinf.save(tmp_path / "run", model, optimizer).path
    break_in_backward(model)
    for use in (
        lambda: model(model.data(0)),
        optimizer.step,
        lambda: zinf.save(tmp_path / "run", model, optimizer),
        lambda: zinf.full_state(model.head.weight),
    ):
        with pytest.raises(zinf.AbortedStepError, match=path):
            use()
    zinf.load(path, model, optimizer)
    assert train(model, optimizer, range(3, 5)) == wanted[3:]


@pytest.mark.parametrize("overlap", ["next-forward", False])
def test_a_broken_backward_costs_its_step_only(nvme, overlap):
    """The gradients of the broken backward count for nothing once they are dropped; the loop goes on."""
    wanted = train(*offloaded(config(nvme)), 5)
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    losses = train(model, optimizer, 3)
    break_in_backward(model)
    optimizer.zero_grad()
    assert losses + train(model, optimizer, range(3, 5)) == wanted


@pytest.mark.parametrize("overlap", ["next-forward", "backward", False])
def test_a_broken_forward_costs_nothing(nvme, overlap):
    wanted = train(*offloaded(config(nvme)), 5)
    model, optimizer = offloaded(config(nvme, overlap_optimizer=overlap))
    losses = train(model, optimizer, 3)
    handle = model.blocks[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(Broken()))
    with pytest.raises(Broken):
        model(model.data(0))
    handle.remove()
    assert losses + train(model, optimizer, range(3, 5)) == wanted
