"""The command `zinf`. Each of its commands lies in a file of its own."""

from __future__ import annotations

from zinf.cli.command_group import main
from zinf.cli.export_command import export
from zinf.cli.plan_command import plan
from zinf.cli.train_command import train
from zinf.cli.verify_command import verify

for _command in (train, plan, export, verify):
    main.add_command(_command)

__all__ = ["main"]
