"""The whole's tests use the fixtures and helpers of the packages' own, which are put on the path here."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = Path(__file__).parent.parent / "packages"
sys.path[:0] = [str(Path(__file__).parent), str(PACKAGES / "zinf" / "tests"), str(PACKAGES / "zero3" / "tests")]

from zinf_fixtures import *  # noqa: F403
