"""The click group deepnvme-bench. Commands are imported when they run, so that --help is immediate."""

from __future__ import annotations

import importlib
import sys
from typing import Any

try:
    import click
except ImportError:
    sys.exit("deepnvme-bench needs click and rich: pip install 'deepnvme[bench]'")

from .lost_output import words_for

_COMMANDS = {"info": "info_command", "run": "run_command", "tune": "tune_command"}


class _LazyGroup(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if (words := words_for(error)) is None:
                raise
            sys.exit(words)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        return importlib.import_module(f".{_COMMANDS[name]}", __package__).command


@click.group(cls=_LazyGroup)
@click.version_option(package_name="deepnvme")
def main() -> None:
    """Measures a drive, compares with fio, and tunes deepnvme for it."""


if __name__ == "__main__":
    main()
