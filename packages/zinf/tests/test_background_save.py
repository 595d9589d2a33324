"""save(background=True): what is saved is the moment of the call, whatever training does meanwhile."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
import torch
from zinf_testing import SETTINGS, assert_same, config, full_states, make, offloaded, state_of, train

import zero3
import zinf
from zinf import background_save
from zinf.checkpoint_files import checkpoints, verify
from zinf.checkpoint_writer import CheckpointWriter
from zinf.config import OVERLAPS
from zinf.shard_copy import ShardCopy

PLACES = [("nvme", "nvme"), ("cpu", "cpu"), ("device", "device"), ("device", "nvme"), ("nvme", "cpu")]


@pytest.fixture
def held(monkeypatch):
    """The thread copies nothing of its own accord: a unit comes only when it is asked for, or when this is set."""
    let_go = threading.Event()
    copy = CheckpointWriter.copy

    def only_asked_for(self):
        order = self._left
        while not let_go.is_set():
            if self._left is not order and self._left:
                order = self._left
                unit = next(iter(order))
                yield unit, self._later[unit]
            let_go.wait(0.001)
        yield from ((unit, self._later[unit]) for unit in list(self._left))

    def one_by_one(self, wanted, arrived):
        for item in wanted:
            copy(self, [item], arrived)

    monkeypatch.setattr(background_save.BackgroundSave, "_in_order", only_asked_for)
    monkeypatch.setattr(CheckpointWriter, "copy", one_by_one)
    yield let_go
    let_go.set()


def loaded(cfg, path):
    model, optimizer = offloaded(cfg, seed=7)
    zinf.load(path, model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("params", "optimizer"), PLACES)
def test_what_is_saved_is_the_moment_of_the_call(nvme, tmp_path, params, optimizer, overlap):
    cfg = config(nvme, params, "cpu", optimizer, dtype=torch.bfloat16, overlap_optimizer=overlap)
    model, adamw = offloaded(cfg)
    train(model, adamw, 3)
    wanted = full_states(model)
    result = zinf.save(tmp_path / "run", model, adamw, extra={"step": 3}, background=True)
    assert result.method == "background copy"
    losses = train(model, adamw, range(3, 7))
    again, its_optimizer = offloaded(cfg)
    assert train(again, its_optimizer, 7)[3:] == losses  # the save changed nothing
    zinf.save(tmp_path / "run", model, adamw)  # waits
    assert verify(result.path) == []
    other, its_optimizer = loaded(cfg, result.path)
    assert_same(full_states(other), wanted)
    assert train(other, its_optimizer, range(3, 7)) == losses


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("small", [False, True], ids=["", "in pieces"])
def test_no_update_overtakes_the_copy_of_its_unit(nvme, tmp_path, held, overlap, small, request):
    """Each unit is copied at the last moment, just ahead of its change: the slowest thread that there can be."""
    if small:
        request.getfixturevalue("small_pieces")
    cfg = config(nvme, dtype=torch.bfloat16, overlap_optimizer=overlap)
    model, optimizer = offloaded(cfg)
    train(model, optimizer, 2)
    wanted = full_states(model)
    path = zinf.save(tmp_path / "run", model, optimizer, background=True).path
    assert not os.path.exists(path)
    train(model, optimizer, range(2, 4))
    assert not os.path.exists(path)  # forward and backward have not let it go on
    held.set()
    zinf.save(tmp_path / "run", model, optimizer)
    other, _ = loaded(cfg, path)
    assert_same(full_states(other), wanted)


@pytest.mark.parametrize(("params", "optimizer"), PLACES)
def test_other_changes_do_not_tear_it_either(nvme, tmp_path, held, params, optimizer):
    """Values set by hand, in every way that there is; a state that is loaded; a learning rate; a buffer."""
    cfg = config(nvme, params, "cpu", optimizer, dtype=torch.bfloat16)
    model, adamw = offloaded(cfg)
    train(model, adamw, 2)
    wanted, buffers = full_states(model), {name: b.clone() for name, b in model.named_buffers()}
    extra = {"list": [1, 2], "tensor": torch.ones(3)}
    path = zinf.save(tmp_path / "run", model, adamw, extra=extra, background=True).path
    with torch.no_grad():
        model.norm.weight.mul_(2)
        model.blocks[0].up.weight.data.fill_(3)
    with zero3.gathered(model.blocks[1], modify=True), torch.no_grad():
        model.blocks[1].down.bias.add_(1)
    zinf.set_full_state(model.blocks[2].up.bias, exp_avg=torch.ones(32), step=9)
    model.seen += 5
    extra["list"].append(3)
    extra["tensor"].zero_()
    adamw.param_groups[0]["lr"] = 7.0
    torch.manual_seed(77)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    held.set()
    zinf.save(tmp_path / "other", model, adamw)
    other, its_optimizer = offloaded(cfg, seed=7)
    found = zinf.load(path, other, its_optimizer)
    assert_same(full_states(other), wanted)
    assert_same(dict(other.named_buffers()), buffers)
    assert found["list"] == [1, 2]
    assert torch.equal(found["tensor"], torch.ones(3))
    assert its_optimizer.param_groups[0]["lr"] == SETTINGS["lr"]


def test_the_next_save_and_load_wait_and_keep_counts(nvme, tmp_path):
    model, optimizer = offloaded(config(nvme))
    for step in range(4):
        train(model, optimizer, [step])
        zinf.save(tmp_path / "run", model, optimizer, extra=step, keep=2, background=True)
    assert zinf.load(tmp_path / "run", model, optimizer) == 3
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-000003", "checkpoint-000004"]


def fail_in_background(rank, world, nvme, folder):
    """Rank `world - 1` meets a full drive: all hear of it at the next save, training goes on, nothing is left."""
    model, optimizer = offloaded(config(nvme))
    first = zinf.save(folder, model, optimizer).path
    whole = ShardCopy._start_write
    if rank == world - 1:

        def full(*_):
            raise OSError(28, "No space left on device", "rank.bin")

        ShardCopy._start_write = full
    zinf.save(folder, model, optimizer, background=True)
    train(model, optimizer, 2, rank, world)
    with pytest.raises((OSError, zinf.CheckpointError), match="No space left"):
        zinf.save(folder, model, optimizer)
    ShardCopy._start_write = whole
    names = [os.path.basename(path) for path in checkpoints(folder)]
    second = zinf.save(folder, model, optimizer).path
    assert [os.path.basename(first)] == names
    return zinf.load(second, model, optimizer)


@pytest.mark.parametrize("world", [1, 2])
def test_a_failure_is_raised_by_the_next_call(ranks, nvme, tmp_path, world, caplog):
    assert ranks(fail_in_background, world, str(nvme), str(tmp_path / "run")) == [None] * world
    if world == 1:
        assert "No space left" in caplog.text  # logged when it happened


def save_on_ranks(rank, world, nvme, folder):
    model, optimizer = offloaded(config(nvme, dtype=torch.bfloat16), width=18, vocabulary=41)
    train(model, optimizer, 2, rank, world)
    states = full_states(model)
    path = zinf.save(folder, model, optimizer, background=True).path
    train(model, optimizer, range(2, 4), rank, world)
    zinf.load(path, model, optimizer)
    return states, full_states(model)


def test_two_ranks(ranks, nvme, tmp_path):
    for wanted, found in ranks(save_on_ranks, 2, str(nvme), str(tmp_path / "run")):
        assert_same(found, wanted)


ENDING = """
import sys, zinf
from zinf_testing import config, offloaded, train
model, optimizer = offloaded(config(sys.argv[1]))
train(model, optimizer, 2)
zinf.save(sys.argv[2], model, optimizer, background=True)
train(model, optimizer, range(2, 3))
del model, optimizer
"""


def test_the_process_ends_when_it_is_complete(nvme, tmp_path, run_python):
    run_python(ENDING, nvme, tmp_path / "run")
    (path,) = checkpoints(tmp_path / "run")
    assert verify(path) == []
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, 2)
    wanted = full_states(model)
    assert_same(full_states(loaded(config(nvme), path)[0]), wanted)


KILLED = """
import os, sys, threading, zinf
from zinf import shard_copy
from zinf_testing import config, offloaded, train
nvme, folder, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, optimizer = offloaded(config(nvme))
train(model, optimizer, 1)
zinf.save(folder, model, optimizer)
write = shard_copy.ShardCopy._start_write
def dying(*args):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)
    write(*args)
shard_copy.ShardCopy._start_write = dying
train(model, optimizer, [1])
zinf.save(folder, model, optimizer, background=True)
train(model, optimizer, range(2, 40))
"""


@pytest.mark.parametrize("left", [1, 9])
def test_killed_meanwhile_the_last_complete_one_stands(nvme, tmp_path, run_python, left):
    run_python(KILLED, nvme, tmp_path / "run", left, fails=True)
    (path,) = checkpoints(tmp_path / "run")
    assert verify(path) == []
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, 1)
    assert_same(full_states(loaded(config(nvme), path)[0]), full_states(model))
    zinf.save(tmp_path / "run", model, optimizer)
    assert len(os.listdir(tmp_path / "run")) == 2  # what the killed run left is gone


def test_a_frozen_model_without_an_optimizer(nvme, tmp_path):
    model = zinf.shard(make().requires_grad_(False), config(nvme))
    wanted = state_of(model)
    path = zinf.save(tmp_path / "run", model, None, background=True).path
    model.load_state_dict({name: tensor + 1 for name, tensor in wanted.items()})
    zinf.load(path, model, None)
    assert_same(state_of(model), wanted)


def test_a_model_that_is_dropped_is_saved_all_the_same(nvme, tmp_path, held):
    model, optimizer = offloaded(config(nvme))
    wanted = full_states(model)
    path = zinf.save(tmp_path / "run", model, optimizer, background=True).path
    saving = model._zero3_model.store.saving
    del model, optimizer
    held.set()
    saving._thread.join()
    shutil.rmtree(nvme)
    nvme.mkdir()
    assert_same(full_states(loaded(config(nvme), path)[0]), wanted)


def test_a_forked_child_does_not_wait_for_it_nor_disturb_it(nvme, run_python):
    """The thread is not in the child: at its end, where the model goes, the child waited for ever."""
    script = """
    import os, sys, threading
    import zinf
    from zinf.background_save import BackgroundSave
    from zinf.checkpoint_files import verify
    from zinf_testing import config, offloaded, train

    go_on, copy = threading.Event(), BackgroundSave._copy_and_publish
    BackgroundSave._copy_and_publish = lambda self: (go_on.wait(), copy(self))
    model, optimizer = offloaded(config(sys.argv[1]))
    train(model, optimizer, 2)
    path = zinf.save("run", model, optimizer, background=True).path
    if (child := os.fork()) == 0:
        try:
            zinf.save("run", model, optimizer)
        except zinf.CheckpointError as error:
            print("child:", error)
        sys.exit()
    print("status", os.waitpid(child, 0)[1])
    go_on.set()
    zinf.save("run", model, optimizer)
    print("damaged", verify(path))
    """
    found = run_python(script, nvme, timeout=30)
    assert "child: run/checkpoint-000001 is being saved by process" in found
    assert found.endswith("status 0\ndamaged []\n")
