"""deepnvme-bench info: what a directory's drive is and allows."""

from __future__ import annotations

import json

import click

from .drive_facts import facts


@click.command("info")
@click.argument("directory", type=click.Path(exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def command(directory: str, as_json: bool) -> None:
    """Filesystem, device, alignment, direct I/O, which engines run and why not, limits, endurance if readable."""
    found = facts(directory)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _print(found, 0)


def _print(found: dict, depth: int) -> None:
    for key, value in found.items():
        label = "  " * depth + str(key)
        if isinstance(value, dict):
            click.echo(label)
            _print(value, depth + 1)
        else:
            click.echo(f"{label:32} {', '.join(map(str, value)) if isinstance(value, list) else value}")
