"""A checkpoint is complete or absent, self-contained, checked, and goes on bit for bit wherever it is loaded."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from zinf_testing import SETTINGS, ManyDtypes, assert_same, config, full_states, make, offloaded, state_of, train

import deepnvme
import zinf
from zinf import checkpoint_format
from zinf.checkpoint_files import checkpoints, verify
from zinf.config import OVERLAPS
from zinf.read_ahead import ReadAhead
from zinf.shard_copy import ShardCopy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def saved(nvme, folder, steps=3, **changes):
    """(model, optimizer) after some steps, and its checkpoint's folder."""
    model, optimizer = offloaded(config(nvme, **changes))
    train(model, optimizer, steps)
    return model, optimizer, zinf.save(folder, model, optimizer).path


# -- resuming -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_resumed_run_goes_on_bit_for_bit(nvme, tmp_path, overlap, dtype):
    cfg = config(nvme, grads="nvme", overlap_optimizer=overlap, dtype=dtype)
    model, optimizer = offloaded(cfg)
    wanted = train(model, optimizer, 8)
    interrupted, its_optimizer = offloaded(cfg)
    train(interrupted, its_optimizer, 4)
    zinf.save(tmp_path / "run", interrupted, its_optimizer)
    assert train(interrupted, its_optimizer, range(4, 8)) == wanted[4:]  # the save changed nothing
    resumed, its_optimizer = offloaded(cfg, seed=5)
    zinf.load(tmp_path / "run", resumed, its_optimizer)
    assert train(resumed, its_optimizer, range(4, 8)) == wanted[4:]
    assert_same(full_states(resumed), full_states(model))


@pytest.mark.parametrize("small", [False, True], ids=["", "in pieces"])
def test_another_placement_and_other_units(nvme, tmp_path, small, request):
    if small:
        request.getfixturevalue("small_pieces")
    model, optimizer, path = saved(nvme, tmp_path / "run", dtype=torch.bfloat16)
    wanted = full_states(model)
    losses = train(model, optimizer, range(3, 6))
    for place in ("device", "cpu", "nvme"):
        for unit_size in (0, "3KiB", "1GiB"):
            cfg = config(nvme, place, place, place, dtype=torch.bfloat16, unit_size=unit_size)
            other, its_optimizer = offloaded(cfg, seed=4)
            zinf.load(path, other, its_optimizer)
            assert_same(full_states(other), wanted)
            assert train(other, its_optimizer, range(3, 6)) == losses


def reshard(rank, world, folder, nvme, what, dtype):
    """Save or resume; weights and moments of every parameter are collected whole."""
    model, optimizer = offloaded(config(nvme, dtype=DTYPES[dtype]), width=18, vocabulary=41)  # sizes not divisible by 2
    if what == "save":
        train(model, optimizer, 3, rank, world)
        zinf.save(folder, model, optimizer, extra={"world": world})
    else:
        assert zinf.load(folder, model, optimizer)["world"] != world
    return full_states(model)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_other_numbers_of_ranks(ranks, nvme, tmp_path, dtype):
    for first, second in ((2, 1), (1, 2)):
        folder = str(tmp_path / f"from-{first}-to-{second}")
        saved_states = ranks(reshard, first, folder, str(nvme), "save", dtype)
        loaded_states = ranks(reshard, second, folder, str(nvme), "load", dtype)
        for states in loaded_states:
            assert_same(states, saved_states[0])


def goes_on(rank, world, folder, nvme, steps, save):
    """The same global batch on any number of ranks; float64 sums of two halves are exact enough to compare bits of
    one step only, so the gradient is made the same by giving every rank the whole batch."""
    model, optimizer = offloaded(config(nvme))
    if steps[0]:
        zinf.load(folder, model, optimizer)
    losses = train(model, optimizer, steps)
    if save:
        zinf.save(folder, model, optimizer)
    return losses


def test_one_two_one_ranks_in_one_run(ranks, nvme, tmp_path):
    wanted = train(*offloaded(config(nvme)), 9)
    found = []
    for world, steps in ((1, (0, 1, 2)), (2, (3, 4, 5)), (1, (6, 7, 8))):
        found += ranks(goes_on, world, str(tmp_path / "run"), str(nvme), steps, True)[0]
    assert found == wanted


def test_frozen_parameters_and_buffers(nvme, tmp_path):
    def build(seed):
        model = make(seed)
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        model.seen += seed
        return zinf.shard(model, config(nvme, dtype=torch.bfloat16))

    model = build(1)
    optimizer = zinf.AdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, 2)
    path = zinf.save(tmp_path / "run", model, optimizer).path
    other = build(7)
    its_optimizer = zinf.AdamW(other.parameters(), **SETTINGS)
    zinf.load(path, other, its_optimizer)
    assert_same(state_of(other), state_of(model))
    assert_same(full_states(other), full_states(model))
    kinds = {unit.name: set(unit.kinds) for unit in _manifest(path).units}
    assert kinds["blocks.0"] == {"param", "remainder"}  # what is frozen has no moments
    assert kinds["blocks.2"] == {"param", "remainder", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("unit_size", ["3KiB", "1GiB"])
def test_what_lies_as_it_did_is_read_to_where_it_is_written_from(nvme, tmp_path, monkeypatch, unit_size):
    model, _optimizer, path = saved(nvme, tmp_path / "run", dtype=torch.bfloat16)
    gets = []
    get = ReadAhead.get
    monkeypatch.setattr(ReadAhead, "get", lambda ahead, stretch: gets.append(stretch) or get(ahead, stretch))
    other, its_optimizer = offloaded(config(nvme, dtype=torch.bfloat16, unit_size=unit_size), seed=4)
    zinf.load(path, other, its_optimizer)
    assert_same(full_states(other), full_states(model))
    assert (not gets) == (unit_size == "3KiB")  # other units: put together


def frozen_on_ranks(rank, world, nvme, folder):
    """Saved and loaded strictly, each in a model of another seed."""

    def build(seed):
        model = make(seed, width=18, vocabulary=41)
        model.blocks[:2].requires_grad_(False)
        model.seen += seed
        model = zinf.shard(model, config(nvme, dtype=torch.bfloat16))
        return model, zinf.AdamW([param for param in model.parameters() if param.requires_grad], **SETTINGS)

    model, optimizer = build(1)
    train(model, optimizer, 2, rank, world)
    zinf.save(folder, model, optimizer)
    zinf.export(model, f"{folder}/weights")
    other, its_optimizer = build(7)
    zinf.load(folder, other, its_optimizer)
    assert_same(state_of(other), state_of(model))
    assert_same(full_states(other), full_states(model))
    third, _ = build(9)
    assert zinf.load_pretrained(third, f"{folder}/weights") == ([], [])
    found, wanted = state_of(third), state_of(model)
    return [torch.equal(found[name].bfloat16(), value.bfloat16()) for name, value in wanted.items()]


def test_frozen_parameters_and_buffers_of_two_ranks(ranks, nvme, tmp_path):
    for found in ranks(frozen_on_ranks, 2, str(nvme), str(tmp_path / "run")):
        assert all(found)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_parameters_and_buffers_of_other_dtypes(nvme, tmp_path, tier):
    models = [zinf.shard(ManyDtypes(seed), config(nvme, tier, "cpu", tier)) for seed in (1, 2)]
    optimizers = [zinf.AdamW(model.linear.parameters()) for model in models]
    models[0](torch.ones(2, 8)).sum().backward()
    optimizers[0].step()
    zinf.save(tmp_path, models[0], optimizers[0])
    zinf.load(tmp_path, models[1], optimizers[1])
    assert_same(as_bytes(state_of(models[1])), as_bytes(state_of(models[0])))


def as_bytes(state):
    return {name: value.reshape(-1).view(torch.uint8) for name, value in state.items()}


def test_groups_counters_and_schedule_come_back(nvme, tmp_path):
    """Resumed in an optimizer that was built with other values."""

    def build(lr, betas, decay):
        model = zinf.shard(make(), config(nvme))
        flat = [param for param in model.parameters() if param.ndim < 2]
        matrices = [param for param in model.parameters() if param.ndim >= 2]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": flat, "lr": lr / 3, "betas": betas}]
        optimizer = zinf.AdamW(groups, lr=lr)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))

    def run(model, optimizer, scheduler, steps):
        losses = []
        for step in steps:
            losses += train(model, optimizer, [step])
            scheduler.step()
        return losses

    wanted = run(*build(1e-2, (0.8, 0.99), 0.3), range(10))
    model, optimizer, scheduler = build(1e-2, (0.8, 0.99), 0.3)
    run(model, optimizer, scheduler, range(5))
    zinf.save(tmp_path, model, optimizer, extra={"scheduler": scheduler.state_dict()})
    model, optimizer, scheduler = build(5.0, (0.1, 0.2), 0.0)
    extra = zinf.load(tmp_path, model, optimizer)
    scheduler.load_state_dict(extra["scheduler"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.1]
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.99)
    assert run(model, optimizer, scheduler, range(5, 10)) == wanted[5:]


def test_moments_of_what_is_frozen_when_it_is_loaded(nvme, tmp_path):
    """They were saved; thawed later, it goes on with them."""
    model, optimizer, folder = saved(nvme, tmp_path)
    model.blocks[0].requires_grad_(False)
    wanted = train(model, optimizer, [3])
    model.blocks[0].requires_grad_(True)
    wanted += train(model, optimizer, [4, 5])
    resumed = make(seed=7)
    resumed.blocks[0].requires_grad_(False)
    zinf.shard(resumed, config(nvme))
    its_optimizer = zinf.AdamW(resumed.parameters(), **SETTINGS)
    zinf.load(folder, resumed, its_optimizer)
    found = train(resumed, its_optimizer, [3])
    resumed.blocks[0].requires_grad_(True)
    found += train(resumed, its_optimizer, [4, 5])
    assert found == wanted
    assert_same(full_states(resumed), full_states(model))


@pytest.mark.parametrize("rate", [torch.tensor(3e-3), np.float32(3e-3), np.float64(3e-3), -1e-18])
def test_rates_of_every_kind_come_back(nvme, tmp_path, rate):
    """Tensors, numbers of numpy's, and what a schedule that ends at 0 leaves."""
    model, optimizer = offloaded(config(nvme))
    optimizer.param_groups[0].update(lr=rate, initial_lr=rate, role="all", betas=(torch.tensor(0.5), 0.75))
    train(model, optimizer, 2)
    zinf.save(tmp_path, model, optimizer)
    wanted = train(model, optimizer, range(2, 4))
    for lr in (1.0, torch.tensor(1.0)):
        model, optimizer = offloaded(config(nvme), seed=2)
        optimizer.param_groups[0]["lr"] = lr
        zinf.load(tmp_path, model, optimizer)
        group = optimizer.param_groups[0]
        assert group["lr"] == group["initial_lr"] == rate
        assert (group["role"], group["betas"]) == ("all", (0.5, 0.75))
        assert isinstance(lr, float) or group["lr"] is lr
        assert train(model, optimizer, range(2, 4)) == wanted


def test_a_setting_that_cannot_be_kept_is_named(nvme, tmp_path):
    model, optimizer = offloaded(config(nvme))
    optimizer.param_groups[0]["schedule"] = print
    for background in (False, True):
        with pytest.raises(TypeError, match="'schedule' of parameter group 0 cannot be kept"):
            zinf.save(tmp_path, model, optimizer, background=background)
    assert checkpoints(tmp_path) == []


schedules = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: schedules.MultiStepLR(o, [2, 7]),  # whose state has a dict with whole numbers as keys
        lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.CosineAnnealingLR(o, 5)], [3]),
        lambda o: schedules.ReduceLROnPlateau(o, patience=0),
    ],
)
def test_the_state_of_any_schedule_is_kept(nvme, tmp_path, schedule):
    rates = []
    for resume in (False, True):
        model = zinf.shard(make(), config(nvme))
        optimizer = zinf.AdamW(model.parameters(), lr=1e-2)
        scheduler = schedule(optimizer)
        if resume:
            scheduler.load_state_dict(zinf.load(tmp_path, model, optimizer))
        for step in range(5 if resume else 0, 10):
            train(model, optimizer, [step])
            scheduler.step(*[1.0] * isinstance(scheduler, schedules.ReduceLROnPlateau))
            if step == 4:
                zinf.save(tmp_path, model, optimizer, extra=scheduler.state_dict())
            if step > 4:
                rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:5] == rates[5:]
    assert len(set(rates)) > 1


def test_random_numbers_go_on(nvme, tmp_path):
    model, optimizer, _ = saved(nvme, tmp_path)
    zinf.save(tmp_path, model, optimizer)
    wanted = torch.rand(4)
    torch.manual_seed(99)
    zinf.load(tmp_path, model, optimizer)
    assert torch.equal(torch.rand(4), wanted)


def test_accumulated_gradients_resume_alike(ranks, nvme, tmp_path):
    """Sums wait in float32: that too must not depend on what ran before the save."""
    wanted = ranks(accumulated, 2, str(nvme), str(tmp_path / "whole"), None)
    ranks(accumulated, 2, str(nvme), str(tmp_path / "run"), 3)
    assert ranks(accumulated, 2, str(nvme), str(tmp_path / "run"), 6) == wanted


def accumulated(rank, world, nvme, folder, until):
    """Six steps of two micro-batches each, or the first three and a save, or the last three."""
    model, optimizer = offloaded(config(nvme, dtype=torch.bfloat16))
    if until == 6:
        zinf.load(folder, model, optimizer)
    for step in range(*{None: (0, 6), 3: (0, 3), 6: (3, 6)}[until]):
        for part in model.data(step, 8).chunk(2):
            (model.loss(part.chunk(world)[rank]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    if until == 3:
        zinf.save(folder, model, optimizer)
    return full_states(model)["head.weight" if "head.weight" in dict(model.named_parameters()) else "embedding.weight"][
        "param"
    ].tolist()


def test_extra_keeps_values_and_tensors(nvme, tmp_path):
    extra = {
        "step": 3, "best": 0.25, "name": "run", "nothing": None, "flags": [True, False], "counts": {7: 1, "seven": 2},
        "nested": {
            "half": torch.arange(3, dtype=torch.bfloat16), "list": [torch.tensor(5), {"empty": torch.zeros(0, 2)}],
        },
    }  # fmt: skip
    model, optimizer, _ = saved(nvme, tmp_path)
    zinf.save(tmp_path, model, optimizer, extra=extra)
    found = zinf.load(tmp_path, model, optimizer)
    assert {key: found[key] for key in ("step", "best", "name", "nothing", "flags", "counts")} == {
        key: extra[key] for key in ("step", "best", "name", "nothing", "flags", "counts")
    }
    assert torch.equal(found["nested"]["half"], extra["nested"]["half"])
    assert found["nested"]["half"].dtype is torch.bfloat16
    assert found["nested"]["list"][0] == 5
    assert found["nested"]["list"][1]["empty"].shape == (0, 2)
    endless: list = []
    endless.append(endless)
    tensors = (
        torch.ones(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128),
    )  # fmt: skip
    for bad in ({None: 2}, {True: 2}, {"__items__": 2}, {"f": print}, [object()], endless, *tensors):
        with pytest.raises(TypeError, match="extra"):
            zinf.save(tmp_path, model, optimizer, extra=bad)
    assert len(checkpoints(tmp_path)) == 2


class Remembering(torch.nn.Linear):
    """Has a state of its own making, in no buffer."""

    kept: object = None

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@pytest.mark.parametrize("background", [False, True])
def test_extra_states_of_modules_are_kept(nvme, tmp_path, background):
    def build(layer=Remembering):
        return zinf.shard(torch.nn.Sequential(layer(4, 4), torch.nn.Sequential(layer(4, 4))), config(nvme))

    model, plain = build(), build(torch.nn.Linear)
    model[0].kept = {"calls": 3, "scales": [torch.tensor([0.5, 2.0])]}
    zinf.save(tmp_path, model, None, extra={"largest": torch.tensor(7)}, background=background)
    model[0].kept, model[1][0].kept = None, "changed since"
    assert zinf.load(tmp_path, model, None) == {"largest": 7}
    assert model[0].kept["calls"] == 3
    assert torch.equal(model[0].kept["scales"][0], torch.tensor([0.5, 2.0]))
    assert model[1][0].kept is None
    with pytest.raises(zinf.CheckpointError, match=r"0\._extra_state is not in the model"):
        zinf.load(tmp_path, plain, None)
    zinf.save(tmp_path / "plain", plain, None)
    with pytest.raises(zinf.CheckpointError, match=r"0\._extra_state is missing"):
        zinf.load(tmp_path / "plain", model, None)
    model[1][0].kept = object()
    with pytest.raises(TypeError, match=r"1\.0\._extra_state: object cannot be kept"):
        zinf.save(tmp_path, model, None)


def test_the_optimizer_is_the_models_own(nvme, tmp_path):
    model, optimizer, _ = saved(nvme, tmp_path)
    _, others, _ = saved(nvme, tmp_path / "other")
    for wrong, error, words in (
        (torch.optim.SGD(make().parameters(), lr=1.0), TypeError, r"torch\.optim\.sgd\.SGD.*zinf\.AdamW"),
        (others, ValueError, "another model's"),
    ):
        with pytest.raises(error, match=words):
            zinf.save(tmp_path, model, wrong)
        with pytest.raises(error, match=words):
            zinf.load(tmp_path, model, wrong)
    assert len(checkpoints(tmp_path)) == 1
    zinf.load(tmp_path, model, optimizer)


def test_the_swap_folder_may_vanish(nvme, tmp_path):
    _, _, path = saved(nvme, tmp_path / "run")
    shutil.rmtree(nvme)
    nvme.mkdir()
    model, optimizer = offloaded(config(nvme))
    zinf.load(path, model, optimizer)


def test_keep(nvme, tmp_path):
    model, optimizer, _ = saved(nvme, tmp_path, steps=1)
    for _ in range(4):
        newest = zinf.save(tmp_path, model, optimizer, keep=2).path
    kept = checkpoints(tmp_path)
    assert len(kept) == 2
    assert str(kept[-1]) == newest
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "nvme") == [path.name for path in kept]
    for wrong in (True, 0, 1.5, "2"):
        with pytest.raises(ValueError, match="keep"):
            zinf.save(tmp_path, model, optimizer, keep=wrong)
    assert checkpoints(tmp_path) == kept


def test_of_an_old_checkpoint_that_was_moved_only_the_link_goes(nvme, tmp_path):
    model, optimizer, path = saved(nvme, tmp_path, steps=1)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(path, elsewhere)
    Path(path).symlink_to(elsewhere)
    assert zinf.load(tmp_path, model, optimizer) is None
    newest = zinf.save(tmp_path, model, optimizer, keep=1).path
    assert [str(kept) for kept in checkpoints(tmp_path)] == [newest]
    assert not Path(path).is_symlink()
    assert zinf.load(elsewhere, model, optimizer) is None


def test_the_newest_complete_one_is_loaded(nvme, tmp_path):
    model, optimizer, first = saved(nvme, tmp_path / "run", steps=1)
    wanted = full_states(model)
    train(model, optimizer, 1)
    second = zinf.save(tmp_path / "run", model, optimizer).path
    (tmp_path / "run" / checkpoint_format.folder_name(2) / checkpoint_format.MANIFEST).unlink()
    zinf.load(tmp_path / "run", model, optimizer)
    assert_same(full_states(model), wanted)
    with pytest.raises(zinf.CheckpointError):
        zinf.load(second, model, optimizer)
    with pytest.raises(zinf.CheckpointError):
        zinf.load(tmp_path / "nothing", model, optimizer)
    assert first != second


# -- damage ---------------------------------------------------------------------------------------------------


def _manifest(path):
    return checkpoint_format.Manifest.decode((Path(path) / "manifest.json").read_bytes())


def _encoded(data):
    """A manifest with `data` in it and a right checksum, as an attacker would write it."""
    body = json.dumps(data)
    return f'{{"crc32c": "{deepnvme.crc32c(bytearray(body.encode())):08x}", "checkpoint": {body}}}'


def _flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_verify_finds_every_flipped_byte_of_a_state(nvme, tmp_path):
    """One bit in every kind of every unit, one at a time; the message names parameter and kind."""
    model, _optimizer, path = saved(nvme, tmp_path / "run", dtype=torch.bfloat16)
    assert verify(path) == []
    file = Path(path) / "rank-0.bin"
    for unit in _manifest(path).units:
        for kind, record in unit.kinds.items():
            position = record.file_offset + random.Random(1).randrange(unit.slots[0].numel)
            _flip(file, position)
            (fault,) = verify(path)
            assert kind in fault
            assert unit.slots[0].names[0] in fault
            before = full_states(model)
            with pytest.raises(zinf.CheckpointError, match=unit.slots[0].names[0]):
                zinf.load(path, *offloaded(config(nvme, dtype=torch.bfloat16)))
            assert_same(full_states(model), before)
            _flip(file, position)
    assert verify(path) == []
    _flip(Path(path) / "tensors.safetensors", -1)
    assert len(verify(path)) == 1


def test_no_changed_byte_of_a_manifest_is_believed(nvme, tmp_path):
    model, optimizer, path = saved(nvme, tmp_path / "run", steps=1)
    file = Path(path) / "manifest.json"
    for position in range(0, file.stat().st_size, 97):
        _flip(file, position)
        with pytest.raises(zinf.CheckpointError, match="manifest"):
            zinf.load(path, model, optimizer)
        _flip(file, position)
    zinf.load(path, model, optimizer)


def failing(rank, world, folder, nvme):
    """Rank 1 cannot write: every rank hears why, and what was there before is there still."""
    model, optimizer = offloaded(config(nvme))
    zinf.save(folder, model, optimizer)
    before = sorted(path.name for path in Path(folder).iterdir())
    if rank == 1:

        def full(*args):
            raise OSError(28, "No space left on device", "rank-1.bin")

        whole, ShardCopy.copy = ShardCopy.copy, full
    with pytest.raises(Exception, match="No space left"):
        zinf.save(folder, model, optimizer)
    if rank == 1:
        ShardCopy.copy = whole
    torch.distributed.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == before
    if rank == 0:
        file = Path(folder) / "checkpoint-000001" / "rank-0.bin"
        content = bytearray(file.read_bytes())
        content[0] ^= 1
        file.write_bytes(content)
    torch.distributed.barrier()
    with pytest.raises(zinf.CheckpointError, match="damaged"):
        zinf.load(folder, model, optimizer)


def test_a_failure_on_one_rank_ends_all_with_its_message(ranks, nvme, tmp_path):
    ranks(failing, 2, str(tmp_path / "run"), str(nvme), timeout=30)


def test_a_file_that_was_cut_short(nvme, tmp_path):
    model, optimizer, path = saved(nvme, tmp_path / "run")
    file = Path(path) / "rank-0.bin"
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(zinf.CheckpointError, match="shorter"):
        zinf.load(path, model, optimizer)
    file.unlink()
    with pytest.raises(zinf.CheckpointError, match="missing"):
        zinf.load(path, model, optimizer)


def test_a_buffer_that_no_file_can_hold_is_named(nvme, tmp_path):
    model = make()
    model.register_buffer("turns", torch.ones(2, dtype=torch.complex128))
    zinf.shard(model, config(nvme))
    with pytest.raises(TypeError, match=r"buffer\.turns is torch\.complex128"):
        zinf.save(tmp_path / "run", model, None)
    assert not (tmp_path / "run").exists()


def test_a_file_of_buffers_that_is_gone_or_no_file(nvme, tmp_path):
    model, optimizer, path = saved(nvme, tmp_path / "run")
    before = full_states(model)
    file = Path(path) / "tensors.safetensors"
    file.unlink()
    for make_instead in (lambda: None, lambda: file.symlink_to(file.name), file.unlink, file.mkdir):
        make_instead()
        with pytest.raises(zinf.CheckpointError, match=re.escape(str(file))):
            zinf.load(path, model, optimizer)
    file.rmdir()
    file.write_bytes(b"no tensors")
    manifest = checkpoint_format.Manifest.decode((Path(path) / "manifest.json").read_bytes())
    manifest.tensors_crc32c = deepnvme.crc32c(bytearray(b"no tensors"))
    (Path(path) / "manifest.json").write_bytes(manifest.encode())
    with pytest.raises(zinf.CheckpointError, match=re.escape(str(file))):
        zinf.load(path, model, optimizer)
    assert_same(full_states(model), before)


HOSTILE = [
    -1,
    0,
    1,
    2**62,
    2**70,
    1e308,
    float("nan"),
    None,
    True,
    "",
    "../../etc/passwd",
    "float32",
    [],
    [[]],
    {},
    {"a": 1},
]


def _places(data, path=()):
    """Every place in a JSON value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


def test_a_hostile_manifest_ends_in_one_kind_of_error(nvme, tmp_path):
    """Whatever stands in it: a CheckpointError, or a checkpoint that loads; nothing else, and nothing large."""
    model, optimizer, _path = saved(nvme, tmp_path / "run", steps=1)
    zinf.save(tmp_path / "run", model, optimizer, extra={"t": torch.ones(2)})
    manifest = Path(checkpoints(tmp_path / "run")[-1]) / "manifest.json"
    honest = json.loads(manifest.read_text())["checkpoint"]
    chance = random.Random(3)
    places = list(_places(honest))
    assert len(places) > 100
    for _ in range(300):
        data = copy.deepcopy(honest)
        *parents, last = chance.choice(places)
        parent = data
        for key in parents:
            parent = parent[key]
        value = chance.choice([*HOSTILE, "remove"])
        if value == "remove":
            del parent[last]
        else:
            parent[last] = value
        manifest.write_text(_encoded(data))
        for read in (lambda: zinf.load(manifest.parent, model, optimizer), lambda: verify(manifest.parent)):
            try:
                read()
            except zinf.CheckpointError:
                pass
            except BaseException as error:
                raise AssertionError(f"{parents} {last} = {value!r}: {error!r}") from error
    bodies = ([], None, {"format": "zinf-checkpoint"}, [[[]]])
    for text in ("", "[]", "{", "\x00", *map(_encoded, bodies), _encoded("x").replace('"x"', "[" * 100_000)):
        manifest.write_text(text)
        with pytest.raises(zinf.CheckpointError):
            zinf.load(manifest.parent, model, optimizer)


def test_a_damaged_checkpoint_changes_nothing_that_can_be_checked_before(nvme, tmp_path):
    """Names, shapes, dtypes and groups are compared before a byte is read."""
    model, _optimizer, path = saved(nvme, tmp_path / "run")
    before = full_states(model)
    others = {
        "missing": make(layers=4),
        "not in the model": make(layers=2),
        "shape": make(width=20),
    }
    for message, other in others.items():
        zinf.shard(other, config(nvme))
        with pytest.raises(zinf.CheckpointError, match=message):
            zinf.load(path, other, zinf.AdamW(other.parameters()))
    narrow = zinf.shard(make(), config(nvme, dtype=torch.bfloat16))
    with pytest.raises(zinf.CheckpointError, match="bfloat16"):
        zinf.load(path, narrow, zinf.AdamW(narrow.parameters()))
    grouped = zinf.shard(make(seed=9), config(nvme))
    start = state_of(grouped)
    params = list(grouped.parameters())
    with pytest.raises(zinf.CheckpointError, match="group"):
        zinf.load(path, grouped, zinf.AdamW([{"params": params[:2]}, {"params": params[2:]}]))
    assert_same(state_of(grouped), start)
    assert_same(full_states(model), before)
