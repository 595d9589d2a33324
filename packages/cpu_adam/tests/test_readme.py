"""The README's code runs: ```python blocks from top to bottom, ```py blocks (JAX) where JAX is installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def run_blocks(kind, folder):
    if not README.exists():
        pytest.skip("README.md does not lie beside these tests")
    script = folder / "readme.py"
    script.write_text("\n".join(re.findall(rf"^```{kind}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)))
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_python(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    run_blocks("python", tmp_path)


@pytest.mark.peers
def test_jax(tmp_path):
    pytest.importorskip("optax", reason="optax is not installed")
    run_blocks("py", tmp_path)
