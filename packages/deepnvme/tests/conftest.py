"""Fixtures of all tests: engines of every kind, and processes with some system call forbidden."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import deepnvme

HERE = Path(__file__).parent
BACKENDS = ("io_uring", "libaio", "threads")

# A shell starts background jobs with SIGINT ignored, and their children inherit that: the tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    why_not = deepnvme.backends()[request.param]
    if why_not != "ok":
        pytest.skip(f"{request.param}: {why_not}")
    return request.param


@pytest.fixture
def io(backend: str):
    with deepnvme.Engine(backend) as engine:
        yield engine


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def noise(rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Random bytes; where they lie in memory is up to NumPy."""
    return lambda nbytes: rng.integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., str]:
    """Runs a script in a fresh interpreter, in tmp_path, and returns what it printed.

    forbid: "io_uring_setup=EPERM", ... or "O_DIRECT=EINVAL" (see seccomp_filter.py).
    """

    def run(script: str, *arguments: str, forbid: tuple[str, ...] = (), timeout: float = 60) -> str:
        prelude = f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        if forbid:
            prelude += f"import seccomp_filter; seccomp_filter.install({list(forbid)!r})\n"
        done = subprocess.run(
            [sys.executable, "-c", prelude + textwrap.dedent(script), *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
