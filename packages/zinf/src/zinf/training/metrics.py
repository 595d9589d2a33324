"""The record of a run: one JSON object a line and step, and what a resumed run does with the lines of before."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from ..named_file import named_file


class MetricsFile:
    """Appends one line a step. What is in the file is always whole lines of steps that were taken."""

    def __init__(self, path: Path, *, keep_through_step: int | None = None) -> None:
        """Opens `path`, anew or, with `keep_through_step`, behind the lines of the steps up to that one.

        Lines after it describe steps that will be taken again, so they go; so does a line that a crash cut short.
        Raises OSError when the file cannot be written.
        """
        if not path.exists() or path.is_file():  # else it is a device or a pipe, which must stay what it is
            kept = [] if keep_through_step is None else _lines_through(path, keep_through_step)
            # Beside and renamed: a crash here leaves either the old file or the new one.
            beside = path.with_name(path.name + ".partial")
            with named_file(beside):
                beside.write_text("".join(kept), encoding="utf-8")
            os.replace(beside, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Adds a line and hands it to the system. Numbers that JSON has no word for (inf, nan) become null."""
        with named_file(self._file.name):
            self._file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _lines_through(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            break  # cut short: nothing of use follows
    return kept


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
