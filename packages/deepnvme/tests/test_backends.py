"""Which backend runs, and what is said when one cannot."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

import deepnvme

ROUND_TRIP = """
import warnings, os, numpy as np, deepnvme
data = np.random.default_rng(0).integers(0, 256, 64 << 20, dtype=np.uint8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with deepnvme.Engine() as io:
        io.write("file", data).wait()
        back = np.zeros_like(data)
        io.read("file", back).wait()
        print(io.backend)
    deepnvme.Engine().close()
assert (back == data).all()
for w in caught: print(w.message)
"""


def test_all_run_here_or_say_why():
    found = deepnvme.backends()
    assert list(found) == ["io_uring", "libaio", "threads"]
    assert found["threads"] == "ok"


def test_best_one_is_chosen_without_a_warning(recwarn):
    with deepnvme.Engine() as io:
        assert io.backend == next(name for name, why in deepnvme.backends().items() if why == "ok")
    if io.backend == "io_uring":
        assert not recwarn.list


@pytest.mark.parametrize("forbidden", ["io_uring_setup=EPERM", "io_uring_setup=ENOSYS", "io_uring_enter=EPERM"])
def test_container_without_io_uring(run_python, forbidden):
    lines = run_python(ROUND_TRIP, forbid=(forbidden,)).splitlines()
    assert lines[0] == "libaio"
    assert len(lines) == 2  # one warning, though two engines were made
    assert "io_uring" in lines[1]
    assert "container profile" in lines[1]


def test_container_without_any_asynchronous_io(run_python):
    lines = run_python(ROUND_TRIP, forbid=("io_uring_setup=EPERM", "io_setup=EPERM")).splitlines()
    assert lines[0] == "threads"
    assert "libaio" in lines[1]


def test_forbidden_backend_asked_for_by_name(run_python):
    out = run_python(
        """
        import deepnvme
        print(deepnvme.backends()["io_uring"])
        try: deepnvme.Engine("io_uring")
        except PermissionError as e: print(e)
        """,
        forbid=("io_uring_setup=EPERM",),
    )
    assert out.count("container profile") == 2


def test_unknown_backend():
    with pytest.raises(ValueError, match="'auto' or one of"):
        deepnvme.Engine("spdk")


def test_oversized_queue_depth_is_clamped_with_a_warning(backend, tmp_path):
    with pytest.warns(RuntimeWarning, match="queue_depth 200000"):
        io = deepnvme.Engine(backend, queue_depth=200_000)
    assert io.queue_depth == 4096
    assert io.write(tmp_path / "file", b"bytes").wait() == 5
    io.close()


def test_event_limit_of_the_system_is_named_and_earlier_engines_go_on(tmp_path):
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    if deepnvme.backends()["libaio"] != "ok" or limit > 1 << 20:
        pytest.skip("needs libaio and an fs.aio-max-nr that 256 contexts exceed")
    engines: list[deepnvme.Engine] = []
    with pytest.raises(OSError, match="aio-max-nr") as failure:
        engines.extend(deepnvme.Engine("libaio", queue_depth=4096) for _ in range(300))
    assert failure.value.errno == errno.EAGAIN
    assert "4096" in str(failure.value)
    for io in engines:
        assert io.write(tmp_path / "file", b"bytes").wait() == 5
        io.close()
    # The kernel gives the events back a little later; other tests need them.
    while int(Path("/proc/sys/fs/aio-nr").read_text()) > limit // 2:
        time.sleep(0.01)


def test_ordinary_users_locked_memory_limit_is_enough(run_python):
    run_python(
        """
        import os, resource, deepnvme, numpy as np
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
        if os.getuid() == 0: os.setgroups([]); os.chmod(".", 0o777); os.setgid(65534); os.setuid(65534)
        engines = [deepnvme.Engine() for _ in range(20)]
        assert {io.backend for io in engines} == {next(iter(deepnvme.backends()))}
        data = np.ones(8 << 20, np.uint8)
        for i, io in enumerate(engines): io.write(f"file{i}", data)
        for io in engines: assert io.flush() == 1
        """
    )


def test_filesystem_without_direct_io(run_python):
    script = """
    import warnings, sys, deepnvme, numpy as np
    data = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with deepnvme.Engine() as io:
            io.write("file", data).wait()
            back = np.zeros_like(data)
            io.read("file", back).wait()
            assert io.direct is False and io.stats().direct is False
        assert (back == data).all()
        with deepnvme.File("file") as file: assert file.direct is False
    assert len(caught) == 1, caught
    print(caught[0].message)
    for make in (lambda: deepnvme.Engine(direct=True).read("file", data), lambda: deepnvme.File("file", direct=True)):
        try: make()
        except OSError as e: print(e.errno, e.filename, e)
    """
    lines = run_python(script, forbid=("O_DIRECT=EINVAL",)).splitlines()
    assert "file" in lines[0]
    assert "Invalid argument" in lines[0]
    for line in lines[1:]:
        assert line.startswith(f"{errno.EINVAL} file")
        assert "O_DIRECT" in line


def test_tmpfs_goes_through_memory_and_says_so(run_python):
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    out = run_python(
        """
        import os, tempfile, warnings, deepnvme
        with tempfile.TemporaryDirectory(dir="/dev/shm") as d, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with deepnvme.Engine() as io:
                io.write(d + "/file", b"x" * 10_000).wait()
                print(io.direct)
            assert open(d + "/file", "rb").read() == b"x" * 10_000
            print(caught[0].message)
        """
    )
    assert out.startswith("False")
    assert "page cache" in out
