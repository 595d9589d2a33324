"""Test files are imported one by one, so what they share is put on the path here; its fixtures are everybody's."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from zinf_fixtures import *  # noqa: F403
