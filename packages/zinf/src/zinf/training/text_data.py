"""Text as bytes: where it comes from, how it is split, and which windows of it form the batch of a step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BUILTIN = "builtin"
TRAIN_FRACTION = 0.9


@dataclass(frozen=True)
class TextData:
    """A text cut into the part to learn from and, behind it, the part to be judged by."""

    train: np.ndarray  # (n,) uint8
    validation: np.ndarray  # (m,) uint8
    fingerprint: str  # SHA-256 of the whole text, so that a resumed run notices another text

    @classmethod
    def from_bytes(cls, text: bytes) -> TextData:
        """The first nine tenths to train on, the last tenth to validate with."""
        tokens = np.frombuffer(text, dtype=np.uint8)
        cut = int(len(tokens) * TRAIN_FRACTION)
        return cls(tokens[:cut], tokens[cut:], hashlib.sha256(text).hexdigest())


def read_text(source: str) -> bytes:
    """The bytes of the file `source`, or for "builtin" the documentation text that every CPython carries.

    Raises OSError when the file cannot be read and ValueError when it is empty.
    """
    if source == BUILTIN:
        # Some 465 KB of English about Python, present wherever this runs: nothing needs to be downloaded.
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    text = Path(source).read_bytes()
    if not text:
        raise ValueError(f"data file {source!r} is empty")
    return text


def check_sizes(data: TextData, *, batch: int, seq: int) -> None:
    """Raises ValueError unless both parts hold a sequence, and the training part a whole batch."""
    for part, tokens in (("training", data.train), ("validation", data.validation)):
        if len(tokens) < seq + 1:
            raise ValueError(f"--seq {seq} needs {seq + 1} bytes of {part} text; the data has {len(tokens)}")
    if batch * seq > len(data.train):
        raise ValueError(
            f"a batch of {batch} sequences of {seq} bytes is {batch * seq} bytes, "
            f"longer than the training text of {len(data.train)}"
        )


def training_batch(data: TextData, *, seed: int, step: int, batch: int, seq: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, each (batch, seq) int64.

    They depend on the seed and the number of the step alone, so a resumed run needs to know only where it stopped.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(data.train) - seq, size=batch)
    return _windows(data.train, starts, seq)


def validation_batches(data: TextData, *, batches: int, batch: int, seq: int) -> list[tuple[Tensor, Tensor]]:
    """Fixed windows, evenly spaced over the validation part; they overlap where it is short."""
    starts = np.linspace(0, len(data.validation) - seq - 1, num=batches * batch).astype(np.int64)
    return [_windows(data.validation, starts[i * batch : (i + 1) * batch], seq) for i in range(batches)]


def _windows(tokens: np.ndarray, starts: np.ndarray, seq: int) -> tuple[Tensor, Tensor]:
    # One byte more than the sequence: the target of each byte is the byte behind it.
    windows = torch.from_numpy(tokens[starts[:, None] + np.arange(seq + 1)].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
