"""What is trained: a model, a text as its tokens, and how tokens become text again.

The loop knows nothing else of a model. A GPT of bytes (byte_gpt.py) and a Hugging Face directory
(hugging_face.py) are the two kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from zinf.training.settings import TrainSettings
from zinf.training.token_data import TokenData


class Task(Protocol):
    """A model to be trained, and its text. Shapes: B sequences, T tokens, V vocabulary."""

    identity: str  # the same for models whose checkpoints fit one another, and for no others
    numel: int  # parameters, each counted once
    layers: int  # blocks; 0 where nobody knows
    hidden: int  # width of what a block gives to the next
    data: TokenData
    vocab: int  # tokens that mean something: those from 0 to vocab - 1
    unit: str  # what a token is: "byte" or "token"
    prompt_length: int  # tokens of the validation text that the sample continues

    def build(self) -> nn.Module:
        """The model. Called inside `zinf.init`: each layer leaves for its tier as it is built."""

    def load_weights(self, model: nn.Module) -> None:
        """The values to start from, where they are not those that `build` draws. Collective.

        Raises CannotStart when they do not fit.
        """

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats, a float32 scalar; tokens and targets are (B, T) int64."""

    def next_logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Logits (V,) of the token behind the last of `tokens` (1, T) int64."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text that tokens stand for."""


def open_task(settings: TrainSettings) -> Task:
    """The task that the settings name; the text is read, the model not built.

    Raises OSError and ValueError for what cannot be read or does not fit, CannotStart for what is not installed.
    """
    if Path(settings.model).is_dir():
        from zinf.training.hugging_face import HuggingFaceModel  # transformers: only where it is asked for

        return HuggingFaceModel(Path(settings.model), settings.data, seq=settings.seq)
    from zinf.training.byte_gpt import ByteGPT

    return ByteGPT(settings.model, settings.data, seq=settings.seq)
