"""Several gloo ranks on this machine, for tests of partitioned models.

    pools = RankPools()
    results = pools.run(function, 2, "argument")      # function(rank, world, "argument") on two ranks
    pools.close()

The processes stay for the next call: starting one costs seconds. The function is found again by its file and name,
so the file need not be importable.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Seconds in which a process must have imported torch and met the others.
_START_TIMEOUT = 120


class RankPools:
    """Pools of processes by their number of ranks. One whose function failed or hung is never used again."""

    def __init__(self) -> None:
        self._pools: dict[int, _RankPool] = {}

    def run(
        self, function: Callable, world: int, *args: Any, timeout: float = 60, fresh: bool = False
    ) -> list[Any]:
        """Results of `function(rank, world, *args)` of every rank.

        Arguments and results are pickled, with nothing of the test's own file among them: the ranks know that by
        another name. Each call begins with seed 0, one thread and the caller's `sys.path`.

        timeout   seconds that a rank may take
        fresh     the function leaves its group broken (a rank that never comes): nobody uses these processes again

        AssertionError with the traceback of every rank that failed or hung.
        """
        pool = self._pools.pop(world, None) or _RankPool(world)
        values, faults = pool.run(function, args, timeout)
        if faults or fresh:
            pool.close()
        else:
            self._pools[world] = pool
        if faults:
            raise AssertionError("\n".join(faults))
        return values

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class _RankPool:
    """`world` processes that run one function after the other."""

    def __init__(self, world: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            self._processes.append(context.Process(target=_serve, args=(rank, world, port, theirs), daemon=True))
            self._processes[-1].start()
        if not all(pipe.poll(_START_TIMEOUT) and pipe.recv() == "ready" for pipe in self._pipes):
            self.close()
            raise AssertionError(f"{world} ranks did not start within {_START_TIMEOUT} s")

    def run(self, function: Callable, args: tuple, timeout: float) -> tuple[list[Any], list[str]]:
        """(results, texts of what failed)."""
        for pipe in self._pipes:
            pipe.send((sys.path, inspect.getfile(function), function.__name__, args))
        answers = [
            pipe.recv() if pipe.poll(timeout) else ("hung", f"still ran after {timeout} s") for pipe in self._pipes
        ]
        faults = [f"rank {rank} {state}:\n{text}" for rank, (state, text) in enumerate(answers) if state != "ok"]
        return [value for _, value in answers], faults

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    """One rank: runs what comes through `pipe`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    pipe.send("ready")
    while True:
        sys.path[:], file, name, args = pipe.recv()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            pipe.send(("ok", _load(file, name)(rank, world, *args)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))


def _load(file: str, name: str) -> Callable:
    """Function `name` of `file`, which is imported once; it finds what lies beside it."""
    folder = str(Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    if not hasattr(module, name):
        spec.loader.exec_module(module)
    return getattr(module, name)
