"""What the tests of this package share: a store that is never resident, plain training, and several ranks."""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zero3.shard_store import InMemoryStore


class DistantStore(InMemoryStore):
    """Shards are never viewed in place, and nothing is torch's own: one rank goes through the whole machinery."""

    plain_gradients = False

    def __init__(self):
        super().__init__(torch.device("cpu"))

    def resident(self, unit):
        return None


def parts(data, world):
    """The batch of each rank."""
    return data.chunk(world)


def plain_gradients(model, data, world=1):
    """Gradients of the plain model: each rank's on its part of the batch, then their mean. Returns (loss, grads)."""
    losses, sums = [], {}
    for part in parts(data, world):
        model.zero_grad()
        loss = model.loss(part)
        loss.backward()
        losses.append(loss.item())
        for name, param in model.named_parameters():
            if param.grad is not None:
                grad = param.grad.clone()
                sums[name] = grad if name not in sums else sums[name] + grad
    for name, param in model.named_parameters():
        param.grad = sums[name] / world if name in sums else None
    return losses, {name: grad.clone() for name, grad in gradients_of(model).items()}


def gradients_of(model):
    """A plain model's own gradients."""
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train_plain(model, steps, world=1, optimizer=adamw, size=4):
    """Plain training; returns (losses of every rank and step, final state)."""
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        losses.append(plain_gradients(model, model.data(step, size), world)[0])
        opt.step()
        opt.zero_grad()
    return losses, state_of(model)


def train_sharded(model, steps, rank=0, world=1, optimizer=adamw, size=4):
    """The ordinary loop on a partitioned model; returns (this rank's losses, final state)."""
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(steps):
        loss = model.loss(parts(model.data(step, size), world)[rank])
        loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return losses, state_of(model)


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found, wanted):
    """Bit-equal tensors under the same names in the same order."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), f"{name} differs by {_difference(found[name], value)}"


def assert_close(found, wanted, relative=1e-5, floor=1e-8):
    """Largest difference at most `relative` of that tensor's largest entry, or `floor` of the largest of all."""
    assert list(found) == list(wanted)
    largest = max((value.abs().max().item() for value in wanted.values() if value.numel()), default=0.0)
    for name, value in wanted.items():
        if value.numel():
            bound = max(relative * value.abs().max().item(), floor * largest)
            assert _difference(found[name], value) <= bound, f"{name} differs by {_difference(found[name], value)}"


def _difference(one, other):
    return (one.detach().double() - other.detach().double()).abs().max().item()


def at_rest(model):
    """Nothing is gathered and nothing is in flight."""
    import zero3

    return all(str(unit.state) == "SHARDED" and unit.holds == 0 for unit in zero3.units(model))


def full_gradients(model):
    """Every parameter's whole gradient on every rank, by summing the ranks' pieces in place. Collective."""
    full = {}
    for name, param in model.named_parameters():
        grad = param.grad
        if grad is None:
            continue
        slot = getattr(param, "_zero3", None)
        if slot is None or slot.unit.plain or slot.unit.model.shard_ranks == 1:
            full[name] = grad.as_subclass(torch.Tensor).clone()
            continue
        whole = torch.zeros(slot.numel, dtype=grad.dtype)
        begin = slot.unit.rank * slot.unit.shard_numel + slot.start - slot.offset
        whole[begin : begin + grad.numel()] = grad.as_subclass(torch.Tensor).reshape(-1)
        dist.all_reduce(whole)
        full[name] = whole.view(slot.shape)
    return full


# -- several ranks --------------------------------------------------------------------------------------------


def _load(path, name):
    """A function of a test file; the file need not be importable by name."""
    sys.path[:0] = [str(Path(path).parent)]
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
        if not hasattr(module, name):
            spec.loader.exec_module(module)
    finally:
        del sys.path[0]
    return getattr(module, name)


def _serve(rank, world, port, pipe):
    """One rank: runs what comes through `pipe` until None comes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        path, name, args = work
        torch.manual_seed(0)
        try:
            pipe.send(("ok", _load(path, name)(rank, world, *args)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
    if dist.is_initialized():
        dist.destroy_process_group()


class RankPool:
    """`world` processes that run one function after the other; one that failed or hung is never used again."""

    def __init__(self, world):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            self.processes.append(context.Process(target=_serve, args=(rank, world, port, theirs), daemon=True))
            self.processes[-1].start()
        assert all(pipe.poll(120) and pipe.recv() == "ready" for pipe in self.pipes), "ranks did not start"

    def run(self, function, args, timeout):
        for pipe in self.pipes:
            pipe.send((inspect.getfile(function), function.__name__, args))
        answers = [
            pipe.recv() if pipe.poll(timeout) else ("hung", f"still ran after {timeout} s") for pipe in self.pipes
        ]
        faults = [f"rank {rank} {state}:\n{text}" for rank, (state, text) in enumerate(answers) if state != "ok"]
        return [value for _, value in answers], faults

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


class RankPools:
    """Pools of ranks by their number, kept for the whole test session: starting a process costs seconds."""

    def __init__(self):
        self._pools = {}

    def run(self, function, world, *args, timeout=60, fresh=False):
        """Results of `function(rank, world, *args)` of every rank; the first failures' text is raised.

        fresh   the function leaves its group broken (a rank that never comes): nobody uses these processes again
        """
        pool = self._pools.pop(world, None) or RankPool(world)
        values, faults = pool.run(function, args, timeout)
        if faults or fresh:
            pool.close()
        else:
            self._pools[world] = pool
        assert not faults, "\n".join(faults)
        return values

    def close(self):
        for pool in self._pools.values():
            pool.close()
