"""A step with everything on NVMe beside DeepSpeed's ZeRO-3 that offloads parameters and optimizer to the same drive.

    DS_ACCELERATOR=cpu python packages/zinf/benchmarks/against_deepspeed.py --nvme DIR
        [--model gpt:layers=24,hidden=1024,heads=16] [--batch 1] [--seq 128] [--steps 3] [--against shipped tuned]
        [--json F]

Each contender is a process in a memory cgroup of its own without a limit, which counts its peak; needs root and
`pip install deepspeed`. They train one model on the same tokens in bf16 and take their steps in turn. `of_shipped` and
`of_tuned` are the medians over rounds of a step of ours over DeepSpeed's in the same round: as it is shipped (its own
defaults, parameters in memory up to max_in_cpu), and tuned by hand (malloc on huge pages, threads that sleep between
operators as ours do, large blocks deep in the queue, pipelined, enough buffers, max_in_cpu 0 so that the parameters
really use the drive). Each of the two takes some 10 GB at the default size: where that is more than the machine has,
run `--against` one and then the other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, TextIO

import torch
from cgroups import joining
from memory_cgroup import Group, memory_group
from record import put, settings, spread
from trainee import OVERLAPS, Trainee, kernel_bytes, steps_parser

import zinf
from zinf.models.gpt import GPT, GPTConfig
from zinf.models.model_names import parse_model

DEEPSPEED = ("shipped", "tuned")
SLEEPING = {"OMP_WAIT_POLICY": "passive"}  # torch's threads leave the drive the cores: as zinf's README says
ENVIRONMENT = {
    "shipped": {"LOCAL_RANK": "0"},
    "tuned": {"LOCAL_RANK": "0", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **SLEEPING},
}


def deepspeed_settings(contender: str, drive: str, sizes: GPTConfig, batch: int) -> dict[str, Any]:
    """DeepSpeed's configuration. Sizes of buffers are in parameters, the largest of which must fit."""
    largest = max(4 * sizes.hidden**2, sizes.vocab * sizes.hidden)
    offload: dict[str, dict[str, Any]] = {
        "offload_param": {"device": "nvme", "nvme_path": drive},
        "offload_optimizer": {"device": "nvme", "nvme_path": drive},
    }
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "steps_per_print": 10**9,
    }
    if contender == "tuned":
        # Every parameter that is live, or on its way, takes a buffer: some eight blocks of a Transformer fit.
        offload["offload_param"] |= {"buffer_count": 96, "buffer_size": largest, "max_in_cpu": 0}
        offload["offload_optimizer"] |= {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        found["aio"] = {
            "block_size": 8 << 20, "queue_depth": 32, "intra_op_parallelism": 2, "single_submit": False,
            "overlap_events": True,
        }  # fmt: skip
        live = 4 * 12 * sizes.hidden**2
        found["zero_optimization"] = {
            "stage": 3, "sub_group_size": 50_000_000, "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live, "stage3_prefetch_bucket_size": live // 4, **offload,
        }  # fmt: skip
    else:
        found["zero_optimization"] = {"stage": 3, **offload}
    return found


class DeepSpeed:
    """The model in DeepSpeed's hands; `step` as a Trainee's."""

    def __init__(self, contender: str, given: argparse.Namespace):
        import deepspeed

        sizes = parse_model(given.model, positions=given.seq)
        config = deepspeed_settings(contender, given.nvme, sizes, given.batch)
        torch.manual_seed(0)
        meeting = f"file://{given.nvme}/meeting"
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method=meeting, rank=0, world_size=1)
        with deepspeed.zero.Init(config_dict_or_path=config, remote_device="nvme", dtype=torch.bfloat16):
            model = GPT(sizes)
        self._engine = deepspeed.initialize(model=model, config=config)[0]
        self._size, self._vocab = (given.batch, given.seq + 1), sizes.vocab
        self._random = torch.Generator().manual_seed(0)

    def step(self) -> dict[str, Any]:
        tokens = torch.randint(0, self._vocab, self._size, generator=self._random)
        begun = time.perf_counter()
        loss = self._engine(tokens[:, :-1], tokens[:, 1:])
        self._engine.backward(loss)
        self._engine.step()
        return {"seconds": time.perf_counter() - begun, "loss": loss.item()}


class Ours:
    def __init__(self, mode: str, given: argparse.Namespace):
        config = zinf.Config.preset(
            "inf-nvme", nvme=[given.nvme], resident=0, checksum=given.checksum, overlap_optimizer=OVERLAPS[mode]
        )
        self._trainee = Trainee(config, model=given.model, batch=given.batch, seq=given.seq)

    def step(self) -> dict[str, Any]:
        taken = self._trainee.step()
        return {"seconds": taken.seconds, "loss": taken.loss}


def serve(given: argparse.Namespace, answers: TextIO) -> None:
    """A contender's process: a step for each line that it is sent, one JSON line each."""
    contender = DeepSpeed(given.serve, given) if given.serve in DEEPSPEED else Ours(given.serve, given)
    print("{}", file=answers, flush=True)
    for _ in sys.stdin:
        before = kernel_bytes()
        step = contender.step()
        moved = {way: after - before[way] for way, after in kernel_bytes().items()}
        print(json.dumps({**step, **moved}), file=answers, flush=True)


class Contender:
    """The parent's end of such a process."""

    def __init__(self, process: subprocess.Popen[str], group: Group):
        self._process, self._group = process, group
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}")
        return json.loads(line)

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        print("step", file=self._process.stdin, flush=True)
        return self._answer()

    @property
    def peak(self) -> int:
        return self._group.peak


@contextlib.contextmanager
def contending(name: str, given: argparse.Namespace) -> Iterator[Contender]:
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="against-deepspeed-") as drive, memory_group() as group:
        flags = ["--nvme", drive, "--model", given.model, "--batch", str(given.batch), "--seq", str(given.seq)]
        flags += ["--serve", name, *(["--checksum"] if given.checksum else [])]
        process = subprocess.Popen(
            joining(group.folder, [sys.executable, __file__, *flags]), text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT.get(name, SLEEPING)},
        )  # fmt: skip
        try:
            yield Contender(process, group)
        finally:
            process.kill()  # DeepSpeed's threads need not end by themselves
            process.wait()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    names = [*given.against, *given.modes]
    with contextlib.ExitStack() as stack:
        contenders = {name: stack.enter_context(contending(name, given)) for name in names}
        rounds = [{name: one.step() for name, one in contenders.items()} for _ in range(1 + given.steps)]
        peaks = {name: one.peak for name, one in contenders.items()}
    counted = rounds[1:]

    def of(ours: str, theirs: str) -> dict[str, float]:
        return spread([taken[ours]["seconds"] / taken[theirs]["seconds"] for taken in counted])

    return {
        "contenders": {
            name: {
                "seconds": statistics.median(taken[name]["seconds"] for taken in counted),
                "all_seconds": [taken[name]["seconds"] for taken in rounds],
                "losses": [taken[name]["loss"] for taken in rounds],
                **{way: statistics.median(taken[name][way] for taken in counted) for way in ("read", "written")},
                "cgroup_peak_bytes": peaks[name],
            }
            for name in names
        },
        "modes": {
            mode: {
                **{f"of_{theirs}": of(mode, theirs) for theirs in given.against},
                **{f"memory_of_{theirs}": peaks[mode] / peaks[theirs] for theirs in given.against},
            }
            for mode in given.modes
        },
    }


def main() -> None:
    parser = steps_parser(__doc__, model="gpt:layers=24,hidden=1024,heads=16", batch=1, steps=3)
    parser.add_argument("--against", nargs="+", choices=DEEPSPEED, default=list(DEEPSPEED))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what DeepSpeed says there
        serve(given, answers)
        return
    put({"settings": settings(given), **measure(given)}, given.json)


if __name__ == "__main__":
    main()
