"""The first kind of task: this package's GPT, from scratch, on the bytes of a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from zinf.models.gpt import GPT
from zinf.models.model_names import BYTE_VOCAB, parse_model
from zinf.training.text_source import read_text
from zinf.training.token_data import TokenData


class ByteGPT:
    """A GPT by name, and a text file as bytes. See `Task`."""

    vocab = BYTE_VOCAB  # however large the model's own vocabulary
    unit = "byte"
    prompt_length = 64

    def __init__(self, name: str, source: str, *, seq: int) -> None:
        """Raises ValueError for a name or sizes that cannot be, and OSError for a file that cannot be read."""
        self._config = parse_model(name, positions=seq)
        if self._config.vocab < BYTE_VOCAB:
            raise ValueError(f"text is read as bytes, which needs vocab >= {BYTE_VOCAB}, not {self._config.vocab}")
        self.identity = name
        self.numel = self._config.numel
        self.layers, self.hidden = self._config.layers, self._config.hidden
        self.data = TokenData.from_tokens(np.frombuffer(read_text(source), dtype=np.uint8))

    def build(self) -> nn.Module:
        return GPT(self._config)

    def load_weights(self, model: nn.Module) -> None:
        pass  # it starts from what it draws

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return model(tokens, targets)

    def next_logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens)[0, -1]

    def text_of(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")
