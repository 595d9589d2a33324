"""Trains a Transformer written in jax, its parameters and optimizer states on a drive.

    pip install 'zinf[jax]'
    python examples/jax_on_nvme.py --nvme /mnt/nvme

Each block is one JaxModule: read from the drive when it runs, forward and backward, and let go again.
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.nn import functional as F

import zinf

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH = 32, 64, 4, 3, 12


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def embed(params, tokens):
    return params["tokens"][tokens] + params["places"][: tokens.shape[1]]


def block(params, x):
    """(batch, length, hidden) -> the same: causal attention, then a multi-layer perceptron."""
    batch, length, _ = x.shape
    q, k, v = jnp.split(normalised(x) @ params["qkv"], 3, axis=-1)
    q, k, v = (heads.reshape(batch, length, HEADS, -1) for heads in (q, k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(normalised(x) @ params["up"]) @ params["down"]


def head(params, x):
    return normalised(x) @ params["kernel"]


def random_params(key, **shapes):
    keys = jax.random.split(key, len(shapes))
    return {name: 0.1 * jax.random.normal(one, shape) for one, (name, shape) in zip(keys, shapes.items(), strict=True)}


def build() -> nn.Module:
    keys = jax.random.split(jax.random.key(0), LAYERS + 2)
    shapes = {
        "qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN), "up": (HIDDEN, 4 * HIDDEN), "down": (4 * HIDDEN, HIDDEN),
    }  # fmt: skip
    return nn.Sequential(
        zinf.jax.JaxModule(embed, random_params(keys[0], tokens=(VOCAB, HIDDEN), places=(LENGTH, HIDDEN))),
        *(zinf.jax.JaxModule(block, random_params(key, **shapes)) for key in keys[1:-1]),
        zinf.jax.JaxModule(head, random_params(keys[-1], kernel=(HIDDEN, VOCAB))),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", help="a directory of the drive (a temporary one)")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    drive = arguments.nvme or tempfile.mkdtemp()
    config = zinf.Config.preset("inf-nvme", nvme=[drive], dtype=torch.float32, resident=0)
    with zinf.init(config):  # each block goes to the drive as it is built
        model = build()
    optimizer = zinf.AdamW(model.parameters(), lr=3e-3, grad_clip=1.0)

    for step in range(arguments.steps):
        counting = (torch.randint(0, VOCAB, (16, 1)) + torch.arange(LENGTH + 1)) % VOCAB
        logits = model(counting[:, :-1])  # torch tensors in and out
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
    block_params = model[1].to_pytree()  # back to jax
    print("first block:", ", ".join(f"{name} {array.shape}" for name, array in block_params.items()))


if __name__ == "__main__":
    main()
