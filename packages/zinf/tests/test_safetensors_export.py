"""Models out to Hugging Face's layout, as safetensors' own reader finds them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from zinf_testing import EVERYWHERE, config, make, offloaded, state_of, train

import zero3
import zinf
from zinf import safetensors_export


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
