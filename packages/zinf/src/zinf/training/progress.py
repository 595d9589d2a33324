"""A run as a person watches it: a moving line in a terminal, plain lines elsewhere. Rank 0 alone has one."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

PLAIN_LINES = 20  # about so many lines for a whole run where no line can be overwritten


class TerminalDisplay:
    """Progress on standard error; standard output is left for the result."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._steps = 0
        self._bytes_read = self._bytes_written = 0

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def start(self, *, first_step: int, steps: int) -> None:
        self._steps = steps
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("training", total=steps, completed=first_step, figures="")
        self._progress.start()

    def step(self, record: dict[str, Any]) -> None:
        report = record["report"]
        self._bytes_read += report["bytes"]["nvme_read"]
        self._bytes_written += report["bytes"]["nvme_written"]
        figures = (
            f"loss {record['loss']:.4f} · {record['tokens'] / record['seconds']:,.0f} tokens/s"
            f" · read {self._bytes_read / 1e9:.1f} GB, written {self._bytes_written / 1e9:.1f} GB"
            f" · stall {100 * stall_share(report):.0f} %"
        )
        step = record["step"]
        if self._progress:
            self._progress.update(self._task, completed=step, figures=figures)
        elif step == 1 or step == self._steps or step % max(1, self._steps // PLAIN_LINES) == 0:
            self.note(f"step {step}/{self._steps} · {figures}")

    def stop(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None


class SilentDisplay:
    """What every other rank has: nothing is shown."""

    def note(self, text: str) -> None:
        pass

    def start(self, *, first_step: int, steps: int) -> None:
        pass

    def step(self, record: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        pass


def stall_share(report: dict[str, Any]) -> float:
    """The part of a step in which the computation waited for data."""
    seconds = report["seconds"]
    return seconds["stall"] / seconds["step"] if seconds["step"] else 0.0


def display_for(*, is_first: bool) -> TerminalDisplay | SilentDisplay:
    """The display of a rank."""
    return TerminalDisplay() if is_first else SilentDisplay()
