"""Where huge pages are forbidden to the process, misaligned memory passes through what io_uring can give instead."""

from __future__ import annotations

import os

import pytest

WITHOUT_HUGE_PAGES = """
import ctypes, deepnvme, numpy as np
from deepnvme import _core
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
POOL = 6 << 20
assert not deepnvme.empty(POOL).huge_pages
"""
ROUNDTRIPS = """
random = np.random.default_rng(0)
for backend in [name for name, answer in deepnvme.backends().items() if answer == "ok"]:
    with deepnvme.Engine(backend) as io:
        for nbytes in (1, 4097, 1 << 20, (40 << 20) + 5):
            data = random.integers(0, 256, nbytes + 64, dtype=np.uint8)[64:]
            io.write("file", data).wait()
            assert open("file", "rb").read(nbytes) == data.tobytes()
            back = np.zeros(nbytes + 3, np.uint8)
            io.read("file", back[3:]).wait()
            assert (back[3:] == data).all() and not back[:3].any()
        assert io.stats().bounced_bytes > 40 << 20
"""


def test_bytes_are_exact(run_python):
    run_python(WITHOUT_HUGE_PAGES + ROUNDTRIPS)


def test_bytes_are_exact_and_small_pages_are_said_where_io_uring_is_forbidden(run_python):
    check = 'assert _core.bounce_pages(POOL) == "small pages"\n'
    run_python(WITHOUT_HUGE_PAGES + check + ROUNDTRIPS, forbid=("io_uring_setup=EPERM",))


def test_an_ordinary_users_locked_memory_is_enough_for_any_number_of_engines(run_python):
    # 8 MiB hold the memory of one engine; all others go on with small pages.
    run_python(
        WITHOUT_HUGE_PAGES
        + """
import os, resource
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
if os.getuid() == 0: os.setgroups([]); os.chmod(".", 0o777); os.setgid(65534); os.setuid(65534)
engines = [deepnvme.Engine() for _ in range(5)]
data = np.arange(9 << 20, dtype=np.uint8)[1:]
for i, io in enumerate(engines): io.write(f"file{i}", data)
for i, io in enumerate(engines):
    assert io.flush() == 1
    back = np.zeros(data.size + 7, np.uint8)[7:]
    io.read(f"file{i}", back).wait()
    assert (back == data).all()
"""
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root is told where a page lies")
def test_the_pools_memory_lies_in_one_piece(run_python):
    out = run_python(
        WITHOUT_HUGE_PAGES
        + """
import re, struct
if _core.bounce_pages(POOL) == "small pages":
    print("none")
    raise SystemExit
with deepnvme.Engine() as io:
    io.write("file", np.ones(POOL + 1, np.uint8)[1:]).wait()
    ranges = [re.match(r"(\\w+)-(\\w+) .* anon_inode:\\[io_uring\\]", line) for line in open("/proc/self/maps")]
    stretches = [(int(r[1], 16), int(r[2], 16)) for r in ranges if r]
    pages = []
    with open("/proc/self/pagemap", "rb") as pagemap:
        for start, end in stretches:
            if end - start < 1 << 20: continue  # the rings themselves
            pagemap.seek(start // 4096 * 8)
            entries = struct.unpack(f"{(end - start) // 4096}Q", pagemap.read((end - start) // 512))
            pages += [entry & (1 << 55) - 1 for entry in entries]
jumps = sum(b != a + 1 for a, b in zip(pages, pages[1:]))
print(len(pages) * 4096, jumps)
"""
    )
    if out.strip() == "none":
        pytest.skip("this kernel (before Linux 6.13) gives no such memory")
    nbytes, jumps = map(int, out.split())
    assert nbytes == 6 << 20
    # Three stretches of 512 pages; the kernel takes smaller ones where no free memory lies in pieces so large.
    assert jumps < 1536 // 8


def test_a_pool_that_is_taken_often_leaves_nothing_behind(run_python):
    run_python(
        WITHOUT_HUGE_PAGES
        + """
import os
def mapped(): return sum("io_uring" in line for line in open("/proc/self/maps"))
before = mapped(), len(os.listdir("/proc/self/fd"))
for _ in range(50):
    _core.bounce_pages(POOL)
assert (mapped(), len(os.listdir("/proc/self/fd"))) == before
"""
    )
