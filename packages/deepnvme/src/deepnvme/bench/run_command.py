"""deepnvme-bench run: a sweep over block size, queue depth, engine and threads."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import click
from rich.console import Console
from rich.progress import Progress

from .. import _core
from ..engine import MOST_BLOCK
from ..sizes import format_size
from . import fio, reports
from .drive_facts import facts
from .options import NewFile, Seconds, Size
from .sweep import OPERATIONS, Point, Record, Workspace, measure, measure_steadily

_SECONDS = Seconds()
_BLOCK = Size(4096, MOST_BLOCK)


@click.command("run")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, writable=True))
@click.option("--size", type=Size(), default="2GiB", show_default=True, help="Of the scratch file.")
@click.option("--seconds", type=_SECONDS, help="Per point. By default the file is moved once; with --compare, 2.")
@click.option("--op", type=click.Choice([*OPERATIONS, "all"]), default="all", show_default=True)
@click.option("--compare", type=click.Choice(["fio"]), help="Measure the same work by another program, too.")
@click.option("--json", "json_path", type=NewFile(dir_okay=False), help="Write all records; - is standard output.")
@click.option("--html", "html_path", type=NewFile(dir_okay=False), help="Write one self-contained page with plots.")
@click.option("--block-size", type=_BLOCK, multiple=True, default=["256KiB", "1MiB", "4MiB"], show_default=True)
@click.option("--queue-depth", type=click.IntRange(1, 4096), multiple=True, default=[4, 16, 64], show_default=True)
@click.option("--backend", type=click.Choice(_core.backend_names()), multiple=True, default=_core.backend_names())
@click.option("--threads", type=click.IntRange(1, 256), multiple=True, help="By default the engine's own choice.")
@click.option("--buffered", is_flag=True, help="Through the page cache: measures memory as much as the drive.")
@click.option("--steady", type=_SECONDS, help="Also write (or --op) for so many seconds and record the rate over time.")
def command(
    directory: str,
    size: int,
    seconds: float | None,
    op: str,
    compare: str | None,
    json_path: str | None,
    html_path: str | None,
    block_size: tuple[int, ...],
    queue_depth: tuple[int, ...],
    backend: tuple[str, ...],
    threads: tuple[int, ...],
    buffered: bool,
    steady: float | None,
) -> None:
    """Sweeps block size x queue depth x engine x threads over a scratch file in DIRECTORY."""
    if compare and seconds is None:
        # In a single pass fio's first touch of its own buffers counts as I/O: it would look up to a quarter slower.
        seconds = 2.0
    ops = OPERATIONS if op == "all" else (op,)
    direct = False if buffered else "auto"
    sweep = [
        Point(o, b, bs, qd, t, direct)
        for o, b, bs, qd, t in itertools.product(ops, backend, block_size, queue_depth, threads or (None,))
    ]
    if size < max(block_size):
        raise click.UsageError(f"--size {format_size(size)} is smaller than the largest block")
    # Data goes to standard output, everything else to standard error.
    console = Console(stderr=True)
    try:
        with Workspace(directory, size) as space:
            records = list(_measured(space, sweep, seconds, compare == "fio", console))
            if steady:
                steady_op = "write" if op == "all" else op
                point = Point(steady_op, backend[0], max(block_size), max(queue_depth), direct=direct)
                records.append(measure_steadily(space, point, steady))
            written = space.written
    except OSError as e:
        raise click.ClickException(f"{e}\nhint: is there room for {format_size(size)} in {directory}?") from None
    report = {"where": facts(directory), "written_bytes": written, "records": records}
    if json_path != "-":
        reports.print_table(report)
    try:
        if json_path:
            reports.write_json(report, json_path)
        if html_path:
            reports.write_html(report, html_path)
    except OSError as e:
        raise click.ClickException(f"the report cannot be written: {e}") from None


def _measured(
    space: Workspace, sweep: list[Point], seconds: float | None, beside_fio: bool, console: Console
) -> Iterator[Record]:
    with Progress(console=console, transient=True, disable=not os.isatty(2)) as progress:
        task = progress.add_task("measuring", total=len(sweep))
        for point in sweep:
            progress.update(task, description=f"{point.op} {point.backend} {format_size(point.block_size)}")
            yield {"system": "deepnvme", **measure(space, point, seconds)}
            if beside_fio:
                yield fio.measure(space, point, seconds)
            progress.advance(task)
