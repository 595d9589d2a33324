"""Is offloading free where computation hides it (the paper's Figure 5a)? Steps of one model, as ratios in one run.

    python packages/zinf/benchmarks/compute_bound.py --nvme DIR [--model gpt:layers=12,hidden=768,heads=12,vocab=50257]
        [--batch 8] [--seq 128] [--dtype bf16|fp32] [--steps 4] [--modes backward next-forward] [--checksum]
        [--link 200MiB] [--json F]

Steps alternate between plain torch with its own AdamW, everything in memory on one rank (preset zero3), and everything
on NVMe with nothing resident. `of_memory` is a step over the same step in memory; `of_torch` the step in memory over
plain torch's (in bf16 that one updates less: it has no float32 master). `compute_over_drive` is how many times longer
the step in memory takes than the drive alone with the mode's bytes, at fio's rates: the claim is of 2 and more.

`of_memory_beside_fio` compares with the step in memory while fio moves, beside it, what the mode moves: as many bytes
read and written a second, in blocks of the same size. On a virtual machine whose host copies the drive's bytes on the
cores that compute, no program that moves those bytes could be faster than that. With `--link` (needs root) a control
group holds the drive to so many bytes a second, one that takes few of the cores' cycles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from against_limit import BLOCK_AND_DEPTH, FILE, drive_rates, drive_seconds, medians
from cgroups import add_link, go_on_link
from record import put, settings, spread
from trainee import OVERLAPS, PHASES, Step, Trainee, in_turn, same_losses, steps_parser

import zinf
from deepnvme.bench import fio
from deepnvme.bench.sweep import Point, Workspace
from zinf.models.gpt import GPT
from zinf.models.model_names import parse_model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Plain:
    """The same model and batches as a Trainee's, in plain torch."""

    def __init__(self, given: argparse.Namespace):
        torch.manual_seed(0)
        self._given, sizes = given, parse_model(given.model, positions=given.seq)
        self._vocab = sizes.vocab
        self._model = GPT(sizes).to(DTYPES[given.dtype])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self._random = torch.Generator().manual_seed(0)

    def step(self) -> float:
        """Seconds."""
        size = self._given.batch, self._given.seq + 1
        tokens = torch.randint(0, self._vocab, size, generator=self._random)
        begun = time.perf_counter()
        self._model(tokens[:, :-1], tokens[:, 1:]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begun


class Offloaded:
    """A mode's trainee, and one in memory that computes the same while fio moves the bytes of the first."""

    def __init__(self, mode: zinf.Config, memory: zinf.Config, space: Workspace, sizes: dict[str, Any]):
        self.trainee, self._beside, self._space = Trainee(mode, **sizes), Trainee(memory, **sizes), space

    def step(self) -> tuple[Step, Step, float]:
        """Of the mode; in memory beside fio; and the bytes a second of fio over those of the mode."""
        step = self.trainee.step()
        rates = tuple(sum(step.moved[name][way] for name in PHASES) / step.seconds for way in ("read", "written"))
        point, until = Point("mixed", "io_uring", *BLOCK_AND_DEPTH), 2 + 1.5 * step.seconds
        with ThreadPoolExecutor(1) as beside:
            running = beside.submit(fio.measure, self._space, point, until, rates)  # it takes a moment to start
            time.sleep(0.5)
            other = self._beside.step()
            if running.done():
                raise RuntimeError(f"fio ended before the step beside it: {running.result()}")
        return step, other, running.result()["gigabytes_per_second"] * 1e9 / sum(rates)


def ratios(steps: list[Step], others: list[Step]) -> list[float]:
    return [step.seconds / other.seconds for step, other in zip(steps, others, strict=True)]


def compare(steps: list[Step], memory: list[Step], beside: list[Step], rates: dict[str, float]) -> dict[str, Any]:
    """A mode's steps beside those in memory."""
    found = medians(steps)
    drive = sum(drive_seconds(found["moved"][name], rates) for name in PHASES)
    return {
        "seconds": found["seconds"],
        "of_memory": spread(ratios(steps, memory)),
        "of_memory_beside_fio": spread(ratios(steps, beside)),
        "drive_seconds": drive,
        "compute_over_drive": medians(memory)["seconds"] / drive,
        "stall_share": statistics.median(step.report["seconds"]["stall"] / step.seconds for step in steps),
    }


def main() -> None:
    parser = steps_parser(
        __doc__,
        model="gpt:layers=12,hidden=768,heads=12,vocab=50257",
        batch=8,
        steps=4,
        modes=["backward", "next-forward"],
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    add_link(parser)
    given = parser.parse_args()
    go_on_link(given)
    if reason := fio.why_not():
        sys.exit(reason)
    sizes = {"model": given.model, "batch": given.batch, "seq": given.seq}
    with tempfile.TemporaryDirectory(dir=given.nvme, prefix="compute-bound-") as drive:
        rates = drive_rates(drive)
        dtype = DTYPES[given.dtype]
        in_memory = zinf.Config.preset("zero3", dtype=dtype, overlap_optimizer=False)
        memory = Trainee(in_memory, **sizes)
        with Workspace(drive, FILE) as space:
            modes = {
                mode: Offloaded(
                    zinf.Config.preset(
                        "inf-nvme", nvme=[drive], resident=0, dtype=dtype, checksum=given.checksum,
                        overlap_optimizer=OVERLAPS[mode],
                    ),
                    in_memory, space, sizes,
                )
                for mode in given.modes
            }  # fmt: skip
            taken = in_turn({"torch": Plain(given), "memory": memory, **modes}, 1 + given.steps)
    seconds, in_memory_steps = taken["torch"][1:], taken["memory"][1:]
    offloaded = {mode: [list(of_one) for of_one in zip(*taken[mode][1:], strict=True)] for mode in given.modes}
    runs = [in_memory_steps, *(run for of_mode in offloaded.values() for run in of_mode[:2])]
    record = {
        "settings": settings(given),
        "parameters": memory.sizes.numel,
        "fio_bytes_per_second": rates,
        "same_losses": same_losses(runs),
        "torch_seconds": statistics.median(seconds),
        "memory_seconds": statistics.median(step.seconds for step in in_memory_steps),
        "of_torch": spread([step.seconds / other for step, other in zip(in_memory_steps, seconds, strict=True)]),
        "modes": {
            mode: {**compare(steps, in_memory_steps, beside, rates), "fio_beside_of_mode": spread(of_rates)}
            for mode, (steps, beside, of_rates) in offloaded.items()
        },
    }
    put(record, given.json)


if __name__ == "__main__":
    main()
