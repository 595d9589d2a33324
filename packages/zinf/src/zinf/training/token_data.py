"""A text as tokens: how it is split, and which windows of it form the batch of a step.

Tokens are bytes for a model of bytes, a tokenizer's numbers for others. The text is one long row of them, documents
one behind the other (packed), so every window is full and no token is padding.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TRAIN_FRACTION = 0.9


@dataclass(frozen=True)
class TokenData:
    """A text cut into the part to learn from and, behind it, the part to be judged by."""

    train: np.ndarray  # (n,) unsigned
    validation: np.ndarray  # (m,) unsigned
    fingerprint: str  # SHA-256 of all tokens, so that a resumed run notices another text or another tokenizer

    @classmethod
    def from_tokens(cls, tokens: np.ndarray) -> TokenData:
        """The first nine tenths of (n,) tokens to train on, the last tenth to validate with."""
        cut = int(len(tokens) * TRAIN_FRACTION)
        return cls(tokens[:cut], tokens[cut:], hashlib.sha256(tokens.tobytes()).hexdigest())


def check_sizes(data: TokenData, *, batch: int, seq: int, unit: str) -> None:
    """Raises ValueError unless both parts hold a sequence, and the training part a whole batch.

    `unit` is what a token is, for the message.
    """
    for part, tokens in (("training", data.train), ("validation", data.validation)):
        if len(tokens) < seq + 1:
            raise ValueError(f"--seq {seq} needs {seq + 1} {unit}s of {part} text; the data has {len(tokens)}")
    if batch * seq > len(data.train):
        raise ValueError(
            f"a batch of {batch} sequences of {seq} {unit}s is {batch * seq} {unit}s, "
            f"longer than the training text of {len(data.train)}"
        )


def training_batch(data: TokenData, *, seed: int, step: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, each (batch, seq) int64.

    They depend on the seed and the number of the step alone, so a resumed run needs to know only where it stopped.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(data.train) - seq, size=batch)
    return _windows(data.train, starts, seq)


def validation_batches(data: TokenData, *, batches: int, batch: int, seq: int) -> list[tuple[Tensor, Tensor]]:
    """Fixed windows, evenly spaced over the validation part; they overlap where it is short."""
    starts = np.linspace(0, len(data.validation) - seq - 1, num=batches * batch).astype(np.int64)
    return [_windows(data.validation, starts[i * batch : (i + 1) * batch], seq) for i in range(batches)]


def _windows(tokens: np.ndarray, starts: np.ndarray, seq: int) -> tuple[Tensor, Tensor]:
    # One token more than the sequence: the target of each token is the one behind it.
    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
