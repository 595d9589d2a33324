"""Text drawn from a model, byte by byte."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: bytes,
    *,
    length: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> bytes:
    """`length` bytes that continue `prompt`, each drawn from the model's distribution at `temperature`.

    At most the last `context` bytes are shown to the model. Every rank must call it, with the same arguments: each
    draws the same bytes, since the logits and the generator are the same everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = model(window)[0, -1, :256].float().cpu()  # bytes only, however large the vocabulary
        probabilities = torch.softmax(logits / temperature, dim=-1)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens[len(prompt) :])


def printable(text: bytes) -> str:
    """The text for a terminal: control characters are dropped, and what is no UTF-8 is marked."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c for c in decoded if c.isprintable() or c == "\n")
