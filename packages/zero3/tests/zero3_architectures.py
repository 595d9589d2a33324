"""Architectures of `transformers`, unchanged, from small configurations: name -> (model, inputs)."""

from __future__ import annotations

import torch
import transformers as hf


def _numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _tokens(size, length=8, vocabulary=64):
    return torch.randint(3, vocabulary, (size, length), generator=torch.Generator().manual_seed(1))


def text(size):
    return {"input_ids": _tokens(size)}


def encoder_decoder(size):
    return {"input_ids": _tokens(size), "decoder_input_ids": _tokens(size, 6)}


def image(size):
    return {"pixel_values": _numbers(size, 3, 32, 32)}


def image_and_text(size):
    return {**text(size), **image(size)}


def sound(size):
    return {"input_values": _numbers(size, 800)}


def spectrogram(size):
    return {"input_features": _numbers(size, 8, 32), "decoder_input_ids": _tokens(size, 6)}


_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_TEXT = {**_SIZES, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_TEXT, "num_key_value_heads": 1}
_HEADS = {**_GROUPED, "head_dim": 8}
_BART = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
_IMAGE = {**{k: v for k, v in _SIZES.items() if k != "vocab_size"}, "image_size": 32, "patch_size": 16}
_SOUND = {
    **_SIZES, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip
_MOE = {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}


# name of the class -> its configuration's arguments and its inputs
ARCHITECTURES = {
    "GPT2LMHeadModel": ({"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}, text),
    "LlamaForCausalLM": (_GROUPED, text),
    "MistralForCausalLM": (_HEADS, text),
    "MixtralForCausalLM": (_MOE, text),
    "Qwen2ForCausalLM": (_GROUPED, text),
    "Qwen3ForCausalLM": (_HEADS, text),
    "Qwen2MoeForCausalLM": (_MOE | {"shared_expert_intermediate_size": 16}, text),
    "GemmaForCausalLM": (_HEADS, text),
    "Gemma2ForCausalLM": (_HEADS, text),
    "PhiForCausalLM": (_TEXT, text),
    "GPTNeoXForCausalLM": (_TEXT, text),
    "OPTForCausalLM": (
        {**_TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16, "layerdrop": 0.0}, text),
    "BloomForCausalLM": ({"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}, text),
    "FalconForCausalLM": (_TEXT, text),
    "T5ForConditionalGeneration": (_T5, encoder_decoder),
    "BartForConditionalGeneration": (_BART, encoder_decoder),
    "PegasusForConditionalGeneration": (_BART, encoder_decoder),
    "BertForMaskedLM": (_TEXT, text),
    "RobertaForMaskedLM": (_TEXT, text),
    "AlbertForMaskedLM": ({**_TEXT, "embedding_size": 8}, text),
    "DebertaV2ForMaskedLM": (
        {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}, text),
    "DistilBertForMaskedLM": ({"vocab_size": 64, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}, text),
    "ElectraForMaskedLM": ({**_TEXT, "embedding_size": 8}, text),
    "ViTForImageClassification": (_IMAGE, image),
    "DeiTForImageClassification": (_IMAGE, image),
    "BeitForImageClassification": (_IMAGE, image),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}, image),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, image),
    "SwinForImageClassification": (
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        image),
    "CLIPModel": (
        {"text_config": _TEXT | {"projection_dim": 8}, "vision_config": _IMAGE | {"projection_dim": 8},
         "projection_dim": 8},
        image_and_text),
    "WhisperForConditionalGeneration": (
        {**_BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
         "decoder_start_token_id": 1}, spectrogram),
    "Wav2Vec2Model": (_SOUND, sound),
    "HubertModel": (_SOUND, sound),
    "MambaForCausalLM": ({"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}, text),
    "RwkvForCausalLM": (
        {"vocab_size": 64, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2,
         "context_length": 32},
        text),
    "XLNetLMHeadModel": ({"vocab_size": 64, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32}, text),
}  # fmt: skip

# One of each kind: a tied decoder, experts, shared layers, an encoder and a decoder, convolutions, weight norm, a scan.
IN_EVERY_RUN = [
    "GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "T5ForConditionalGeneration", "AlbertForMaskedLM",
    "ResNetForImageClassification", "Wav2Vec2Model", "MambaForCausalLM",
]  # fmt: skip


def configuration(name):
    cls = getattr(hf, name)
    return cls.config_class(**ARCHITECTURES[name][0])


def build(name):
    model = getattr(hf, name)(configuration(name))
    return model.train()


def inputs(name, size=2):
    return ARCHITECTURES[name][1](size)


def loss_of(model, given):
    """Mean square of the first output with values: one for every architecture, with or without a head."""
    out = model(**given, **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    tensors = [value for value in out.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    return sum(value.float().square().mean() for value in tensors)
