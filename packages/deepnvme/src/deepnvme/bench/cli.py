"""The click group deepnvme-bench. Commands are imported when they run, so that --help is immediate."""

from __future__ import annotations

import importlib
import sys

try:
    import click
except ImportError:
    sys.exit("deepnvme-bench needs click and rich: pip install 'deepnvme[bench]'")

_COMMANDS = {"info": "info_command", "run": "run_command", "tune": "tune_command"}


class _LazyGroup(click.Group):
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
