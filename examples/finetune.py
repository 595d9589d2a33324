"""Fine-tunes a model that exists already: moved to the drive in place, its lower half frozen, saved and taken up again.

python examples/finetune.py --nvme /mnt/nvme --out run
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import zero3
import zinf


def pretrained() -> nn.Module:
    """Stands for a model that was loaded from somewhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


def on_the_drive(drive: str) -> tuple[nn.Module, zinf.AdamW]:
    """The model with its lower half frozen, and an optimizer for the rest."""
    model = pretrained()
    for layer in model[:2]:
        layer.requires_grad_(False)  # read from the drive when it is used, never written
    config = zinf.Config.preset("inf-nvme", nvme=[drive], dtype=torch.float32, resident=0)
    model = zinf.shard(model, config)
    optimizer = zinf.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    return model, optimizer


def train(model: nn.Module, optimizer: zinf.AdamW, steps: int) -> float:
    """Learns the sum of the inputs; returns the last loss."""
    for _ in range(steps):
        x = torch.randn(64, 16)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", help="a directory of the drive (a temporary one)")
    parser.add_argument("--out", type=Path, help="where the checkpoint goes (a temporary folder)")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    drive = arguments.nvme or tempfile.mkdtemp()
    out = arguments.out or Path(tempfile.mkdtemp())

    model, optimizer = on_the_drive(drive)
    print(f"loss {train(model, optimizer, steps=1):.3f} before")
    print(f"loss {train(model, optimizer, arguments.steps):.3f} after {arguments.steps} steps")
    saved = zinf.save(out, model, optimizer, extra={"steps": arguments.steps})
    print(f"saved {saved.nbytes:,} bytes in {saved.path}")

    # Later, in another process, perhaps on another number of ranks:
    model, optimizer = on_the_drive(drive)
    extra = zinf.load(out, model, optimizer)
    print(f"loss {train(model, optimizer, steps=1):.3f} after {extra['steps']} steps and a restart")

    # Out again, as a plain model: one tensor at a time comes from the drive.
    plain = pretrained()
    plain.load_state_dict(dict(zero3.state_dict(model)))


if __name__ == "__main__":
    main()
