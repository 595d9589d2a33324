"""Bandwidth-centric partitioning (paper, 6.1) on slow links of the ranks' own, as the paper's Figure 6c. Needs root.

    python packages/zinf/benchmarks/bandwidth_centric.py --nvme DIR [--ranks 1 2 4] [--link 100MiB]
        [--model gpt:layers=6,hidden=1024,heads=16] [--rounds 3] [--json F]

Each rank reads and writes the drive within a control group that holds it to `--link` bytes a second: a link of its
own. Two ways to bring in the parameters of a forward alternate:

    shards   this package: every rank reads its part of each unit, all parts are gathered
    owner    made for this benchmark: a unit lies whole with one rank (they take turns), which reads it while the unit
             before is sent, and broadcasts it. One link is at work at a time

`bytes_per_second` is what arrives at each rank; `links` is that over one link. Then the ranks train, and `shares` are
the least and the most of a step's bytes that a rank moves in each tenth of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cgroups import joining, link
from record import put, settings
from torch import Tensor
from trainee import Trainee

import deepnvme
import zero3
import zinf
from deepnvme.sizes import parse_size
from zinf.offload_engine import engine_of
from zinf.training.ranks import Ranks


class OwnerBroadcast:
    """Units of `sizes` bytes (of one process or several), each whole with the rank whose turn it is."""

    def __init__(self, drive: str, sizes: list[int], ranks: Ranks):
        self._io = deepnvme.Engine()
        self._ranks = ranks
        self._sizes = sizes
        self._buffers = [deepnvme.empty(max(sizes)).torch() for _ in range(2)]
        self._paths = {i: f"{drive}/unit-{i}" for i in range(len(sizes)) if self._owns(i)}
        for i, path in self._paths.items():
            self._io.write(path, self._buffer(i).fill_(i % 256)).wait()

    def _owns(self, i: int) -> bool:
        return i % self._ranks.count == self._ranks.rank

    def _buffer(self, i: int) -> Tensor:
        return self._buffers[i % 2][: self._sizes[i]]

    def run(self) -> None:
        """All units, one after the other, on every rank."""
        coming, read = self._start(0), torch.zeros(1)
        for i in range(len(self._sizes)):
            owner = i % self._ranks.count
            if coming is not None:
                coming.wait()
            self._broadcast(read, owner)  # the owner has it: the next one may begin
            coming = self._start(i + 1)
            unit = self._buffer(i)
            self._broadcast(unit, owner)
            if not unit[0] == unit[-1] == i % 256:
                raise AssertionError(f"unit {i} did not arrive")

    def _broadcast(self, tensor: Tensor, owner: int) -> None:
        if self._ranks.count > 1:
            dist.broadcast(tensor, src=owner)

    def _start(self, i: int) -> deepnvme.Request | None:
        return self._io.read(self._paths[i], self._buffer(i)) if i in self._paths else None

    def close(self) -> None:
        self._io.close()


class Sampler:
    """What `moved()` gave over time, while the block ran."""

    def __init__(self, moved: Callable[[], int]):
        self._moved = moved

    def __enter__(self) -> Sampler:
        self.times: list[float] = []
        self.counts: list[int] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._ends.wait(0.005):
            self._sample()

    def _sample(self) -> None:
        self.times.append(time.monotonic())  # the same clock in all processes of a machine
        self.counts.append(self._moved())


def shares(samples: list[tuple[list[float], list[int]]]) -> dict[str, list[float]]:
    """Of (times, counts) of each rank: the least and the most of all bytes that a rank moves, in each tenth."""
    begin, end = max(times[0] for times, _ in samples), min(times[-1] for times, _ in samples)
    edges = np.linspace(begin, end, 11)
    moved = np.array([np.diff(np.interp(edges, times, counts)) for times, counts in samples])
    parts = moved / moved.sum(axis=0)
    return {"least": parts.min(axis=0).tolist(), "most": parts.max(axis=0).tolist()}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """What this rank finds; the same on all."""
    ranks = Ranks.join()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.count))
    config = zinf.Config.preset(
        "inf-nvme", nvme=[given.nvme], resident=0, checksum=False, host_memory=given.host_memory
    )
    trainee = Trainee(config, model=given.model, batch=1, seq=given.seq)
    units = zero3.units(trainee.model)
    owner = OwnerBroadcast(given.nvme, [unit.nbytes for unit in units], ranks)
    tokens = torch.zeros(1, given.seq, dtype=torch.int64)

    def forward() -> None:
        with torch.no_grad():
            trainee.model(tokens)

    seconds: dict[str, list[float]] = {"shards": [], "owner": []}
    for number in range(1 + given.rounds):
        for way, run in (("shards", forward), ("owner", owner.run)):
            ranks.mean(0.0)  # all begin together
            begun = time.perf_counter()
            run()
            ranks.mean(0.0)
            if number:
                seconds[way].append(time.perf_counter() - begun)
    owner.close()
    nbytes = sum(unit.nbytes for unit in units)
    rates = {way: nbytes / statistics.median(taken) for way, taken in seconds.items()}
    found: dict[str, Any] = {
        "ranks": ranks.count,
        "bytes": nbytes,
        "seconds": seconds,
        "bytes_per_second": rates,
        "links": {way: rate / parse_size(given.link) for way, rate in rates.items()},
        "shards_over_owner": rates["shards"] / rates["owner"],
    }
    for _ in range(2):
        trainee.step()
    drive = engine_of(trainee.model)[0].tiers.of("nvme")
    with Sampler(lambda: drive.moved) as sampler:
        found["step_seconds"] = trainee.step().seconds
    if ranks.count > 1:
        samples: list[Any] = [None] * ranks.count
        dist.all_gather_object(samples, (sampler.times, sampler.counts))
        found["shares"] = shares(samples)
    ranks.leave()
    return found


def run(given: argparse.Namespace, count: int) -> dict[str, Any]:
    """The record of one number of ranks, each a process on a link of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--link", given.link, "--model", given.model, "--seq", given.seq, "--rounds", given.rounds]
    flags += ["--host-memory", given.host_memory]
    with ExitStack() as stack:
        drive = stack.enter_context(tempfile.TemporaryDirectory(dir=given.nvme, prefix="bandwidth-centric-"))
        folders = [stack.enter_context(link(drive, parse_size(given.link))) for _ in range(count)]
        started: list[subprocess.Popen[str]] = []
        stack.callback(_end, started)  # before their groups go
        for rank, folder in enumerate(folders):
            place = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = joining(folder, [sys.executable, __file__, "--inside", "--nvme", drive, *map(str, flags)])
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        while None in (statuses := [process.poll() for process in started]) or any(statuses):
            if any(statuses):
                sys.exit(f"{count} ranks ended with {statuses}")  # the others would wait for one that failed
            time.sleep(0.1)
        outputs = [process.communicate()[0] for process in started]
    return json.loads(outputs[0])


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="a directory of the drive")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--link", default="100MiB", help="bytes a second of each rank, each way")
    parser.add_argument("--model", default="gpt:layers=6,hidden=1024,heads=16")
    parser.add_argument("--seq", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host-memory", default="1GiB", help="of each rank")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(measure(given)))
        return
    rows = [run(given, count) for count in given.ranks]
    put({"settings": settings(given), "runs": rows}, given.json)


if __name__ == "__main__":
    main()
