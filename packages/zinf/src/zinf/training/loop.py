"""The training run: an ordinary PyTorch loop around zinf's public names.

Read `_train_step` first: nothing in it says where parameters, gradients or optimizer states lie.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import zinf
from zinf.training.metrics import MetricsFile
from zinf.training.preparation import Inputs, Run, checkpoint_extra, prepare
from zinf.training.ranks import Ranks
from zinf.training.run_directory import new_directories, set_aside_earlier_run
from zinf.training.sampling import sample
from zinf.training.settings import TrainSettings
from zinf.training.token_data import training_batch

TEMPERATURE = 0.7


class Display(Protocol):
    """Who shows a run to a person while it goes on."""

    def note(self, text: str) -> None:
        """A line about what happens between the steps."""

    def start(self, *, first_step: int, steps: int) -> None:
        """Steps are taken from now on."""

    def step(self, record: dict[str, Any]) -> None:
        """A step was taken; its metrics."""

    def stop(self) -> None:
        """No more steps are taken."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves to be told."""

    run: Run
    records: list[dict[str, Any]]  # the metrics of each step taken now
    validation_after: float
    prompt: str
    sample: str  # the model's continuation of the prompt
    checkpoint: zinf.SaveResult | None  # None: no step was left to take, the newest checkpoint stands


def train(settings: TrainSettings, inputs: Inputs, ranks: Ranks, display: Display) -> Outcome:
    """Trains, validates before and after, samples, and leaves a checkpoint and a metrics file in `settings.out`.

    Every rank calls it; rank 0 alone writes metrics. Raises CannotStart before anything was written, and OSError when
    a drive fails later on: the checkpoints of before are then whole.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(new_directories(settings.out, *settings.swap_directories))
        run = prepare(settings, inputs, ranks)
        display.note(f"{settings.model}: {inputs.task.numel:,} parameters, preset {settings.preset}")
        if settings.resume:
            display.note(_resumed_from(run))
        metrics = None
        if ranks.is_first:
            if not run.step and (earlier := set_aside_earlier_run(settings.out)):
                display.note(f"what an earlier run left in {settings.out} lies in {earlier} now")
            metrics = stack.enter_context(
                contextlib.closing(MetricsFile(settings.metrics_path, keep_through_step=run.step))
            )
        if run.validation_before is None:
            run.validation_before = evaluate(run)
            display.note(f"validation loss before: {run.validation_before:.4f}")
        records, checkpoint = _take_steps(run, metrics, display)
        validation_after = evaluate(run)
        task = inputs.task
        prompt = task.data.validation[: task.prompt_length].tolist()
        tokens = sample(
            task, run.model, prompt, length=settings.sample_length, context=settings.seq,
            temperature=TEMPERATURE, seed=settings.seed, device=ranks.device,
        )  # fmt: skip
        text = task.text_of([*prompt, *tokens])
        start = len(task.text_of(prompt))
        return Outcome(run, records, validation_after, text[:start], text[start:], checkpoint)


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Mean loss over the fixed validation batches and all ranks, in nats a token. Collective."""
    run.model.eval()
    losses = [
        run.inputs.task.loss(run.model, run.ranks.part(tokens), run.ranks.part(targets)).item()
        for tokens, targets in run.inputs.validation
    ]
    run.model.train()
    return run.ranks.mean(sum(losses) / len(losses))


def _take_steps(
    run: Run, metrics: MetricsFile | None, display: Display
) -> tuple[list[dict[str, Any]], zinf.SaveResult | None]:
    """Takes the steps that are left; the checkpoint returned is the one after the last of them."""
    settings = run.settings
    records: list[dict[str, Any]] = []
    checkpoint = None
    tracing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if settings.trace and run.ranks.is_first:
        tracing = zinf.trace(run.model, settings.trace)
    display.start(first_step=run.step, steps=settings.steps)
    try:
        with tracing:
            while run.step < settings.steps:
                record = _train_step(run)
                records.append(record)
                if metrics:
                    metrics.write(record)
                display.step(record)
                is_due = settings.save_every and run.step % settings.save_every == 0
                if is_due or run.step == settings.steps:
                    checkpoint = _save(run)
    finally:
        display.stop()
    return records, checkpoint


def _train_step(run: Run) -> dict[str, Any]:
    """One optimizer step over the global batch of this step's number; returns its metrics."""
    settings, ranks = run.settings, run.ranks
    started = time.perf_counter()
    tokens, targets = training_batch(
        run.inputs.task.data, seed=settings.seed, step=run.step, batch=settings.batch, seq=settings.seq
    )
    micro_batches = zip(
        ranks.part(tokens).chunk(settings.accumulate),
        ranks.part(targets).chunk(settings.accumulate),
        strict=True,
    )
    losses = []
    for micro_tokens, micro_targets in micro_batches:
        loss = run.inputs.task.loss(run.model, micro_tokens, micro_targets)
        losses.append(loss.detach())
        loss = loss / settings.accumulate
        if settings.dtype == "fp16":
            loss = run.optimizer.scale(loss)
        loss.backward()
    lr = run.optimizer.param_groups[0]["lr"]
    run.optimizer.step()
    run.optimizer.zero_grad()
    if not run.optimizer.skipped:
        run.scheduler.step()
    run.step += 1
    mean_loss = ranks.mean(torch.stack(losses).double().mean().item())
    report = zinf.report(run.model)
    return {
        "step": run.step,
        "loss": mean_loss,
        "grad_norm": report["grad_norm"],
        "lr": lr,
        "tokens": settings.batch * settings.seq,
        "seconds": time.perf_counter() - started,
        "report": report,
    }


def _save(run: Run) -> zinf.SaveResult:
    return zinf.save(run.settings.out, run.model, run.optimizer, extra=checkpoint_extra(run), keep=run.settings.keep)


def _resumed_from(run: Run) -> str:
    if run.step:
        return f"continuing after step {run.step} of {run.settings.out}"
    return f"no complete checkpoint in {run.settings.out}: starting afresh"
