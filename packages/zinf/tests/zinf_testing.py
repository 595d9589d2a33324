"""What the tests of this package share: small models, the ordinary loop, and the same loop on plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import zinf

HERE = Path(__file__).parent
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

# Tiers of parameters and of optimizer states.
EVERYWHERE = [("device", "device"), ("cpu", "cpu"), ("nvme", "nvme")]


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Predicts the next token; the head's weight is the embedding's. Buffers, several blocks."""

    def __init__(self, width: int = 16, layers: int = 3, vocabulary: int = 40):
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens):
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    def data(self, step: int, size: int = 4, length: int = 6):
        return torch.randint(0, self.vocabulary, (size, length), generator=torch.Generator().manual_seed(step))


class ManyDtypes(nn.Module):
    """A linear layer beside frozen parameters, and buffers, of dtypes that no step updates."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 4)
        for dtype in (torch.float64, torch.complex64, torch.int64, torch.bool):
            values = (torch.randn(2000) * 9).to(dtype)
            name = str(dtype).removeprefix("torch.")
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
            self.register_buffer(f"{name}_buffer", values.flip(0))
        for dtype in (torch.float8_e4m3fn, torch.uint16):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.rand(5).mul(9).to(dtype))

    def forward(self, x):
        return self.linear(x) * self.float64.float().mean()


def make(seed: int = 1, **arguments) -> Language:
    torch.manual_seed(seed)
    return Language(**arguments)


def config(nvme, params="nvme", grads="cpu", optimizer="nvme", **changes) -> zinf.Config:
    """Everything on the drive, units of a block or less, float32; `changes` as wanted."""
    settings = {"dtype": torch.float32, "unit_size": "3KiB", "resident": 0, **changes}
    return zinf.Config(params=params, grads=grads, optimizer=optimizer, nvme=[nvme], **settings)


def offloaded(cfg: zinf.Config, seed: int = 1, **arguments):
    """(model, optimizer) of `make`, offloaded."""
    model = zinf.shard(make(seed, **arguments), cfg)
    return model, zinf.AdamW(model.parameters(), **SETTINGS)


def plain(seed: int = 1, optimizer=torch.optim.AdamW, **arguments):
    model = make(seed, **arguments)
    return model, optimizer(model.parameters(), **SETTINGS)


def train(model, optimizer, steps, rank: int = 0, world: int = 1, size: int = 4) -> list[float]:
    """The ordinary loop; `steps`: an iterable of step numbers, or how many. Returns this rank's losses."""
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        loss = model.loss(model.data(step, size).chunk(world)[rank])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def state_of(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def full_states(model) -> dict[str, dict]:
    """Master, moments and counter of every parameter, by name."""
    return {name: zinf.full_state(param) for name, param in model.named_parameters()}


def assert_same(found: dict, wanted: dict) -> None:
    """Bit-equal values under the same names: tensors, or dicts of them."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, dict):
            assert_same(found[name], value)
        elif isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), f"{name} differs by {largest_difference(found[name], value)}"
        else:
            assert found[name] == value, name


def assert_close(found: dict, wanted: dict, relative: float, floor: float = 0.0) -> None:
    """Every difference at most `relative` of that tensor's largest entry, or `floor`."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        bound = max(relative * value.abs().max().item(), floor)
        assert largest_difference(found[name], value) <= bound, (name, largest_difference(found[name], value), bound)


def largest_difference(one, other) -> float:
    return (one.detach().double() - other.detach().double()).abs().max().item() if one.numel() else 0.0


def run_script(
    script: str, *arguments, folder, forbid=(), environment=(), timeout: float = 60, fails: bool = False
) -> str:
    """Run a script in a fresh interpreter, in `folder`, with this package's helpers on its path; returns its output.

    forbid        system calls that answer an error there: "io_uring_setup=EPERM" (see forbidden_calls.py)
    environment   variables set for it, beside this process's own
    fails         an exit status other than 0 is expected; stdout and stderr are returned together
    """
    prelude = f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
    if forbid:
        prelude += f"import forbidden_calls; forbidden_calls.install({list(forbid)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(script), *map(str, arguments)],
        cwd=folder,
        # One thread, as in the tests themselves: torch's sums depend on it.
        env={**os.environ, "OMP_NUM_THREADS": "1", **dict(environment)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert (done.returncode != 0) == fails, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + (done.stderr if fails else "")
