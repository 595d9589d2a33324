"""Every failure is raised by who waits for it, says where, and leaves the engine working."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import deepnvme


def check(error: OSError, code: int, path: object, *words: str) -> None:
    assert error.errno == code
    assert error.filename == str(path)
    for word in words:
        assert word in str(error)


def still_works(io: deepnvme.Engine, tmp_path: Path) -> None:
    assert io.write(tmp_path / "still", b"works").wait() == 5
    assert (tmp_path / "still").read_bytes() == b"works"


def test_absent_file(io, tmp_path):
    with pytest.raises(FileNotFoundError) as failure:
        io.read(tmp_path / "absent", bytearray(10))
    check(failure.value, errno.ENOENT, tmp_path / "absent")
    still_works(io, tmp_path)


def test_absent_directory(io, tmp_path):
    with pytest.raises(FileNotFoundError):
        io.write(tmp_path / "no" / "file", b"x")


def test_directory_is_no_file(io, tmp_path):
    with pytest.raises(IsADirectoryError):
        io.write(tmp_path, b"x")


def test_forbidden_file(run_python):
    run_python(
        """
        import os, deepnvme
        open("secret", "wb").write(b"x" * 100); os.chmod("secret", 0)
        if os.getuid() == 0: os.chmod(".", 0o777); os.setgroups([]); os.setgid(65534); os.setuid(65534)
        with deepnvme.Engine() as io:
            for start in (lambda: io.read("secret", bytearray(100)), lambda: io.write("secret", b"x")):
                try: start(); raise SystemExit("not refused")
                except PermissionError as e: assert e.filename == "secret", e
        """
    )


@pytest.mark.parametrize(
    ("length", "offset", "nbytes"),
    [(0, 0, 1), (5000, 0, 5001), (5000, 4096, 4096), (1 << 21, 1 << 20, 3 << 20), (100, 10_000, 10)],
)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_short_file(io, tmp_path, length, offset, nbytes, direct, aligned):
    path = tmp_path / "file"
    path.write_bytes(bytes(length))
    out = deepnvme.empty(nbytes + 1).numpy()[0 if aligned else 1 :][:nbytes]
    with deepnvme.File(path, direct=direct) as file:
        request = io.read(file, out, offset)
        with pytest.raises(OSError, match=f"{nbytes} bytes at offset {offset}") as failure:
            request.wait()
    check(failure.value, errno.ENODATA, path, "too short")
    assert request.done()
    still_works(io, tmp_path)


def test_file_that_is_truncated_while_it_is_read(backend, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    out = deepnvme.empty(64 << 20)
    with deepnvme.Engine(backend, queue_depth=1, block_size="64KiB") as io:
        request = io.read(path, out)
        os.truncate(path, 1000)
        with pytest.raises(OSError, match="No data available"):
            request.wait()
        still_works(io, tmp_path)


@pytest.mark.parametrize("nbytes", [100, 4 << 20])
def test_full_device(io, tmp_path, nbytes):
    request = io.write("/dev/full", np.zeros(nbytes, np.uint8))
    with pytest.raises(OSError, match=f"write of {nbytes} bytes at offset 0") as failure:
        request.wait()
    check(failure.value, errno.ENOSPC, "/dev/full")
    assert io.flush() == 1  # its failure was raised already
    still_works(io, tmp_path)


def test_flush_raises_a_failure_nobody_waited_for(io, tmp_path):
    io.write("/dev/full", bytes(10))
    io.write(tmp_path / "file", bytes(10))
    with pytest.raises(OSError, match="No space left"):
        io.flush()
    assert io.flush() == 0
    still_works(io, tmp_path)


def test_close_raises_a_failure_nobody_waited_for(backend):
    io = deepnvme.Engine(backend)
    io.write("/dev/full", bytes(10))
    with pytest.raises(OSError, match="No space left"):
        io.close()
    io.close()


@pytest.fixture
def small_filesystem(tmp_path):
    """A directory that holds 1 MiB."""
    directory = tmp_path / "small"
    directory.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(directory)]).returncode:
        pytest.skip("needs root to mount a small filesystem")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture
def small_drive(tmp_path):
    """A directory on an ext4 of 16 MiB behind a loop device, with O_DIRECT."""
    image, directory = tmp_path / "image", tmp_path / "drive"
    directory.mkdir()
    with open(image, "wb") as f:
        f.truncate(16 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", str(image)], capture_output=True)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(directory)], capture_output=True)
    if made.returncode or mounted.returncode:
        pytest.skip("needs root and loop devices")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:direct I/O")
@pytest.mark.parametrize("where", ["small_filesystem", "small_drive"])
@pytest.mark.parametrize("nbytes", [32 << 20, (32 << 20) + 1])
def test_full_filesystem(io, tmp_path, request, where, nbytes):
    directory = request.getfixturevalue(where)
    data = deepnvme.empty(nbytes)
    with pytest.raises(OSError, match=f"{nbytes} bytes at offset 0") as failure:
        io.write(directory / "file", data).wait()
    check(failure.value, errno.ENOSPC, directory / "file")
    os.unlink(directory / "file")
    # It fills up in small steps, too: not one that was reported written may be missing.
    written = 0
    with deepnvme.File(directory / "file", "w") as file:
        while True:
            try:
                io.write(file, np.full(5001, written % 251, np.uint8), written * 5001).wait()
            except OSError as e:
                check(e, errno.ENOSPC, directory / "file")
                break
            written += 1
    content = (directory / "file").read_bytes()
    assert all(content[i * 5001 : (i + 1) * 5001] == bytes([i % 251]) * 5001 for i in range(written))
    with pytest.raises(OSError, match="No space left"):
        deepnvme.File(directory / "large", "w", size=nbytes)
    assert not (directory / "large").exists()
    with pytest.raises(OSError, match="No space left"):
        deepnvme.File.anonymous(directory, size=nbytes)
    still_works(io, tmp_path)


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:direct I/O")
@pytest.mark.parametrize("where", ["small_filesystem", "small_drive"])
def test_a_reservation_that_fails_takes_nothing(request, where):
    """Of the drive's room, and of files that were there, one member or all."""
    directory = request.getfixturevalue(where)
    (directory / "one").write_bytes(b"12345")
    (directory / "two").write_bytes(b"")
    free = os.statvfs(directory).f_bavail
    for paths in ("one", "new"), ("one",), ("new", "two", "one"), ("new",):
        with pytest.raises(OSError, match="No space left"):
            deepnvme.File([directory / path for path in paths], "w", size=64 << 20)
        assert (directory / "one").read_bytes() == b"12345"
        assert (directory / "two").read_bytes() == b""
        assert not (directory / "new").exists()
        assert os.statvfs(directory).f_bavail == free


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:direct I/O")
@pytest.mark.parametrize("where", ["small_filesystem", "small_drive"])
@pytest.mark.parametrize("members", [1, 2])
def test_a_write_that_finds_no_room_leaves_the_file_as_it_was(io, request, where, members):
    """No longer, with zeros that nobody wrote; and what others append meanwhile stays."""
    directory = request.getfixturevalue(where)
    paths = [directory / str(number) for number in range(members)]
    large = deepnvme.empty(64 << 20)
    with deepnvme.File(paths, "w", stripe=64 << 10) as file:
        io.write(file, np.full(200_000, 7, np.uint8)).wait()
        before, free = [path.read_bytes() for path in paths], os.statvfs(directory).f_bavail
        for offset in (0, 100_000, 200_000, 300_001):
            with pytest.raises(OSError, match="No space left"):
                io.write(file, large, offset).wait()
            assert [path.read_bytes() for path in paths] == before
            assert free - os.statvfs(directory).f_bavail <= members  # a block of extents each, of thousands
        small, refused = [], []
        for number in range(50):
            small.append(io.write(file, np.full(5001, number, np.uint8), 200_000 + number * 5001))
            refused.append(io.write(file, large, 200_000 + number * 5001))
        # While a reservation holds all there is, before it fails, a small write may find no room either.
        errors = [error_of(one) for one in small]
        assert set(errors) <= {0, errno.ENOSPC}
        assert {error_of(one) for one in refused} == {errno.ENOSPC}
        for number, error in enumerate(errors):
            if not error:
                back = np.empty(5001, np.uint8)
                io.read(file, back, 200_000 + number * 5001).wait()
                assert (back == number).all()
        io.write(file, bytes(300_000), 200_000).wait()


def error_of(request):
    try:
        request.wait()
    except OSError as e:
        return e.errno
    return 0


@pytest.mark.parametrize("path", ["there/", "there/.", "no/../there", "there/../there", "", "."])
def test_what_was_there_stays_when_it_cannot_be_opened(io, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("there").write_bytes(b"precious")
    with pytest.raises(OSError, match=r"opening it for writing"):
        io.write(path, b"x").wait()
    with pytest.raises(OSError, match=r"opening it for writing"):
        deepnvme.File(["new", path], "w")
    assert os.listdir() == ["there"]
    assert Path("there").read_bytes() == b"precious"


def test_what_another_process_made_in_the_meantime_stays(tmp_path, monkeypatch):
    """A file that came between looking and creating. One that we have made goes."""
    there, opened = tmp_path / "file", os.open

    def slow_open(path, flags, *rest):
        try:
            return opened(path, flags, *rest)
        except FileNotFoundError:
            there.write_bytes(b"theirs")
            raise

    monkeypatch.setattr(os, "open", slow_open)
    with pytest.raises(OSError, match="absent"):
        deepnvme.File([there, tmp_path / "no" / "absent"], "w")
    assert there.read_bytes() == b"theirs"
    there.unlink()
    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(ValueError, match="stripe"):
        deepnvme.File(there, "w", stripe=5)
    assert not there.exists()


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:direct I/O")
def test_swap_on_a_full_drive_does_not_claim_the_tensor(small_filesystem):
    with deepnvme.Swap(small_filesystem) as swap:
        swap.put("fits", np.ones(1000)).wait()
        with pytest.raises(OSError, match="No space left"):
            swap.put("large", np.zeros(4 << 20, np.uint8)).wait()
        assert swap.names() == ["fits"]
        with pytest.raises(KeyError, match="large"):
            swap.get("large")
        assert (swap.get("fits").result().numpy() == 1).all()


@pytest.mark.root
@pytest.mark.filterwarnings("ignore:direct I/O")
def test_swap_on_a_full_drive_reuses_the_room_it_has(small_filesystem):
    with deepnvme.Swap(small_filesystem) as swap:
        stored = []
        with contextlib.suppress(OSError):
            for number in range(64):
                swap.put(f"{number}", np.full(64 << 10, number, np.uint8)).wait()
                stored.append(number)
        assert 3 < len(stored) < 64
        swap.pop("1")
        swap.put("again", np.full(64 << 10, 200, np.uint8)).wait()
        swap.put("0", np.full(64 << 10, 201, np.uint8)).wait()
        with pytest.raises(OSError, match="No space left"):
            swap.put("more", np.zeros(64 << 10, np.uint8)).wait()
        for name, value in {"again": 200, "0": 201, f"{stored[-1]}": stored[-1]}.items():
            assert (swap.get(name).result().numpy() == value).all()


@pytest.mark.root
def test_failing_drive(io, tmp_path):
    """EIO from a real block device: a loop device whose backing file has lost its second half."""
    image = tmp_path / "image"
    image.write_bytes(bytes(4 << 20))
    made = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip("needs root and loop devices")
    device = made.stdout.strip()
    try:
        os.truncate(image, 2 << 20)
        out = deepnvme.empty(1 << 20)
        assert io.read(device, out).wait() == 1 << 20
        with pytest.raises(OSError, match="read of 1048576 bytes at offset 3145728") as failure:
            io.read(device, out, 3 << 20).wait()
        check(failure.value, errno.EIO, device)
        still_works(io, tmp_path)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_file_size_limit(run_python, backend):
    run_python(
        """
        import errno, resource, sys, deepnvme
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with deepnvme.Engine(sys.argv[1]) as io:
            for nbytes in (4 << 20, 100_000):
                try: io.write("file", bytes(nbytes), (1 << 20) - 50_000).wait(); raise SystemExit("no error")
                except OSError as e: assert (e.errno, e.filename) == (errno.EFBIG, "file"), e
            assert io.write("file", bytes(1000)).wait() == 1000
        """,
        backend,
    )


def test_descriptor_limit(run_python):
    run_python(
        """
        import errno, os, resource, deepnvme
        with deepnvme.Engine() as io:
            resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
            kept = []
            try:
                while True: kept.append(os.dup(0))
            except OSError: pass
            try: io.write("file", b"x"); raise SystemExit("no error")
            except OSError as e: assert (e.errno, e.filename) == (errno.EMFILE, "file"), e
            try: deepnvme.Engine("io_uring"); raise SystemExit("no error")
            except OSError as e: assert e.errno == errno.EMFILE and "descriptor limit" in str(e), e
            for fd in kept: os.close(fd)
            assert io.write("file", b"x").wait() == 1
        """
    )


def test_memory_limit(run_python, backend):
    run_python(
        """
        import errno, re, resource, sys, deepnvme, numpy as np
        aligned, odd = deepnvme.empty(1 << 20), np.zeros((1 << 20) + 1, np.uint8)[1:]
        with deepnvme.Engine(sys.argv[1]) as io:
            # Every thread of the engine has what libc gives it when it first works (a heap, thread-local data).
            for request in [io.write("file", aligned, start << 20) for start in range(64)]: request.wait()
            in_use = int(re.search(r"VmSize:\\s*(\\d+)", open("/proc/self/status").read())[1]) << 10
            resource.setrlimit(resource.RLIMIT_AS, (in_use + (4 << 20), -1))
            for start in (io.write, io.read):
                assert io.write("file", aligned).wait() == 1 << 20
                try: start("file", odd).wait(); raise SystemExit("no error")
                except OSError as e: assert e.errno == errno.ENOMEM and "bounce" in str(e), e
            try: deepnvme.Pool("1GiB"); raise SystemExit("no error")
            except OSError as e: assert e.errno == errno.ENOMEM, e
        """,
        backend,
    )


def test_thread_limit(run_python, backend):
    run_python(
        """
        import errno, os, resource, sys, deepnvme
        if os.getuid() == 0: os.chmod(".", 0o777); os.setgroups([]); os.setgid(65534); os.setuid(65534)
        with deepnvme.Engine(sys.argv[1], threads=2) as io:
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            try: deepnvme.Engine(sys.argv[1], threads=4); raise SystemExit("no error")
            except OSError as e: assert e.errno == errno.EAGAIN and "thread" in str(e), e
            assert io.write("file", b"x").wait() == 1
        """,
        backend,
    )


def test_closed_engine(backend, tmp_path):
    io = deepnvme.Engine(backend)
    request = io.write(tmp_path / "file", bytes(1 << 20))
    io.close()
    assert request.done()
    assert request.wait() == 1 << 20
    for use in (lambda: io.write(tmp_path / "file", b"x"), lambda: io.read(tmp_path / "file", bytearray(1)), io.flush):
        with pytest.raises(ValueError, match="closed"):
            use()
    io.close()


@pytest.mark.parametrize("offset", [0.5, "4KiB", None])
def test_an_offset_is_a_whole_number(io, tmp_path, offset):
    with pytest.raises(TypeError, match="offset must be a whole number, found"):
        io.write(tmp_path / "f", b"x", offset=offset)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [(1 << 64) - 1, (1 << 64) - 4096, (1 << 63) - 1, 1 << 63, 1 << 64])
def test_an_offset_beyond_every_file_is_refused(backend, tmp_path, offset, direct):
    content = bytes(range(256)) * 32
    (tmp_path / "f").write_bytes(content)
    with deepnvme.Engine(backend, direct=direct) as io:
        for start, array in ((io.write, b"x"), (io.read, bytearray(1))):
            with pytest.raises(ValueError, match="beyond"):
                start(tmp_path / "f", array, offset)
        with pytest.raises(OSError):  # the last byte that there could be
            io.read(tmp_path / "f", bytearray(1), (1 << 63) - 2).wait()
        assert (tmp_path / "f").read_bytes() == content
        still_works(io, tmp_path)


def test_a_path_that_is_no_text(io, tmp_path, noise):
    before = len(os.listdir("/proc/self/fd"))
    path = os.fsencode(tmp_path) + b"/\xff\xe9"
    data = noise(10_000)
    io.write(os.fsdecode(path), data).wait()
    with open(path, "rb") as file:
        assert file.read() == data.tobytes()
    with pytest.raises(OSError, match="too short"):
        io.read(os.fsdecode(path), bytearray(20_000)).wait()
    io.flush()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_that_leads_nowhere_stays_when_its_file_cannot_be_made(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError):
        deepnvme.File(tmp_path / "link", "w", size="1000TiB")
    assert (tmp_path / "link").is_symlink()
    assert not (tmp_path / "target").exists()


def test_members_of_a_striped_file_are_distinct(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for twice in ("a", "link"):
        with pytest.raises(ValueError, match=f"{twice} is the same file as .*a: each member needs its own"):
            deepnvme.File([tmp_path / "a", tmp_path / "b", tmp_path / twice], "w")
    assert not (tmp_path / "a").exists()  # made here, and taken back
    with deepnvme.Swap([tmp_path, tmp_path]) as swap:  # two anonymous files of one directory
        swap.put("x", np.arange(1 << 20)).wait()
        assert np.array_equal(swap.get("x").result().numpy(), np.arange(1 << 20))


def test_no_descriptor_is_left_of_members_that_could_be_opened(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for fails in (
        lambda: deepnvme.File([tmp_path / "a", tmp_path / "no" / "b"], "w"),
        lambda: deepnvme.File([tmp_path / "a", tmp_path / "a"], "w"),
        lambda: deepnvme.Swap([tmp_path, tmp_path / "no"]),
    ):
        with pytest.raises((OSError, ValueError)):
            fails()
        assert len(os.listdir("/proc/self/fd")) == before


def test_file_opened_for_reading_is_not_written(io, tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    with deepnvme.File(tmp_path / "file") as file, pytest.raises(ValueError, match="opened for reading"):
        io.write(file, b"x")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_arguments_that_make_no_sense(tmp_path):
    for bad in ({"queue_depth": "8"}, {"threads": 1.5}):
        with pytest.raises(TypeError, match=f"{next(iter(bad))} must be a whole number"):
            deepnvme.Engine(**bad)
    for bad in ({"queue_depth": 0}, {"block_size": 1000}, {"block_size": "2GiB"}, {"threads": 0}, {"direct": "yes"}):
        with pytest.raises(ValueError):
            deepnvme.Engine(**bad)
    sizes = ({"stripe": 100}, {"stripe": 1 << 62}, {"size": "1 parsec"}, {"size": 1 << 63})
    for bad in ({"mode": "a"}, {"direct": 2}, *sizes):
        with pytest.raises(ValueError):
            deepnvme.File(tmp_path / "file", **{"mode": "w", **bad})
    assert list(tmp_path.iterdir()) == []
    with deepnvme.Engine() as io, pytest.raises(ValueError, match="negative"):
        io.write(tmp_path / "file", b"x", -1)
    for memory in (deepnvme.Pool, lambda nbytes: deepnvme.Swap(tmp_path, nbytes)):
        for nbytes in (1 << 63, (1 << 64) - 1, "16777216TiB"):
            with pytest.raises(ValueError, match="capacity must be at most"):
                memory(nbytes)
    (tmp_path / "short").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="size 11 of a file opened for reading, which has 10 bytes"):
        deepnvme.File(tmp_path / "short", size=11)


@pytest.mark.parametrize("yes", [1, np.True_])
@pytest.mark.parametrize("no", [0, np.False_])
def test_numbers_for_yes_and_no_are_obeyed(tmp_path, yes, no):
    with deepnvme.Engine(direct=no) as io:
        io.write(tmp_path / "file", bytes(8192)).wait()
        assert io.direct is False
        assert io.stats().cached_bytes == 8192
    with deepnvme.File(tmp_path / "file", direct=no) as file:
        assert file.direct is False
    with pytest.raises(OSError, match="O_DIRECT"):
        deepnvme.File("/dev/null", "r+", direct=yes)


# As some filesystems answer (ext2, some network ones). Nothing but ftruncate would be left to make a file longer ahead
# of a write, and it cuts off what another request has written meanwhile behind its end.
NO_RESERVING = ("fallocate=EOPNOTSUPP", "ftruncate=EIO")


def test_a_write_lengthens_its_file_by_itself_where_nothing_can_be_reserved(run_python, backend):
    run_python(
        """
        import sys, deepnvme, numpy as np
        data = np.random.default_rng(1).integers(0, 256, 3 << 20, dtype=np.uint8)
        with deepnvme.Engine(sys.argv[1]) as io:
            for offset in (0, 10 << 20, (5 << 20) + 77):
                assert io.write("file", data, offset).wait() == data.nbytes
            io.write("file", b"small", 20 << 20).wait()
        found = np.fromfile("file", np.uint8)
        wanted = np.zeros((20 << 20) + 5, np.uint8)
        for offset in (0, 10 << 20, (5 << 20) + 77): wanted[offset : offset + data.nbytes] = data
        wanted[20 << 20 :] = np.frombuffer(b"small", np.uint8)
        assert np.array_equal(found, wanted)
        """,
        backend,
        forbid=NO_RESERVING,
    )


def test_members_that_a_write_does_not_reach_grow_where_nothing_can_be_reserved(run_python):
    run_python(
        """
        import deepnvme, numpy as np
        with deepnvme.Engine() as io, deepnvme.File(["a", "b", "c"], "w", stripe=4096) as file:
            io.write(file, b"end", 7 * 4096).wait()  # in the second member
            assert file.size == 7 * 4096 + 3
            all_of_it = np.ones(7 * 4096 + 3, np.uint8)
            io.read(file, all_of_it).wait()
            assert not all_of_it[:-3].any() and all_of_it[-3:].tobytes() == b"end"
            io.write(file, b"", 9 * 4096).wait()
            assert file.size == 9 * 4096
        """,
        forbid=NO_RESERVING[:1],
    )
