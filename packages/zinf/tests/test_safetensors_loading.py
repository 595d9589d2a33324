"""Safetensors in Hugging Face's layout into models: as its own library writes them, and as `export` does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from zinf_testing import EVERYWHERE, ManyDtypes, config, make, offloaded, state_of, train

import zero3
import zinf


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_parameters_and_buffers_of_other_dtypes(tmp_path, nvme, tier):
    one, other = (zinf.shard(ManyDtypes(seed), config(nvme, tier, "cpu", tier)) for seed in (1, 2))
    zinf.export(one, tmp_path)
    zinf.load_pretrained(other, tmp_path)
    found, wanted = state_of(other), state_of(one)
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


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


def test_what_is_no_directory_is_said_to_be_none(tmp_path, nvme):
    model = zinf.shard(make(), config(nvme))
    zinf.export(model, tmp_path)
    for wrong in ("openai-community/gpt2", tmp_path / "model.safetensors"):
        with pytest.raises(FileNotFoundError, match="is no directory"):
            zinf.load_pretrained(model, wrong)


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, nvme):
    model = zinf.shard(make(), config(nvme))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(zinf.CheckpointError, match="secret"):
        zinf.load_pretrained(model, tmp_path)


def test_two_ranks_write_and_read_what_one_does(tmp_path, ranks):
    results = ranks(_exchange, 2, str(tmp_path))
    assert results == [True, True]


def _exchange(rank, world, folder):
    nvme = Path(folder) / f"nvme{rank}"
    nvme.mkdir()
    model = zinf.shard(make(seed=1), config(nvme))
    zinf.export(model, Path(folder) / "out")
    other = zinf.shard(make(seed=2), config(nvme))
    zinf.load_pretrained(other, Path(folder) / "out")
    plain = make(seed=1).state_dict()
    return all(torch.equal(tensor, plain[name]) for name, tensor in other.state_dict().items())
