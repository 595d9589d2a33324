"""`zinf export`: the weights of a checkpoint as safetensors."""

from __future__ import annotations

import click

from zinf.cli.command_group import BadInput, GivenPath
from zinf.errors import CheckpointError
from zinf.safetensors_export import export_checkpoint
from zinf.training.faults import describe


@click.command
@click.argument("checkpoint", type=GivenPath())
@click.argument("directory", metavar="DIR", type=GivenPath())
def export(checkpoint: str, directory: str) -> None:
    """Write the weights of CHECKPOINT, or of the newest in that folder, to DIR as safetensors.

    A tied weight is written once, under its first name.
    """
    try:
        nbytes = export_checkpoint(checkpoint, directory)
    except CheckpointError as error:
        raise BadInput(str(error)) from error
    except OSError as error:
        raise click.ClickException(describe(error)) from error
    click.echo(f"{directory}: {nbytes:,} bytes of weights")
