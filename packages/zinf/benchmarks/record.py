"""What a benchmark found, as JSON: printed, and written into a file where one was given."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, without where it is done and how."""
    places = ("json", "nvme", "out", "inside", "serve")
    return {key: _plain(value) for key, value in vars(given).items() if key not in places}


def _plain(value: Any) -> Any:
    """Of a path its name alone: the rest is this machine's."""
    return value.name if isinstance(value, Path) else value


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def put(found: dict[str, Any], path: Path | None) -> None:
    text = json.dumps(found, indent=2)
    print(text)
    if path:
        path.write_text(text + "\n", encoding="utf-8")
