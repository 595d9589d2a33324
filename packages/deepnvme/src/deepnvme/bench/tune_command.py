"""deepnvme-bench tune: the best settings of a drive, saved for Engine."""

from __future__ import annotations

import itertools
import math
import os

import click
from rich.console import Console
from rich.progress import Progress

from ..drive_profile import DriveProfile, drive_key, save_profile
from ..file import File
from ..sizes import format_size
from .options import Seconds, Size
from .sweep import Point, Record, Workspace, measure

_BLOCKS = (512 << 10, 1 << 20, 2 << 20, 4 << 20)
_DEPTHS = (8, 16, 32, 64)
_AS_GOOD = 0.98  # of the best: what is left decides by memory in flight, and measurements differ by as much


@click.command("tune")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, writable=True))
@click.option("--size", type=Size(), default="1GiB", show_default=True, help="Of the scratch file.")
@click.option("--seconds", type=Seconds(), default=1.0, show_default=True, help="Per setting.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Each setting, in turns.")
@click.option("--dry-run", is_flag=True, help="Print the profile, do not save it.")
def command(directory: str, size: int, seconds: float, rounds: int, dry_run: bool) -> None:
    """Finds the best settings and saves them as the drive's profile, which Engine then uses."""
    device = os.stat(directory).st_dev
    if size < (largest := max(_BLOCKS)):
        raise click.UsageError(f"--size {format_size(size)} is smaller than the largest block, {format_size(largest)}")
    settings = list(itertools.product(_BLOCKS, _DEPTHS))
    try:
        with Workspace(directory, size) as space:
            rates = _measure_all(space, settings, seconds, rounds)
    except OSError as e:
        raise click.ClickException(f"{e}\nhint: a smaller --size needs less room") from None
    if not rates:
        raise click.ClickException("no engine could run; see deepnvme-bench info")
    with File.anonymous(directory) as file:
        direct = file.direct
    block, depth = best_setting(rates)
    read, write = rates[block, depth]
    profile = DriveProfile(
        drive_key(device),
        queue_depth=depth,
        block_size=block,
        measured={"read_gigabytes_per_second": read, "write_gigabytes_per_second": write, "direct": direct},
    )
    click.echo(f"drive {profile.drive}: block size {format_size(block)}, queue depth {depth}")
    try:
        where = "not saved" if dry_run else str(save_profile(profile))
    except OSError as e:
        where = "not saved"
        raise click.ClickException(f"the profile cannot be saved: {e}; DEEPNVME_PROFILES names another place") from None
    finally:
        click.echo(f"read {read:.2f} GB/s, overwrite {write:.2f} GB/s; {where}")


def best_setting(rates: dict[tuple[int, int], tuple[float, float]]) -> tuple[int, int]:
    """(block size, queue depth) with the least memory in flight among those that are as good as the best.

    rates: (block size, queue depth) -> (read, write), in any unit. Reading and writing count alike.
    """
    best_read = max(read for read, _ in rates.values())
    best_write = max(write for _, write in rates.values())
    score = {s: math.sqrt(read / best_read * write / best_write) for s, (read, write) in rates.items()}
    enough = _AS_GOOD * max(score.values())
    return min((s for s in rates if score[s] >= enough), key=lambda s: (s[0] * s[1], -score[s]))


def _measure_all(
    space: Workspace, settings: list[tuple[int, int]], seconds: float, rounds: int
) -> dict[tuple[int, int], tuple[float, float]]:
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not os.isatty(2)) as progress:
        task = progress.add_task("tuning", total=2 * rounds * len(settings))
        # In turns, so that a drive or machine that changes its pace meanwhile does so for all of them.
        for _, (block, depth), op in itertools.product(range(rounds), settings, ("read", "write")):
            record: Record = measure(space, Point(op, "auto", block, depth), seconds)
            if "why_not" not in record:
                found.setdefault((block, depth), {}).setdefault(op, []).append(record["gigabytes_per_second"])
            progress.advance(task)
    return {s: (_median(rates["read"]), _median(rates["write"])) for s, rates in found.items()}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
