"""`zinf verify`: reads every byte of a checkpoint and names what is damaged."""

from __future__ import annotations

import click

from zinf.checkpoint_files import verify as find_damage
from zinf.cli.command_group import BadInput, GivenPath
from zinf.errors import CheckpointError


@click.command
@click.argument("checkpoint", type=GivenPath())
def verify(checkpoint: str) -> None:
    """Read CHECKPOINT, or the newest in that folder, and name every damaged part.

    Exit code 1 when something is damaged.
    """
    try:
        damaged = find_damage(checkpoint)
    except CheckpointError as error:
        raise BadInput(str(error)) from error
    for part in damaged:
        click.echo(part)
    if damaged:
        raise click.ClickException(f"{checkpoint}: {len(damaged)} damaged part(s)")
    click.echo(f"{checkpoint}: whole")
