"""Trains a small Transformer from scratch, its parameters and optimizer states on a drive.

    python examples/pretrain.py --nvme /mnt/nvme

Only the lines marked with # <- differ from a plain PyTorch script.
"""

import argparse
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

import zinf


class Model(nn.Module):
    """Predicts each next number of a counting sequence."""

    def __init__(self, vocab: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", help="a directory of the drive (a temporary one)")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    drive = arguments.nvme or tempfile.mkdtemp()
    config = zinf.Config.preset("inf-nvme", nvme=[drive], dtype=torch.float32, resident=0)  # <-
    with zinf.init(config):  # <- each layer goes to the drive as it is built
        model = Model(vocab=32, hidden=64, layers=3)
    optimizer = zinf.AdamW(model.parameters(), lr=3e-3, grad_clip=1.0)  # <-

    for step in range(arguments.steps):
        counting = (torch.randint(0, 32, (16, 1)) + torch.arange(13)) % 32
        logits = model(counting[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), counting[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == arguments.steps - 1:
            moved = zinf.report(model)["bytes"]
            print(
                f"step {step}: loss {loss.item():.3f}, read {moved['nvme_read'] / 1e6:.1f} MB, "
                f"written {moved['nvme_written'] / 1e6:.1f} MB"
            )


if __name__ == "__main__":
    main()
