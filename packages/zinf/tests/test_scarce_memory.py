"""Freed blocks go back to the system where memory is scarce: seen in the kernel's own count of resident pages."""

from __future__ import annotations

import pytest

COUNT = """
import sys, torch, zinf, zinf.scarce_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

zinf.scarce_memory._PLENTY = int(sys.argv[1])
"""

LATER = (
    COUNT
    + """
zinf.shard(torch.nn.Linear(4, 4), zinf.Config())
torch.ones(20 << 20, dtype=torch.uint8)  # freeing it raises glibc's threshold, unless that is fixed
before = resident()
blocks = [torch.ones(2 << 20, dtype=torch.uint8) for _ in range(64)]
last = blocks[-1]
del blocks
print((resident() - before) >> 20)
"""
)

EARLIER = (
    COUNT
    + """
blocks = [torch.ones(100 << 10, dtype=torch.uint8) for _ in range(640)]
last = blocks[-1]  # above all others: the heap cannot shrink by itself
before = resident()
del blocks
zinf.shard(torch.nn.Linear(4, 4), zinf.Config())
print((before - resident()) >> 20)
"""
)


@pytest.mark.parametrize(("plenty", "returned"), [(1 << 60, True), (0, False)])
def test_memory_returns_only_where_it_is_scarce(run_python, plenty, returned):
    held_mib = int(run_python(LATER, str(plenty)).split()[-1])
    assert (held_mib < 16) == returned, held_mib  # 2 MiB are in use


@pytest.mark.parametrize(("plenty", "returned"), [(1 << 60, True), (0, False)])
def test_what_was_freed_before_returns_too(run_python, plenty, returned):
    given_back_mib = int(run_python(EARLIER, str(plenty)).split()[-1])
    assert (given_back_mib > 32) == returned, given_back_mib  # of 64 MiB; the library's own first use takes some
