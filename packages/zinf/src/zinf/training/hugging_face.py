"""The second kind of task: any causal language model in Hugging Face's layout, fine-tuned on text or conversations.

A directory holds the configuration, safetensors and a tokenizer. Needs transformers (the extra `zinf[hf]`); nothing
is fetched from anywhere, and no code out of the directory is run.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zinf.errors import CheckpointError
from zinf.models.widened_linear import widen_linear_layers
from zinf.safetensors_loading import load_pretrained
from zinf.training.faults import CannotStart, describe
from zinf.training.head_loss import HeadLoss
from zinf.training.text_source import Messages, read_documents
from zinf.training.token_data import TokenData

try:
    import transformers
    from transformers.initialization import no_init_weights
except ImportError as error:
    raise CannotStart("a directory as --model needs transformers 5 or newer: pip install 'zinf[hf]'") from error

CONFIG = "config.json"


class HuggingFaceModel:
    """A causal language model and its tokenizer, and a text. See `Task`."""

    unit = "token"
    prompt_length = 16

    def __init__(self, directory: Path, source: str, *, seq: int) -> None:
        """Raises ValueError or OSError, naming the directory, for what is missing in it or does not fit."""
        logging.getLogger("transformers").setLevel(logging.ERROR)  # what it has to say is said by our own errors
        self._directory = directory
        self._config = _read_config(directory)
        _check_positions(self._config, directory, seq)
        self._tokenizer = _read_tokenizer(directory)
        self.numel, embeddings = _measure(self._config, directory)
        sizes = self._config.get_text_config()
        self.layers, self.hidden = (getattr(sizes, name, 0) for name in ("num_hidden_layers", "hidden_size"))
        self.vocab = len(self._tokenizer)
        if self.vocab > embeddings:
            raise ValueError(f"{directory}: the tokenizer has {self.vocab} tokens, the model {embeddings} embeddings")
        content = (directory / CONFIG).read_bytes()
        self.identity = f"{self._config.model_type} {hashlib.sha256(content).hexdigest()[:12]}"
        self.data = TokenData.from_tokens(_tokenize(self._tokenizer, directory, source))

    def build(self) -> nn.Module:
        with no_init_weights():  # all values come from the directory or from a checkpoint: drawing them takes long
            model = transformers.AutoModelForCausalLM.from_config(self._config)
        model.tie_weights()  # which is left out with the drawing
        widen_linear_layers(model)
        self._head_loss = HeadLoss(model)
        return model

    def load_weights(self, model: nn.Module) -> None:
        try:
            load_pretrained(model, self._directory)
        except (RuntimeError, CheckpointError, OSError) as error:  # names or shapes that differ; damage; not there
            raise CannotStart(f"{self._directory}: {describe(error)}") from error

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        if self._head_loss.wanted(tokens):
            return self._head_loss(tokens, targets)
        logits = model(input_ids=tokens, use_cache=False).logits
        # In float32 whatever the parameters are: a bf16 sum over the vocabulary would lose the small terms.
        return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())

    def next_logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        # Not every architecture can be asked for the last row alone.
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        return model(input_ids=tokens, use_cache=False, **last).logits[0, -1]

    def text_of(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)


# -- the directory --------------------------------------------------------------------------------------------

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def _read_config(directory: Path) -> Any:
    if not (directory / CONFIG).is_file():
        raise ValueError(f"model directory {directory} has no {CONFIG}")
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **_LOCAL)
    except Exception as error:  # whatever stands in the file; transformers has no error of its own for that
        raise ValueError(f"{directory / CONFIG} cannot be read: {describe(error)}") from error
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{directory} is quantized, which cannot be trained: give the model in full precision")
    return config


def _check_positions(config: Any, directory: Path, seq: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and seq > longest:
        raise ValueError(f"--seq {seq} is longer than the {longest} positions of {directory}")


def _read_tokenizer(directory: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, **_LOCAL)
    except Exception as error:  # as with the configuration
        raise ValueError(f"{directory} has no tokenizer that can be read: {describe(error)}") from error


def _measure(config: Any, directory: Path) -> tuple[int, int]:
    """Parameters of the model, and rows of its token embedding. No memory is taken for either."""
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # an architecture that is no causal language model, sizes that make no model
        raise ValueError(f"{directory} is no causal language model: {describe(error)}") from error
    return sum(param.numel() for param in model.parameters()), model.get_input_embeddings().weight.shape[0]


# -- the text -------------------------------------------------------------------------------------------------


def _tokenize(tokenizer: Any, directory: Path, source: str) -> np.ndarray:
    """All documents of `source` as one row of tokens, (n,) uint32."""
    parts = [np.asarray(tokens, dtype=np.uint32) for tokens in _documents(tokenizer, directory, source)]
    if not parts:
        raise ValueError(f"data file {source!r} holds no document")
    return np.concatenate(parts)


def _documents(tokenizer: Any, directory: Path, source: str) -> Iterator[list[int]]:
    """A text ends with the end-of-text token, where there is one; a conversation as its template says."""
    end = tokenizer.eos_token_id
    for document in read_documents(source):
        if isinstance(document, str):
            tokens = tokenizer(document, verbose=False)["input_ids"]
            yield tokens if end is None or tokens[-1:] == [end] else [*tokens, end]
        else:
            yield _conversation(tokenizer, directory, document)


def _conversation(tokenizer: Any, directory: Path, messages: Messages) -> list[int]:
    if not tokenizer.chat_template:
        raise ValueError(f'the data holds "messages", but the tokenizer in {directory} has no chat template')
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # a template may refuse roles, or their order
        raise ValueError(f"the chat template in {directory} refuses a conversation: {describe(error)}") from error
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
