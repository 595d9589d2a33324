"""Names with and without a model's prefix: what `load_pretrained` makes of them, against transformers' own loading."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from zinf_testing import config

import zinf
from zinf.hub_names import names_in_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
WITH_HEAD, BODY = transformers.AutoModelForCausalLM, transformers.AutoModel


def save(make, family, folder, seed=0):
    torch.manual_seed(seed)
    make.from_config(transformers.AutoConfig.for_model(family, vocab_size=64, **SIZES[family])).save_pretrained(folder)


def loaded(make, family, folder, nvme, **options):
    """State of a model with other random values, after `load_pretrained`, and what that returned."""
    torch.manual_seed(1)
    plain = make.from_config(transformers.AutoConfig.for_model(family, vocab_size=64, **SIZES[family]))
    model = zinf.shard(plain, config(nvme, params="nvme", optimizer="nvme"))
    return zinf.load_pretrained(model, folder, **options), model.state_dict()


def assert_same(found, expected, names):
    assert found.keys() == expected.keys()
    assert names
    for name in names:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("make", [WITH_HEAD, BODY], ids=["into a head", "into the body"])
@pytest.mark.parametrize("made_by", [WITH_HEAD, BODY], ids=["of a head", "of the body"])
def test_a_gpt2_is_found_with_or_without_its_prefix(tmp_path, nvme, make, made_by):
    save(made_by, "gpt2", tmp_path)
    outcome, found = loaded(make, "gpt2", tmp_path, nvme)
    assert outcome == ([], [])
    assert_same(found, make.from_pretrained(tmp_path).state_dict(), found)


def test_buffers_that_older_versions_saved_are_passed_over(tmp_path, nvme):
    """As on the Hub: no prefix, and the causal mask of each block among the tensors."""
    save(BODY, "gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    outcome, found = loaded(WITH_HEAD, "gpt2", tmp_path, nvme)
    assert outcome == ([], [])
    assert_same(found, WITH_HEAD.from_pretrained(tmp_path).state_dict(), found)


def test_a_head_of_its_own_is_still_missed_or_too_much(tmp_path, nvme):
    save(BODY, "llama", tmp_path / "body")
    save(WITH_HEAD, "llama", tmp_path / "whole")
    with pytest.raises(RuntimeError, match=r"missing: lm_head\.weight$"):
        loaded(WITH_HEAD, "llama", tmp_path / "body", nvme)
    with pytest.raises(RuntimeError, match=r"unexpected: lm_head\.weight$"):
        loaded(BODY, "llama", tmp_path / "whole", nvme)
    for make, folder, differing in ((WITH_HEAD, "body", ["lm_head.weight"]), (BODY, "whole", [])):
        outcome, found = loaded(make, "llama", tmp_path / folder, nvme, strict=False)
        assert outcome.missing_keys == differing
        expected = make.from_pretrained(tmp_path / folder).state_dict()
        assert_same(found, expected, set(found) - set(differing))


def test_a_name_that_fits_as_it_is_comes_before_one_that_must_be_changed():
    model = torch.nn.Module()
    model.base_model_prefix = "body"
    own = {"body.a", "b"}
    assert names_in_model(model, own, ["a", "body.a", "body.b", "x"]) == {
        "body.a": "body.a", "a": "a", "b": "body.b", "x": "x"
    }  # fmt: skip
    del model.base_model_prefix
    assert names_in_model(model, own, ["a", "body.b"]) == {"a": "a", "body.b": "body.b"}
