"""Memory without a stretch long enough for a layer (paper, Figure 6b): the allocator answers ENOMEM above a size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import refusing_allocator

WHOLE = 1024 * 4096 * 4  # bytes of the large layer's weight in float32, of its gradient, and of each optimizer state
STRETCH = WHOLE // 2  # the longest that there is
TILE = WHOLE // 16

SCRIPT = """
import json, sys, tempfile
import torch
import refusing_allocator, zinf
from zero3.tiles import tiles_of

settings, stretch, drive = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def train(width, folder):
    config = zinf.Config.preset("inf-nvme", nvme=[drive], dtype=torch.float32, resident=0, **settings)
    torch.manual_seed(0)
    with zinf.init(config):
        model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.Tanh(), torch.nn.Linear(4 * width, 1))
    optimizer = zinf.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(step))
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            zinf.save(folder, model, optimizer)
    zinf.load(folder, model, optimizer)
    again = model(x).square().mean().item()
    zinf.export(model, folder + "/weights")
    zinf.load_pretrained(model, folder + "/weights")
    assert model(x).square().mean().item() == again
    tiles = tiles_of(model[0].weight)
    return {"losses": [loss.item() for loss in losses], "again": again, "tiles": tiles and len(tiles.params)}

train(16, tempfile.mkdtemp(dir=drive))  # what a process allocates once
refusing_allocator.refuse_above(stretch)
print(json.dumps(train(1024, tempfile.mkdtemp(dir=drive))))
"""


EVERYBODY = """
import mmap
import deepnvme, numpy, torch
import refusing_allocator

refusing_allocator.refuse_above(1 << 20)
for give in (
    bytearray, deepnvme.empty, lambda n: numpy.empty(n, "uint8"), lambda n: numpy.zeros(n, "uint8"),
    lambda n: torch.empty(n, dtype=torch.uint8), lambda n: torch.zeros(n, dtype=torch.uint8),
    lambda n: mmap.mmap(-1, n), lambda n: bytearray(64).__imul__(n // 64),
):
    give(1 << 19)
    try:
        give(1 << 21)
    except (MemoryError, RuntimeError, OSError):
        print("refused")
"""


@pytest.fixture(scope="module")
def environment():
    try:
        with refusing_allocator.preloaded() as environment:
            yield environment
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the allocator cannot be compiled: {error}")


@pytest.fixture
def run(environment):
    """(exit status, what a script printed, its errors), where it can refuse memory."""

    def run(*command: str) -> tuple[int, str, str]:
        path = [*sys.path, str(Path(refusing_allocator.__file__).parent)]
        one_thread = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(path)}
        done = subprocess.run(
            [sys.executable, "-c", *command],
            env={**environment, **one_thread},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def trained(run, tmp_path):
    """The same of SCRIPT with these settings, in memory of stretches of so many bytes."""
    return lambda stretch, **settings: run(SCRIPT, json.dumps(settings), str(stretch), str(tmp_path))


def test_nobody_gets_a_stretch_that_is_too_long(run):
    """Or the tests below would prove nothing."""
    status, output, errors = run(EVERYBODY)
    assert status == 0, errors
    assert output.split() == ["refused"] * 8


def test_without_tiles_the_error_says_how_much_was_wanted(trained):
    status, _, errors = trained(STRETCH, tile_bytes=1 << 40)
    assert status == 1
    assert "can't allocate memory" in errors
    assert str(WHOLE) in errors


def test_in_tiles_neither_weight_nor_gradient_nor_state_ever_exists_whole(trained):
    """Construction, steps, save, load, export and import: by a size of tiles, and by themselves."""
    found = []
    for settings in ({"tile_bytes": TILE}, {"device_memory": STRETCH}):
        status, output, errors = trained(STRETCH, **settings)
        assert status == 0, errors
        found.append(json.loads(output))
    assert [one["tiles"] for one in found] == [16, 8]
    status, output, errors = trained(0, tile_bytes=1 << 40)
    assert status == 0, errors
    whole = json.loads(output)
    assert whole["tiles"] is None
    for one in found:
        assert one["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert one["again"] == pytest.approx(whole["again"], rel=1e-5)
