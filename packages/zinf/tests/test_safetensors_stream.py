"""Models out to Hugging Face's layout and back, compared with safetensors' own reader and writer."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from zinf_testing import ManyDtypes, config, make, offloaded, state_of, train

import zero3
import zinf
from zinf import safetensors_export

EVERYWHERE = [("device", "device"), ("cpu", "cpu"), ("nvme", "nvme")]


def folder_tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


@pytest.mark.parametrize(("params", "optimizer"), EVERYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_writes_what_the_model_computes_with(tmp_path, nvme, params, optimizer, dtype):
    model, adamw = offloaded(config(nvme, params=params, optimizer=optimizer, dtype=dtype))
    train(model, adamw, range(2))
    nbytes = zinf.export(model, tmp_path / "out")
    found, expected = folder_tensors(tmp_path / "out"), model.state_dict()
    assert set(expected) - set(found) == {"head.weight"}  # tied to embedding.weight, which is there
    assert nbytes == sum(tensor.nbytes for tensor in found.values())
    with zero3.gathered(model):
        for name, param in model.named_parameters():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], param.detach()), name
    assert torch.equal(found["seen"], model.seen)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_parameters_and_buffers_of_other_dtypes(tmp_path, nvme, tier):
    one, other = (zinf.shard(ManyDtypes(seed), config(nvme, tier, "cpu", tier)) for seed in (1, 2))
    zinf.export(one, tmp_path)
    zinf.load_pretrained(other, tmp_path)
    found, wanted = state_of(other), state_of(one)
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def test_a_dtype_that_the_format_does_not_have_is_refused_by_name(tmp_path, nvme):
    model = nn.Linear(4, 4)
    model.register_buffer("rotations", torch.ones(2, dtype=torch.complex128))
    zinf.shard(model, config(nvme))
    with pytest.raises(TypeError, match=r"rotations is torch\.complex128"):
        zinf.export(model, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_files_are_cut_by_size_with_an_index(tmp_path, nvme, monkeypatch):
    model, _ = offloaded(config(nvme))
    plain = make().state_dict()
    monkeypatch.setattr(safetensors_export._Writer.__init__, "__defaults__", (4000,))
    zinf.export(model, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), plain[name])
    other = zinf.shard(make(seed=9), config(nvme))
    zinf.load_pretrained(other, tmp_path)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in other.state_dict().items())


def test_an_export_takes_the_place_of_one_in_other_files(tmp_path, nvme, monkeypatch):
    """Whichever reader looks finds the newest weights; files that are no weights of ours stay."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"another's")
    model, optimizer = offloaded(config(nvme))
    model.eval()
    for step, file_bytes in enumerate((10**9, 4000, 9000, 10**9)):
        train(model, optimizer, [step])
        monkeypatch.setattr(safetensors_export._Writer.__init__, "__defaults__", (file_bytes,))
        zinf.export(model, folder)
        (folder / "adapter_model.safetensors").rename(tmp_path / "kept")
        wanted, index = state_of(model), folder / "model.safetensors.index.json"
        files = {path.name for path in folder.iterdir()}
        if file_bytes == 10**9:
            assert files == {"model.safetensors"}
        else:
            assert files == {index.name, *json.loads(index.read_text())["weight_map"].values()}
        del wanted["head.weight"]
        found = folder_tensors(folder)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        (tmp_path / "kept").rename(folder / "adapter_model.safetensors")


def test_of_both_layouts_the_one_file_counts_as_for_transformers(tmp_path, nvme):
    save_file(make(3).state_dict() | {"head.weight": torch.zeros(40, 16)}, tmp_path / "other.safetensors")
    index = {"weight_map": dict.fromkeys(make().state_dict(), "other.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    one = make(4).state_dict()
    del one["head.weight"]
    save_file(one, tmp_path / "model.safetensors")
    model = zinf.shard(make(), config(nvme))
    zinf.load_pretrained(model, tmp_path)
    found = state_of(model)
    assert all(torch.equal(found[name], value) for name, value in one.items())


def test_a_buffer_that_two_modules_have_is_found_under_either_name(tmp_path, nvme):
    def two():
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        model["a"].register_buffer("table", torch.arange(4.0))
        model["b"].register_buffer("table", model["a"].table)
        model["b"].register_buffer("unsaved", model["a"].table, persistent=False)
        return model

    model = zinf.shard(two(), config(nvme))
    model["a"].table += 1
    zinf.export(model, tmp_path)
    other = zinf.shard(two(), config(nvme))
    assert zinf.load_pretrained(other, tmp_path) == ([], [])
    assert torch.equal(other["b"].table, torch.arange(4.0) + 1)
    values = load_file(tmp_path / "model.safetensors")
    values["b.table"] = values.pop("a.table") + 1
    save_file(values, tmp_path / "model.safetensors")
    assert zinf.load_pretrained(other, tmp_path) == ([], [])
    assert torch.equal(other["a"].table, torch.arange(4.0) + 2)


@pytest.mark.parametrize(("params", "optimizer"), EVERYWHERE)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_load_pretrained_converts_and_keeps_ties(tmp_path, nvme, params, optimizer, stored, dtype):
    values = {name: t.to(stored) if t.is_floating_point() else t for name, t in make(seed=5).state_dict().items()}
    del values["head.weight"]
    save_file(values, tmp_path / "model.safetensors")
    model = zinf.shard(make(seed=6), config(nvme, params=params, optimizer=optimizer, dtype=dtype))
    with zero3.gathered(model.blocks, modify=True), torch.no_grad():
        model.blocks[0].up.weight.mul_(3)  # what is there is gone, the rest of its split too
    assert zinf.load_pretrained(model, tmp_path) == ([], [])
    found = model.state_dict()
    for name, value in values.items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name
        if name != "seen":  # the master holds all of it
            assert torch.equal(zinf.full_state(model.get_parameter(name))["param"], value.float()), name
    assert torch.equal(found["head.weight"], found["embedding.weight"])


def test_loading_into_a_run_settles_it_and_keeps_the_moments(tmp_path, nvme):
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, range(3))
    moments = zinf.full_state(model.head.weight)["exp_avg"]
    values = {name: tensor + 1 for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(values, tmp_path / "model.safetensors")
    zinf.load_pretrained(model, tmp_path)
    state = zinf.full_state(model.embedding.weight)
    assert torch.equal(state["param"], values["embedding.weight"])
    assert torch.equal(state["exp_avg"], moments)
    assert state["step"] == 3


def test_what_is_missing_unexpected_or_misshapen_is_listed_and_nothing_is_loaded(tmp_path, nvme):
    values = make(seed=5).state_dict()
    values["head.weight"] = values["head.weight"].clone()
    values["norm.weight"] = torch.zeros(3)
    values["stranger"] = torch.zeros(2)
    del values["norm.bias"]
    save_file(values, tmp_path / "model.safetensors")
    model = zinf.shard(make(seed=6), config(nvme))
    before = model.state_dict()
    with pytest.raises(RuntimeError, match=r"norm\.bias.*stranger.*norm\.weight: \(3,\)"):
        zinf.load_pretrained(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, nvme):
    model = zinf.shard(make(), config(nvme))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(zinf.CheckpointError, match="secret"):
        zinf.load_pretrained(model, tmp_path)


def test_a_checkpoint_is_exported_without_the_model(tmp_path, nvme):
    model, optimizer = offloaded(config(nvme))
    train(model, optimizer, range(2))
    zinf.save(tmp_path / "run", model, optimizer)
    safetensors_export.export_checkpoint(tmp_path / "run", tmp_path / "a")
    zinf.export(model, tmp_path / "b")
    ours, theirs = folder_tensors(tmp_path / "a"), folder_tensors(tmp_path / "b")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_full_drive_leaves_no_file_that_looks_whole(tmp_path, nvme, monkeypatch):
    model, _ = offloaded(config(nvme))
    monkeypatch.setattr(safetensors_export._Writer, "elements", _fail)
    with pytest.raises(OSError, match="full"):
        zinf.export(model, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def _fail(*_):
    raise OSError(28, "the drive is full")


def test_two_ranks_write_and_read_what_one_does(tmp_path, ranks):
    results = ranks(_exchange, 2, str(tmp_path))
    assert results == [True, True]


def _exchange(rank, world, folder):
    from pathlib import Path

    nvme = Path(folder) / f"nvme{rank}"
    nvme.mkdir()
    model = zinf.shard(make(seed=1), config(nvme))
    zinf.export(model, Path(folder) / "out")
    other = zinf.shard(make(seed=2), config(nvme))
    zinf.load_pretrained(other, Path(folder) / "out")
    plain = make(seed=1).state_dict()
    return all(torch.equal(tensor, plain[name]) for name, tensor in other.state_dict().items())
