"""A failure on one rank reaches all: nobody waits for a rank that will not come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zero3.partitioned_model import PartitionedModel

from .errors import CheckpointError

_MESSAGE_BYTES = 1000


@contextmanager
def together(machinery: PartitionedModel, what: str) -> Iterator[None]:
    """The block ends well on every rank, or on none: where one fails, the others raise with its message."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    ranks = machinery.ranks
    texts = torch.zeros(ranks.size, _MESSAGE_BYTES, dtype=torch.int32)
    if failure is not None:
        text = f"{type(failure).__name__}: {failure}".encode()[:_MESSAGE_BYTES]
        texts[ranks.rank, : len(text)] = torch.tensor(list(text), dtype=torch.int32)
    ranks.sum(texts, what)
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text.any():
            message = bytes(text[text > 0].tolist()).decode(errors="replace")
            raise CheckpointError(f"rank {rank} failed at {what}: {message}")
