"""What the hooks cost in Python: forward and backward of GPT blocks, beyond plain torch. Prints JSON.

Tiny operators, one rank, so that nothing but overhead is seen. Rows: plain torch once more (what it shows is noise);
ours with shards that are never resident (gathers, saved views, reductions); ours with all in memory (no hooks needed);
hooks that do nothing, as many as those of the first row of ours; a bare program of hooks that gathers and reduces (no
pool, states, checks, errors, other models, or anything but these blocks); FSDP2. Each by its ratio to the plain step
beside it, times the median plain step: medians, and their quartiles.

    python benchmarks/hook_overhead.py [--blocks 10 100] [--rounds 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from bisect import bisect_right

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


def empty_hooks(model: nn.Sequential) -> nn.Sequential:
    """As many hooks as ours: for every saved tensor, before and after every block, for every gradient."""

    def same(tensor):
        return tensor

    def nothing(*_):
        pass

    autograd = torch._C._autograd
    model.register_forward_pre_hook(lambda *_: autograd._push_saved_tensors_default_hooks(same, same))
    model.register_forward_hook(lambda *_: autograd._pop_saved_tensors_default_hooks())
    for block in model:
        block.register_forward_pre_hook(nothing)
        block.register_forward_hook(nothing)
        for param in block.parameters():
            param.register_post_accumulate_grad_hook(nothing)
    return model


class Released(nn.Parameter):
    """Whose uses would be noticed."""

    _data = torch._C.TensorBase.data

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Gathered(nn.Parameter):
    _data = torch._C.TensorBase.data


class BareBlock:
    """Gathers a block's parameters into one buffer when forward or backward needs them, and reduces their gradients.

    The buffer is its own, and every view of it that was ever asked for lies ready.
    """

    def __init__(self, block: nn.Module):
        self.params = list(block.parameters())
        shapes = [param.shape for param in self.params]
        self.shard = torch.cat([param.detach().reshape(-1) for param in self.params])
        self.buffer, self.flat, self.reduced = (torch.empty_like(self.shard) for _ in range(3))
        sizes = [shape.numel() for shape in shapes]
        self.views = [part.view(shape) for part, shape in zip(self.buffer.split(sizes), shapes, strict=True)]
        self.grads = [part.view(shape) for part, shape in zip(self.flat.split(sizes), shapes, strict=True)]
        self.absent = [torch.full((), float("nan")).expand(shape) for shape in shapes]
        self.bounds = self.buffer.data_ptr(), self.buffer.data_ptr() + self.buffer.nbytes
        self.ready: dict[tuple, torch.Tensor] = {}
        self.there, self.missing = False, len(self.params)
        block.register_forward_pre_hook(self.gather)
        block.register_forward_hook(self.release)
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.arrived)
        self.release()

    def gather(self, *_) -> None:
        self.buffer.copy_(self.shard)
        for param, view in zip(self.params, self.views, strict=True):
            param._data = view
            param.__class__ = Gathered

    def release(self, *_) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for param, absent in zip(self.params, self.absent, strict=True):
                param.__class__ = Released
                param._data = absent

    def view(self, place: tuple) -> torch.Tensor:
        if not self.there:
            self.buffer.copy_(self.shard)
            self.there = True
        if place not in self.ready:
            self.ready[place] = self.buffer.as_strided(*place)
        return self.ready[place]

    def arrived(self, _) -> None:
        self.missing -= 1
        if self.missing:
            return
        self.missing, self.there = len(self.params), False
        with torch._C.DisableTorchFunctionSubclass():
            torch._foreach_copy_(self.grads, [param.grad for param in self.params])
            for param in self.params:
                param.grad = None
        self.reduced.copy_(self.flat)


def bare_hooks(model: nn.Sequential) -> nn.Sequential:
    blocks = [BareBlock(block) for block in model]
    owners = {block.bounds[0]: block for block in blocks}
    bounds = sorted(bound for block in blocks for bound in block.bounds)

    def pack(tensor: torch.Tensor):
        address = tensor.data_ptr()
        found = bisect_right(bounds, address)
        if found & 1:
            block = owners[bounds[found - 1]]
            return block, (tensor.shape, tensor.stride(), (address - block.bounds[0]) // tensor.itemsize)
        return tensor.detach() if tensor.requires_grad else tensor

    def unpack(packed) -> torch.Tensor:
        if type(packed) is tuple:
            block, place = packed
            return block.view(place)
        return packed

    autograd = torch._C._autograd
    model.register_forward_pre_hook(lambda *_: autograd._push_saved_tensors_default_hooks(pack, unpack))
    model.register_forward_hook(lambda *_: autograd._pop_saved_tensors_default_hooks())
    return model


def as_units(model: nn.Sequential) -> nn.Sequential:
    for block in model:
        zero3.as_unit(block)
    return model


KINDS = {
    "plain again": lambda model: model,
    "zero3": lambda model: zero3.shard(as_units(model), store=Distant(torch.device("cpu"))),
    "zero3, all in memory": lambda model: zero3.shard(as_units(model)),
    "empty hooks": empty_hooks,
    "bare hooks": bare_hooks,
    "fsdp2": fsdp2,
}


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Microseconds of forward and backward, with the collections of garbage that they cause."""
    gc.collect()  # they pay for nobody else's
    start = time.process_time()  # of the CPU: other work on the machine does not count
    model(x).sum().backward()
    elapsed = (time.process_time() - start) * 1e6
    model.zero_grad()
    return elapsed


def pair(plain: nn.Module, model: nn.Module, x: torch.Tensor, plain_first: bool) -> tuple[float, float]:
    """Steps of both, one right after the other."""
    if plain_first:
        before = step(plain, x)
        return before, step(model, x)
    mine = step(model, x)
    return step(plain, x), mine


def measure(blocks: int, rounds: int) -> dict:
    """Each round pairs every kind with a step of the plain model, in turns first and second; kinds in turns too."""
    x = torch.randn(1, 4, 16)
    plain = model_of(blocks)
    models = {kind: make(model_of(blocks)) for kind, make in KINDS.items()}
    kinds = list(models)
    pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for number in range(-2, rounds):  # two to warm up
        if number == 0:
            gc.collect()
            gc.freeze()  # a collection looks at what steps leave, not at torch and all models
        first = number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            times = pair(plain, models[kind], x, plain_first=number % 2 == 0)
            if number >= 0:
                pairs[kind].append(times)
    gc.unfreeze()
    # A machine that others share is fast for a while and slow for a while: the two steps of a pair meet the same.
    plain_us = statistics.median(before for kind in kinds for before, _ in pairs[kind]) / blocks
    extra = {kind: [(mine / before - 1) * plain_us for before, mine in pairs[kind]] for kind in kinds}
    medians = {kind: statistics.median(values) for kind, values in extra.items()}
    return {
        "blocks": blocks,
        "rounds": rounds,
        "plain_us_per_block": round(plain_us, 1),
        "extra_us_per_block": {kind: round(value, 1) for kind, value in medians.items()},
        "quartiles": {
            kind: [round(value, 1) for value in statistics.quantiles(values)[::2]] for kind, values in extra.items()
        },
        "part_of_fsdp2": {kind: round(medians[kind] / medians["fsdp2"], 3) for kind in kinds if kind != "fsdp2"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=30, help="of 100 blocks; more where they are fewer")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29581")
    dist.init_process_group("gloo", rank=0, world_size=1)
    rows = [measure(blocks, max(arguments.rounds * 100 // blocks, 5)) for blocks in arguments.blocks]
    result = json.dumps({"torch": torch.__version__, "threads": 1, "rows": rows}, indent=1)
    print(result)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
