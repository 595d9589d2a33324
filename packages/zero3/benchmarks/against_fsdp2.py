"""Step time of a GPT on two gloo ranks: zero3 beside FSDP2 and DistributedDataParallel, in one alternated run.

Forward and backward in float32, same units (one a block), medians and minima of rank 0 in milliseconds, and the
ratios. Prints JSON. A hundred million parameters take 0.6 TFLOP a step and rank at 1,024 tokens; a rank has one thread:

    python benchmarks/against_fsdp2.py --tokens 256
    python benchmarks/against_fsdp2.py --tokens 1024 --kinds zero3 "zero3, shard=()" ddp
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hook_overhead import Block, as_units
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import zero3


class GPT(nn.Module):
    def __init__(self, layers: int, hidden: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.Sequential(*[Block(hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.norm(self.blocks(self.embedding(tokens))) @ self.embedding.weight.t()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def fsdp2(model: GPT) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def zero3_on(model: GPT, shard: tuple[str, ...]) -> nn.Module:
    as_units(model.blocks)
    return zero3.shard(model, shard=shard)


KINDS = {
    "zero3": lambda model: zero3_on(model, ("params", "grads", "optimizer")),
    "zero3, shard=()": lambda model: zero3_on(model, ()),
    "fsdp2": fsdp2,
    "ddp": DistributedDataParallel,
}


def step(model: nn.Module, tokens: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    model(tokens).backward()
    for param in model.parameters():  # zero3 waits for the last reductions here
        if param.grad is not None:
            break
    dist.barrier()
    elapsed = time.perf_counter() - start
    model.zero_grad()
    return elapsed


def run(rank: int, world: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    sizes = (arguments.layers, arguments.hidden, arguments.vocabulary)
    models = {}
    for kind in arguments.kinds:
        torch.manual_seed(0)
        models[kind] = KINDS[kind](GPT(*sizes))
    tokens = torch.randint(
        0, arguments.vocabulary, (1, arguments.tokens), generator=torch.Generator().manual_seed(rank)
    )
    times: dict[str, list[float]] = {kind: [] for kind in models}
    for number in range(arguments.rounds + 1):
        for kind, model in models.items():
            elapsed = step(model, tokens)
            if number:
                times[kind].append(1e3 * elapsed)
    if rank == 0:
        report(arguments, world, times)
    dist.destroy_process_group()


def report(arguments: argparse.Namespace, world: int, times: dict[str, list[float]]) -> None:
    median = {kind: statistics.median(values) for kind, values in times.items()}
    least = {kind: min(values) for kind, values in times.items()}
    pairs = [(a, b) for a in times for b in times if a.startswith("zero3") and b in ("fsdp2", "ddp")]
    result = {
        "torch": torch.__version__,
        "ranks": world,
        "threads_a_rank": 1,
        "parameters": sum(
            p.numel() for p in GPT(arguments.layers, arguments.hidden, arguments.vocabulary).parameters()
        ),
        "tokens_a_rank": arguments.tokens,
        "ms": {kind: {"median": round(median[kind], 1), "min": round(least[kind], 1)} for kind in times},
        "ratio": {f"{a} / {b}": round(median[a] / median[b], 3) for a, b in pairs},
        "ratio_of_minima": {f"{a} / {b}": round(least[a] / least[b], 3) for a, b in pairs},
        "ratio_by_round": {f"{a} / {b}": _by_round(times[a], times[b]) for a, b in pairs},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(text)


def _by_round(one: list[float], other: list[float]) -> list[float]:
    return [round(a / b, 3) for a, b in zip(one, other, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("layers", 12),
        ("hidden", 768),
        ("vocabulary", 16384),
        ("tokens", 1024),
        ("rounds", 5),
        ("ranks", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, (arguments.ranks, port, arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
