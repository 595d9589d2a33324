"""The group of commands, and how every one of them fails: one line on standard error and an exit code.

0: done. 1: failed while running. 2: what was asked for cannot be done. 130: interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from deepnvme.bench.lost_output import words_for

INTERRUPTED = 130  # 128 + SIGINT, as shells say it


class BadInput(click.ClickException):
    """What the person gave cannot work; the message says what, what was found and what is accepted."""

    exit_code = 2


class GivenPath(click.Path):
    """A path that names something. An empty one, which a shell makes of an unset variable, would be where we stand."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path names nothing.", param, ctx)
        return super().convert(value, param, ctx)


class _CommandGroup(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        try:
            outcome = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            _end(error.exit_code, f"Error: {' '.join(error.format_message().split())}")
        except (click.Abort, KeyboardInterrupt):
            _end(INTERRUPTED, "Interrupted.")
        except OSError as error:
            if (words := words_for(error)) is None:
                raise
            _end(1, words)
        sys.exit(outcome if isinstance(outcome, int) else 0)


def _end(code: int, line: str) -> NoReturn:
    """Ends the process with one line for the person.

    One rank of several leaves at once: the others may be waiting for it in a collective, where tidying up would wait
    too; torchrun ends them when it sees this exit.
    """
    print(line, file=sys.stderr, flush=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


@click.group(
    cls=_CommandGroup,
    no_args_is_help=False,  # `zinf` alone is a mistake with a one-line answer, like any other
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="zinf")
def main() -> None:
    """ZeRO-Infinity: train models larger than memory, with their states on NVMe."""
