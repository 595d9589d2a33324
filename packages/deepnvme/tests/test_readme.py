"""The README's code runs, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_code_blocks_run_in_order(run_python):
    pytest.importorskip("torch")
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    out = run_python("\n".join(blocks)).splitlines()
    assert out[0] == "2000000"
    assert out[1] == "2"
    assert out[-1].startswith("[Errno 28] No space left on device: write of 2000000 bytes at offset 0")
