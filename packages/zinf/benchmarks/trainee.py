"""A GPT in training whose steps are timed phase by phase: what the benchmarks of this folder measure."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zinf
from zinf.models.gpt import GPT
from zinf.models.model_names import parse_model

PHASES = ("forward", "backward", "update")

# overlap_optimizer as it is given on a command line.
OVERLAPS: dict[str, str | bool] = {"backward": "backward", "next-forward": "next-forward", "false": False}


def steps_parser(
    description: str | None, *, model: str, batch: int, steps: int, modes: Sequence[str] = tuple(OVERLAPS)
) -> argparse.ArgumentParser:
    """The flags of a benchmark that takes steps of one model with everything on the drive, with their defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True, help="a directory of the drive")
    parser.add_argument("--model", default=model)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=steps, help="that count; one more is taken first")
    parser.add_argument("--modes", nargs="+", choices=list(OVERLAPS), default=list(modes))
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser


@dataclass(frozen=True)
class Step:
    """What one step took and moved."""

    loss: float
    phases: dict[str, float]  # seconds of forward, backward and optimizer.step() with zero_grad()
    moved: dict[str, dict[str, int]]  # phase -> bytes that the kernel counted, read and written
    report: dict[str, Any]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


class Trainee:
    """A model of `zinf train` with random weights and random tokens; seed 0, so that all of one size agree."""

    def __init__(self, config: zinf.Config, *, model: str, batch: int, seq: int):
        torch.manual_seed(0)
        self.sizes = parse_model(model, positions=seq)
        self.batch, self.seq = batch, seq
        with zinf.init(config):
            self.model = GPT(self.sizes)
        self.optimizer = zinf.AdamW(self.model.parameters(), lr=1e-4)
        self._random = torch.Generator().manual_seed(0)

    def step(self) -> Step:
        tokens = torch.randint(0, self.sizes.vocab, (self.batch, self.seq + 1), generator=self._random)
        clock = [time.perf_counter()]
        counts = [kernel_bytes()]

        def phase_ends() -> None:
            clock.append(time.perf_counter())
            counts.append(kernel_bytes())

        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        phase_ends()
        loss.backward()
        phase_ends()
        self.optimizer.step()
        self.optimizer.zero_grad()
        phase_ends()
        return Step(
            loss=loss.item(),
            phases={name: clock[i + 1] - clock[i] for i, name in enumerate(PHASES)},
            moved={
                name: {way: counts[i + 1][way] - counts[i][way] for way in ("read", "written")}
                for i, name in enumerate(PHASES)
            },
            report=zinf.report(self.model),
        )


def in_turn(trainees: Mapping[Any, Any], rounds: int) -> dict[Any, list]:
    """What `step()` of each gave in so many rounds of one step each."""
    taken: dict[Any, list] = {name: [] for name in trainees}
    for _ in range(rounds):
        for name, trainee in trainees.items():
            taken[name].append(trainee.step())
    return taken


def same_losses(runs: Iterable[list[Step]]) -> bool:
    """Bit for bit."""
    return len({tuple(step.loss for step in run) for run in runs}) == 1


def kernel_bytes() -> dict[str, int]:
    """Bytes that this process has had read from and written to storage so far (/proc/self/io).

    All of them for direct I/O; through the page cache it misses what the cache served.
    """
    lines = (line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    counted = {name: int(value) for name, value in lines}
    return {"read": counted["read_bytes"], "written": counted["write_bytes"]}
