"""Several gloo ranks on this machine, kept for the whole test session: starting a process costs seconds."""

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


def _load(path, name):
    """A function of a test file; the file need not be importable by name."""
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(module, name):
        spec.loader.exec_module(module)
    return getattr(module, name)


def _serve(rank, world, port, path, pipe):
    """One rank: runs what comes through `pipe` until None comes."""
    sys.path[:] = path
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    while (work := pipe.recv()) is not None:
        file, name, args = work
        torch.manual_seed(0)
        try:
            pipe.send(("ok", _load(file, name)(rank, world, *args)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


class RankPool:
    """`world` processes that run one function after the other."""

    def __init__(self, world):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            arguments = (rank, world, port, sys.path, theirs)
            self.processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()

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
    """Pools by their number of ranks. One that failed or hung is never used again."""

    def __init__(self):
        self._pools = {}

    def run(self, function, world, *args, timeout=60, fresh=False):
        """Results of `function(rank, world, *args)` of every rank; the first failures' text is raised.

        fresh   the function leaves its group broken (a rank that never comes): nobody uses these processes again
        """
        if world == 1:  # this process will do
            return [function(0, 1, *args)]
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
