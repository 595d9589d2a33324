"""Values of command-line options: what cannot be measured is refused before anything is."""

from __future__ import annotations

import math
import os
from typing import Any

import click

from ..sizes import parse_size


class Size(click.ParamType):
    """Bytes, also as "1MiB"; a multiple of `unit`, at most `most`."""

    name = "size"

    def __init__(self, unit: int = 1, most: int | None = None) -> None:
        self.unit, self.most = unit, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            nbytes = parse_size(value)
        except ValueError as e:
            self.fail(str(e), param, ctx)
        if nbytes == 0 or nbytes % self.unit or (self.most is not None and nbytes > self.most):
            most = "" if self.most is None else f" and at most {self.most}"
            self.fail(f"{value} is no multiple of {self.unit} above 0{most}", param, ctx)
        return nbytes


class Seconds(click.FloatRange):
    """0 or more, and finite."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no length of time", param, ctx)
        return seconds


class NewFile(click.Path):
    """A file that can be written: asked before anything is measured, which would be lost."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = os.fsdecode(super().convert(value, param, ctx))
        folder = os.path.dirname(path) or "."
        if path != "-" and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            self.fail(f"{folder} is no directory that can be written", param, ctx)
        return path
