"""`zinf train`: flags in, a trained model, its checkpoint and a summary out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from zinf.cli.command_group import BadInput, GivenPath
from zinf.config import TIERS
from zinf.models.model_names import BUILTIN_MODEL
from zinf.training.faults import CannotStart, describe
from zinf.training.loop import train as run_training
from zinf.training.preparation import read_inputs
from zinf.training.progress import display_for
from zinf.training.ranks import Ranks
from zinf.training.settings import DTYPES, TrainSettings
from zinf.training.summary import peak_process_bytes, summarize
from zinf.training.text_source import BUILTIN

_LR_FROM_SCRATCH, _LR_FINE_TUNING = 5e-4, 2e-5
_POSITIVE = click.IntRange(min=1)
_NOT_NEGATIVE = click.IntRange(min=0)
_SEED = click.IntRange(min=0, max=2**64 - 1)  # what torch takes
_DIRECTORY = GivenPath(path_type=Path)  # ours to check: one clear line for each fault, on every rank
_FILE = GivenPath(path_type=Path)


class _PositiveNumber(click.FloatRange):
    """Above 0. Python reads "nan" as a number too, and "inf"."""

    def __init__(self, *, finite: bool):
        super().__init__(min=0, min_open=True)
        self._finite = finite

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (self._finite and math.isinf(number)):
            self.fail(f"{value} is no number above 0.", param, ctx)
        return number


@click.command
@click.option(
    "--data",
    default=BUILTIN,
    type=GivenPath(),
    metavar="FILE|builtin",
    help='Text to train on. For a directory as model, FILE.jsonl may hold a "text" or "messages" a line.',
)
@click.option(
    "--model",
    default=BUILTIN_MODEL,
    type=GivenPath(),
    metavar="NAME|DIR",
    help="gpt2-124m, or gpt:layers=L,hidden=H,heads=A[,vocab=V], trained from scratch on bytes; or a directory in "
    "Hugging Face's layout, fine-tuned on its own tokens (needs zinf[hf]).",
)
@click.option("--preset", default="inf-nvme", help="Where each kind of state lies: a preset of zinf.Config.")
@click.option(
    "--nvme",
    multiple=True,
    type=_DIRECTORY,
    help="Directory on a drive; repeat it for several drives. Without: OUT/nvme.",
)
@click.option("--steps", default=120, type=_POSITIVE, help="Optimizer steps in all, those of a resumed run included.")
@click.option("--batch", default=4, type=_POSITIVE, help="Sequences a step, over all ranks and micro-batches together.")
@click.option("--seq", default=128, type=_POSITIVE, help="Tokens a sequence; bytes, for a GPT by name.")
@click.option(
    "--lr",
    default=None,
    type=_PositiveNumber(finite=True),
    help="Learning rate after warm-up.  [default: 5e-4 from scratch, 2e-5 for a directory]",
)
@click.option("--warmup", default=20, type=_NOT_NEGATIVE, help="Steps in which the learning rate rises.")
@click.option(
    "--decay",
    default=120,
    type=_NOT_NEGATIVE,
    help="Step by which it is down to a tenth, along a cosine; 0: it stays.",
)
@click.option("--accumulate", default=1, type=_POSITIVE, help="Micro-batches that a step's batch is cut into.")
@click.option(
    "--grad-clip",
    default=None,
    type=_PositiveNumber(finite=False),
    help="Largest norm of the gradient; inf: it is only measured.",
)
@click.option("--seed", default=0, type=_SEED, help="Of initial weights, batches and the sample.")
@click.option(
    "--dtype",
    default="bf16",
    type=click.Choice(list(DTYPES)),
    help="Of parameters in use; the optimizer is exact fp32.",
)
@click.option(
    "--host-memory",
    default=None,
    metavar="SIZE",
    help="Most host memory that zinf uses, as 512MiB.  [default: what is free]",
)
@click.option(
    "--device-memory",
    default=None,
    metavar="SIZE",
    help="Most memory of gathered parameters, on a CPU too.  [default: what is free]",
)
@click.option(
    "--resident", default="0", metavar="SIZE", help="Bytes of units kept in host memory though placed on NVMe."
)
@click.option(
    "--activations",
    default=None,
    type=click.Choice([*TIERS, "none"]),
    help="Checkpoint every block, its input waiting there; none: keep all.  [default: only where they would not fit]",
)
@click.option("--prefetch/--no-prefetch", default=True, help="Fetch units ahead of their use.")
@click.option(
    "--overlap-optimizer",
    default=None,
    type=click.Choice(["next-forward", "backward", "false"]),
    help="When the update runs; the numbers are the same.  [default: next-forward]",
)
@click.option(
    "--out",
    default=".zinf-run",
    type=_DIRECTORY,
    help="Checkpoints and metrics. What an earlier run left there is set aside in OUT/earlier-N.",
)
@click.option(
    "--save-every", default=0, type=_NOT_NEGATIVE, metavar="N", help="Checkpoint every N steps; 0: at the end only."
)
@click.option("--keep", default=2, type=_POSITIVE, help="Newest checkpoints to keep.")
@click.option("--resume", is_flag=True, help="Continue from the newest complete checkpoint in OUT, or start afresh.")
@click.option(
    "--metrics",
    default=None,
    type=_FILE,
    metavar="FILE.jsonl",
    help="A JSON line a step.  [default: OUT/metrics.jsonl]",
)
@click.option("--trace", default=None, type=_FILE, metavar="FILE", help="Timeline of the steps, for Perfetto.")
@click.option("--validation-batches", default=8, type=_POSITIVE, help="Batches of held-out text to validate with.")
@click.option("--sample-length", default=120, type=_NOT_NEGATIVE, help="Tokens to sample from the trained model.")
def train(**flags: Any) -> None:
    """Train a language model on text, with its states where the preset puts them.

    The first nine tenths of the text are trained on, the last tenth is held out. Under torchrun this is one rank of
    several; the batch is the same and is shared out.
    """
    baseline_bytes = peak_process_bytes()
    settings = TrainSettings(**_typed(flags))
    ranks = Ranks.join()
    try:
        inputs = read_inputs(settings, ranks)
    except CannotStart as fault:  # every rank has the same words: one says them
        raise BadInput(str(fault)) if ranks.is_first else click.exceptions.Exit(BadInput.exit_code) from fault
    try:
        outcome = run_training(settings, inputs, ranks, display_for(is_first=ranks.is_first))
    except CannotStart as fault:
        raise BadInput(_by_rank(ranks, str(fault))) from fault
    except OSError as error:
        raise click.ClickException(_by_rank(ranks, describe(error))) from error
    if ranks.is_first:
        click.echo(summarize(outcome, baseline_bytes=baseline_bytes))
    ranks.leave()


def _typed(flags: dict[str, Any]) -> dict[str, Any]:
    overlap, lr = flags["overlap_optimizer"], flags["lr"]
    return {
        **flags,
        "overlap_optimizer": False if overlap == "false" else overlap,
        "lr": lr or (_LR_FINE_TUNING if Path(flags["model"]).is_dir() else _LR_FROM_SCRATCH),
    }


def _by_rank(ranks: Ranks, text: str) -> str:
    return text if ranks.is_first else f"rank {ranks.rank}: {text}"
