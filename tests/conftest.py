"""The whole's tests use the fixtures and helpers of the packages' own, which are put on the path here."""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGES = Path(__file__).parent.parent / "packages"
FOLDERS = ("zinf/tests", "zero3/tests", "zinf/benchmarks")  # a memory cgroup is what the benchmarks use as well
sys.path[:0] = [str(Path(__file__).parent), *(str(PACKAGES / folder) for folder in FOLDERS)]

from zinf_fixtures import *  # noqa: F403
