"""The GPT against torch's own Transformer, and its widened products against plain ones."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zinf.models import widened_linear
from zinf.models.gpt import GPT, GPTConfig
from zinf.models.model_names import parse_model, parse_sizes

SMALL = GPTConfig(layers=2, hidden=24, heads=3, vocab=50, positions=16)


def _torch_reference(model: GPT) -> nn.TransformerEncoder:
    """torch's own pre-norm blocks with the same weights."""
    config = model.config
    layer = nn.TransformerEncoderLayer(
        config.hidden,
        config.heads,
        4 * config.hidden,
        dropout=0.0,
        activation=lambda x: F.gelu(x, approximate="tanh"),
        batch_first=True,
        norm_first=True,
    )
    reference = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
    with torch.no_grad():
        for block, other in zip(model.blocks, reference.layers, strict=True):
            other.self_attn.in_proj_weight.copy_(block.attention.query_key_value.weight)
            other.self_attn.in_proj_bias.copy_(block.attention.query_key_value.bias)
            other.self_attn.out_proj.load_state_dict(block.attention.projection.state_dict())
            other.linear1.load_state_dict(block.mlp.widen.state_dict())
            other.linear2.load_state_dict(block.mlp.projection.state_dict())
            other.norm1.load_state_dict(block.attention_norm.state_dict())
            other.norm2.load_state_dict(block.mlp_norm.state_dict())
    return reference


def test_logits_are_those_of_torchs_transformer_with_the_same_weights():
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens = torch.randint(0, 50, (3, 11))
    hidden = model.token_embedding(tokens) + model.position_embedding.weight[:11]
    mask = nn.Transformer.generate_square_subsequent_mask(11)
    hidden = _torch_reference(model)(hidden, mask=mask, is_causal=True)
    expected = F.layer_norm(hidden, (24,), model.norm.weight, model.norm.bias) @ model.token_embedding.weight.t()
    torch.testing.assert_close(model(tokens), expected)


def test_loss_is_the_mean_cross_entropy_of_the_logits():
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens, targets = torch.randint(0, 50, (2, 2, 7))
    probabilities = torch.softmax(model(tokens).double(), -1)
    expected = -probabilities.gather(-1, targets[..., None]).log().mean()
    torch.testing.assert_close(model(tokens, targets).double(), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_numel_counts_the_parameters_that_are_there(tied):
    config = GPTConfig(layers=3, hidden=20, heads=4, vocab=31, positions=9, tied=tied)
    assert sum(p.numel() for p in GPT(config).parameters()) == config.numel


def test_gpt2_by_name_has_the_published_number_of_parameters():
    assert parse_model("gpt2-124m", positions=256).numel == 124_439_808


def test_initial_deviations_are_gpt2s():
    torch.manual_seed(0)
    block = GPT(GPTConfig(layers=8, hidden=256, heads=4, vocab=256, positions=8)).blocks[3]
    assert block.mlp.widen.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.projection.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    assert not block.mlp.widen.bias.any()


@pytest.mark.parametrize("bias", [True, False])
def test_a_widened_product_is_that_of_the_widened_weight(bias):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8, requires_grad=True)
    weight = torch.randn(6, 8).bfloat16().requires_grad_()
    offset = torch.randn(6).bfloat16().requires_grad_() if bias else None
    grad = torch.randn(2, 5, 6)
    inputs = [t for t in (x, weight, offset) if t is not None]
    found = widened_linear.linear(x, weight, offset)
    expected = F.linear(x, weight.float(), offset.float() if bias else None)
    assert torch.equal(found, expected)
    for ours, plain in zip(
        torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        assert ours.dtype == plain.dtype
        torch.testing.assert_close(ours, plain)


def test_a_widened_product_saves_the_narrow_weight_only():
    saved = []
    x = torch.randn(4, 8, requires_grad=True)
    weight = torch.randn(16, 8).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        widened_linear.linear(x, weight, None)
    assert sorted((tuple(t.shape), t.dtype) for t in saved) == [
        ((4, 8), torch.float32),
        ((16, 8), torch.bfloat16),
    ]


def test_bf16_parameters_train_whatever_the_machine_multiplies_in():
    torch.manual_seed(0)
    model = GPT(SMALL).bfloat16()
    tokens = torch.randint(0, 50, (2, 8))
    model(tokens, tokens).backward()
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.bfloat16
        assert parameter.grad.isfinite().all()


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match=r"17 tokens .* positions=16"):
        GPT(SMALL)(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bert", "not known"),
        ("gpt:layers=2,hidden=64", "does not say heads"),
        ("gpt:layers=2,hidden=64,heads=x", "cannot read 'heads=x'"),
        ("gpt:layers=2,hidden=64,heads=2,depth=3", "cannot read 'depth=3'"),
        ("gpt:layers=2,hidden=64,heads=3", "no multiple of heads"),
        ("gpt:layers=0,hidden=64,heads=2", "layers >= 1"),
    ],
)
def test_names_that_are_no_model_are_refused_in_words(name, words):
    with pytest.raises(ValueError, match=words):
        parse_model(name, positions=8)


def test_sizes_of_a_directory_are_those_of_its_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"config.json does not say num_hidden_layers"):
        parse_sizes(str(tmp_path), positions=8)
    config = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parse_sizes(str(tmp_path), positions=8) == {"layers": 30, "hidden": 576, "heads": 9}
    assert parse_sizes("gpt2-124m", positions=8) == {"layers": 12, "hidden": 768, "heads": 12}
