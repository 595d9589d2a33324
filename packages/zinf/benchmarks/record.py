"""What a benchmark found, as JSON: printed, and written into a file where one was given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def put(found: dict[str, Any], path: Path | None) -> None:
    text = json.dumps(found, indent=2)
    print(text)
    if path:
        path.write_text(text + "\n", encoding="utf-8")
