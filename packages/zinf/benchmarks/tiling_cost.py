"""What tiling costs by the number of tiles, and where tiling on one rank beats splitting over two.

    python packages/zinf/benchmarks/tiling_cost.py factors --nvme DIR [--hidden 1024 2048] [--tiles 1 2 4 8 16]
        [--tokens 512] [--rounds 7] [--json F]
    python packages/zinf/benchmarks/tiling_cost.py boundary --nvme DIR [--hidden 1024]
        [--tokens 32 128 512 2048] [--rounds 7] [--json F]

The model is the linear layers of a Transformer block (12 hidden² parameters, float32, attention's own products left
out), its states in host memory or on the drive. Steps alternate; a ratio is the median over rounds.

`factors`: a step with every layer in T tiles over the step with T = 1.

`boundary`: an operator of which no rank can hold more than half. One rank with two threads takes it in two tiles
(`tiled`); or two ranks with a thread each share the same work: each with half of every layer's weight and all tokens,
the halves' outputs summed over the ranks (`split`, the tensor slicing that the paper does without), or each with half
of the tokens, the weights partitioned and in two tiles (`partitioned`). Ratios are over `tiled`: above 1, tiling wins.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import put, settings, spread
from torch import Tensor, nn
from torch.nn import functional as F
from trainee import in_turn

import zinf
from zero3.testing import RankPools

TIERS = {"memory": "inf-cpu", "nvme": "inf-nvme"}


class Linears(nn.Module):
    """The linear layers of a block, or one of `shares` slices of each: (tokens, hidden) -> (tokens, hidden)."""

    def __init__(self, hidden: int, shares: int = 1):
        super().__init__()
        self.query_key_value = nn.Linear(hidden, 3 * hidden // shares, bias=False)
        self.projection = nn.Linear(hidden // shares, hidden, bias=False)
        self.widen = nn.Linear(hidden, 4 * hidden // shares, bias=False)
        self.narrow = nn.Linear(4 * hidden // shares, hidden, bias=False)
        self.sliced = shares > 1

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self._from_all(x)).chunk(3, dim=-1)
        x = x + self._of_all(self.projection(query * key.sigmoid() + value))
        return x + self._of_all(self.narrow(F.gelu(self.widen(self._from_all(x)), approximate="tanh")))

    def _from_all(self, x: Tensor) -> Tensor:
        return _SumInBackward.apply(x) if self.sliced else x

    def _of_all(self, part: Tensor) -> Tensor:
        return _SumInForward.apply(part) if self.sliced else part


class _SumInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad


class _SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class TrainedLinears:
    """Such a model in training."""

    def __init__(self, tier: str, drive: str, hidden: int, tokens: int, tiles: int, shares: int = 1, group: Any = None):
        config = zinf.Config.preset(TIERS[tier], nvme=[drive], dtype=torch.float32, resident=0, group=group)
        torch.manual_seed(0)
        with zinf.init(config):
            self.model = Linears(hidden, shares)
            for layer in self.model.children():
                zinf.tiled(layer, tiles)
        self.optimizer = zinf.AdamW(self.model.parameters(), lr=1e-4)
        self._x = torch.randn(tokens, hidden)

    def step(self) -> float:
        """Seconds."""
        begin = time.perf_counter()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


def over_first(taken: dict[Any, list[float]]) -> list[dict[str, Any]]:
    """Of each kind: its seconds, and its ratio to the first's in the same round."""
    first = next(iter(taken.values()))
    rows = []
    for name, seconds in taken.items():
        ratios = [one / base for one, base in zip(seconds, first, strict=True)]
        rows.append({"kind": name, "seconds": statistics.median(seconds), "ratio": spread(ratios)})
    return rows


# -- by the number of tiles -----------------------------------------------------------------------------------


def factors(drive: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for hidden in given.hidden:
        for tier in TIERS:
            trainees = {count: TrainedLinears(tier, drive, hidden, given.tokens[0], count) for count in given.tiles}
            taken = in_turn(trainees, 2 + given.rounds)
            taken = {count: seconds[2:] for count, seconds in taken.items()}  # the order of units is learned first
            rows.append({"hidden": hidden, "states": tier, "tiles": over_first(taken)})
    return rows


# -- one rank or two ------------------------------------------------------------------------------------------


def boundary(drive: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(2)
    pools, rows = RankPools(), []
    try:
        for hidden in given.hidden:
            for tier in TIERS:
                for tokens in given.tokens:
                    rows.append({"hidden": hidden, "states": tier, "tokens": tokens})
                    rows[-1]["kinds"] = one_or_two(pools, (tier, drive, hidden, tokens), given.rounds)
    finally:
        pools.close()
    return rows


def one_or_two(pools: RankPools, what: tuple, rounds: int) -> list[dict[str, Any]]:
    tiled = TrainedLinears(*what, tiles=2)
    taken: dict[str, list[float]] = {"tiled": [], "split": [], "partitioned": []}
    for number in range(2 + rounds):
        for kind, seconds in taken.items():
            if kind == "tiled":
                found = tiled.step()
            else:
                found = max(pools.run(step_on_rank, 2, kind, what, timeout=120))
            if number > 1:
                seconds.append(found)
    pools.run(forget, 2)
    return over_first(taken)


_of_this_rank: dict[str, TrainedLinears] = {}
_alone: list[Any] = []  # a group of this rank only


def step_on_rank(rank: int, world: int, kind: str, what: tuple) -> float:
    if kind not in _of_this_rank:
        if not _alone:
            _alone.append([dist.new_group([member]) for member in range(world)][rank])
        tier, drive, hidden, tokens = what
        if kind == "split":
            trainee = TrainedLinears(tier, drive, hidden, tokens, tiles=1, shares=world, group=_alone[0])
        else:
            trainee = TrainedLinears(tier, drive, hidden, tokens // world, tiles=world)
        _of_this_rank[kind] = trainee
    dist.barrier()
    return _of_this_rank[kind].step()


def forget(rank: int, world: int) -> None:
    _of_this_rank.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["factors", "boundary"])
    parser.add_argument("--nvme", required=True, help="a directory of the drive")
    parser.add_argument("--hidden", nargs="+", type=int)
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--tiles", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    measure, hidden, tokens = (
        (factors, [1024, 2048], [512]) if given.what == "factors" else (boundary, [1024], [32, 128, 512, 2048])
    )
    given.hidden, given.tokens = given.hidden or hidden, given.tokens or tokens
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="tiling-cost-") as drive:
        rows = measure(drive, given)
    put({"settings": settings(given), "rows": rows}, given.json)


if __name__ == "__main__":
    main()
