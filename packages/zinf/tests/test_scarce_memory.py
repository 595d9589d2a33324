"""Freed blocks go back to the system where memory is scarce: seen in the kernel's own count of resident pages."""

from __future__ import annotations

import pytest

SCRIPT = """
import sys, torch, zinf, zinf.scarce_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

zinf.scarce_memory._PLENTY = int(sys.argv[1])
zinf.shard(torch.nn.Linear(4, 4), zinf.Config())
torch.ones(20 << 20, dtype=torch.uint8)  # freeing it raises glibc's threshold, unless that is fixed
before = resident()
blocks = [torch.ones(2 << 20, dtype=torch.uint8) for _ in range(64)]
last = blocks[-1]
del blocks
print((resident() - before) >> 20)
"""


@pytest.mark.parametrize(("plenty", "returned"), [(1 << 60, True), (0, False)])
def test_memory_returns_only_where_it_is_scarce(run_python, plenty, returned):
    held_mib = int(run_python(SCRIPT, str(plenty)).split()[-1])
    assert (held_mib < 16) == returned, held_mib  # 2 MiB are in use
