"""Text drawn from a model, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zinf.training.task import Task


@torch.no_grad()
def sample(
    task: Task,
    model: nn.Module,
    prompt: Sequence[int],
    *,
    length: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> list[int]:
    """`length` tokens that continue `prompt`, each drawn from the model's distribution at `temperature`.

    Fewer, where the model gives no numbers any more.

    At most the last `context` tokens are shown to the model. Every rank must call it, with the same arguments: each
    draws the same tokens, since the logits and the generator are the same everywhere.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = task.next_logits(model, window)[: task.vocab].float().cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        if probabilities.isnan().any():
            break  # a model whose training has diverged has nothing to say
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train()
    return tokens[len(prompt) :]


def printable(text: str) -> str:
    """The text for a terminal: control characters are dropped."""
    return "".join(c for c in text if c.isprintable() or c == "\n")
