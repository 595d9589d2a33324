"""Freed blocks go back to the system where memory is scarce: seen in the kernel's own count of resident pages."""

from __future__ import annotations

import pytest

SCRIPT = """
import sys, torch, zinf

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

budget = sys.argv[1] if sys.argv[1] != "none" else None
zinf.shard(torch.nn.Linear(4, 4), zinf.Config(host_memory=budget))
torch.ones(20 << 20, dtype=torch.uint8)  # freeing it raises glibc's threshold, unless that is fixed
before = resident()
blocks = [torch.ones(2 << 20, dtype=torch.uint8) for _ in range(64)]
last = blocks[-1]
del blocks
print((resident() - before) >> 20)
"""


@pytest.mark.parametrize(("budget", "returned"), [("1GiB", True), ("none", False)])
def test_memory_returns_only_where_a_budget_asks_for_it(run_python, budget, returned):
    held_mib = int(run_python(SCRIPT, budget).split()[-1])
    assert (held_mib < 16) == returned, held_mib  # 2 MiB are in use
