"""What the hooks cost in Python: forward and backward of GPT blocks, beyond plain torch. Prints JSON.

Tiny operators, one rank, so that nothing but overhead is seen. Rows: plain torch; ours with shards that are never
resident (gathers, saved views, reductions); ours with all in memory (no hooks needed); FSDP2. Alternated, medians.

    python benchmarks/hook_overhead.py [--blocks 10 100] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import zero3
from zero3.shard_store import InMemoryStore


class Block(nn.Module):
    """12 parameters in 6 modules, as in GPT-2."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Distant(InMemoryStore):
    """Shards that are never viewed in place, as if they lay on another tier."""

    plain_gradients = False

    def resident(self, unit):
        return None


def model_of(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(16) for _ in range(blocks)])


def fsdp2(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def as_units(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        zero3.as_unit(block)
    return model


KINDS = {
    "plain": lambda model: model,
    "zero3": lambda model: zero3.shard(as_units(model), store=Distant(torch.device("cpu"))),
    "zero3, all in memory": lambda model: zero3.shard(as_units(model)),
    "fsdp2": fsdp2,
}


def step(model: nn.Module, x: torch.Tensor) -> float:
    start = time.process_time()  # of the CPU: other work on the machine does not count
    model(x).sum().backward()
    elapsed = time.process_time() - start
    model.zero_grad()
    return elapsed


def measure(blocks: int, rounds: int) -> dict:
    models = {kind: make(model_of(blocks)) for kind, make in KINDS.items()}
    x = torch.randn(1, 4, 16)
    times: dict[str, list[float]] = {kind: [] for kind in models}
    for number in range(rounds + 2):
        for kind, model in models.items():
            elapsed = step(model, x)
            if number >= 2:
                times[kind].append(elapsed)
    microseconds = {kind: statistics.median(values) / blocks * 1e6 for kind, values in times.items()}
    return {
        "blocks": blocks,
        "us_per_block": {kind: round(value, 1) for kind, value in microseconds.items()},
        "extra_us_per_block": {kind: round(value - microseconds["plain"], 1) for kind, value in microseconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29581")
    dist.init_process_group("gloo", rank=0, world_size=1)
    rows = [measure(blocks, arguments.rounds) for blocks in arguments.blocks]
    result = json.dumps({"torch": torch.__version__, "threads": 1, "rounds": arguments.rounds, "rows": rows}, indent=1)
    print(result)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
