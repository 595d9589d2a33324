"""What the tests of this package share: models, a store that is never resident, and a runner of several ranks."""

from __future__ import annotations

import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from zero3.shard_store import InMemoryStore


class DistantStore(InMemoryStore):
    """Shards are never viewed in place, and nothing is torch's own: one rank goes through the whole machinery."""

    plain_gradients = False

    def resident(self, unit):
        return None


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


class SmallGPT(nn.Module):
    """Embedding tied to the head by using its weight from outside, blocks, a scale kept in a plain list."""

    def __init__(self, width=32, layers=4, vocabulary=50):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.holder = nn.Linear(width, 1)
        self.listed = [self.holder.weight]

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.lstm(x)[0] * self.listed[0]
        return self.norm(x) @ self.embedding.weight.t()

    def loss(self, tokens):
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step, size=4, length=12, vocabulary=50):
    return torch.randint(0, vocabulary, (size, length), generator=torch.Generator().manual_seed(step))


def _entry(rank, world, port, function, args, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group("gloo", rank=rank, world_size=world)
        results[rank] = ("ok", function(rank, world, *args))
    except BaseException:
        results[rank] = ("failed", traceback.format_exc())
        os._exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def ranks():
    """Run `function(rank, world, *args)` on `world` gloo ranks; returns the results; the first failure's text wins."""

    def run(function, world, *args, timeout=120):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with mp.Manager() as manager:
            results = manager.dict()
            context = mp.get_context("spawn")
            processes = [
                context.Process(target=_entry, args=(rank, world, port, function, args, results), daemon=True)
                for rank in range(world)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join(timeout)
            hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
            for process in processes:
                process.kill()
            failures = [f"rank {rank}:\n{text}" for rank, (state, text) in sorted(results.items()) if state == "failed"]
            assert not failures, "\n".join(failures)
            assert not hung, f"ranks {hung} still ran after {timeout} s"
            return [results[rank][1] for rank in range(world)]

    return run
