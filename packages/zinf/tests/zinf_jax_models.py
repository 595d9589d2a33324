"""What the tests make JaxModules of: a layer, and a small language model in jax with its training. Needs jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from zinf_testing import SETTINGS

import zinf
from zinf.jax_calls import Compiled

WIDTH, HEADS, VOCABULARY, LAYERS = 16, 2, 40, 3
BOTH_WAYS = pytest.mark.parametrize("recompute", [True, False], ids=["again", "kept"])


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def embed(params, tokens):
    return params["tokens"][tokens] + params["places"][: tokens.shape[1]]


def block(params, x):
    batch, length, width = x.shape
    q, k, v = jnp.split(normalised(x) @ params["attention"]["in"], 3, axis=-1)
    q, k, v = (t.reshape(batch, length, HEADS, -1).swapaxes(1, 2) for t in (q, k, v))
    scores = jnp.where(jnp.tri(length, dtype=bool), q @ k.swapaxes(2, 3) / np.sqrt(width // HEADS), -jnp.inf)
    mixed = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
    x = x + mixed @ params["attention"]["out"]
    (up, bias), down = params["mlp"]
    return x + jax.nn.gelu(normalised(x) @ up + bias) @ down


def head(params, x):
    return normalised(x) @ params


def init_embed(random):
    return {"tokens": random(VOCABULARY, WIDTH), "places": random(8, WIDTH)}


def init_block(random):
    attention = {"in": random(WIDTH, 3 * WIDTH), "out": random(WIDTH, WIDTH)}
    return {"attention": attention, "mlp": ((random(WIDTH, 2 * WIDTH), random(2 * WIDTH)), random(2 * WIDTH, WIDTH))}


def init_head(random):
    return random(WIDTH, VOCABULARY)


def initial_params(seed=1):
    """Of the whole model: a list, one pytree a layer."""
    numbers = np.random.default_rng(seed)

    def random(*shape):
        return jnp.asarray(numbers.standard_normal(shape, dtype=np.float32) / 4)

    return [init_embed(random), *(init_block(random) for _ in range(LAYERS)), init_head(random)]


FUNCTIONS = [embed, *[block] * LAYERS, head]
PROGRAMS = [Compiled.of(function) for function in FUNCTIONS]  # to compile takes seconds: once for all tests


class Language(nn.Module):
    """The model out of JaxModules, with the loss in torch."""

    def __init__(self, recompute=True, seed=1):
        super().__init__()
        first, *blocks, last = (
            zinf.jax.JaxModule(function, params, recompute=recompute)
            for function, params in zip(FUNCTIONS, initial_params(seed), strict=True)
        )
        self.embed, self.blocks, self.head = first, nn.ModuleList(blocks), last

    def forward(self, tokens):
        x = self.embed(tokens)
        for one in self.blocks:
            x = one(x)
        return self.head(x)

    def loss(self, tokens):
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def data(step, size=4, length=6):
    return torch.randint(0, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(step))


def jax_loss(params, tokens):
    x = tokens
    for function, part in zip(FUNCTIONS, params, strict=True):
        x = function(part, x)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(x[:, :-1]), tokens[:, 1:, None], axis=-1)
    return -chosen.mean()


def named(params):
    """The whole model's pytree under the module's names, in their order (a module's own parameters come first)."""
    modules = ["embed", *(f"blocks.{i}" for i in range(LAYERS)), "head"]
    flat = {}
    for module, part in zip(modules, params, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            keys = (str(getattr(key, "key", getattr(key, "idx", None))) for key in path)
            flat[".".join([module, "params", *keys])] = torch.tensor(np.asarray(leaf))
    return {name: flat.pop(name) for name, _ in Language().named_parameters()} | flat


def train(model, optimizer, steps, rank=0, world=1):
    losses = []
    for step in steps:
        loss = model.loss(data(step).chunk(world)[rank])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def offloaded(cfg, **arguments):
    model = zinf.shard(Language(**arguments), cfg)
    return model, zinf.AdamW(model.parameters(), **SETTINGS)


# -- one layer -----------------------------------------------------------------------------------------------------


def layer(params, x, scale=1.0):
    hidden = jnp.tanh(x @ params["w"] + params["b"]) * scale
    return {"out": hidden @ params["last"][0], "most": jnp.argmax(hidden, axis=-1)}


def random_array(seed, shape, dtype):
    """Drawn by numpy: jax would compile a program for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype)))


def layer_params(dtype="float32"):
    made = {"w": (6, 8), "b": (8,), "last": (8, 3)}
    made = {name: random_array(seed, shape, dtype) for seed, (name, shape) in enumerate(made.items())}
    return {**made, "last": [made["last"], jnp.arange(3)]}
