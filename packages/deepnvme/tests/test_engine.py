"""Requests from submission to flush: many at once, in any order, from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading

import numpy as np
import pytest

import deepnvme


def test_settings_in_force_can_be_asked(backend, tmp_path):
    with deepnvme.Engine(backend, queue_depth=7, block_size="64KiB") as io:
        assert (io.backend, io.queue_depth, io.block_size) == (backend, 7, 65536)
        assert io.direct is None  # shows with the first file
        io.write(tmp_path / "file", b"some bytes").wait()
        assert io.direct is True
        assert io.stats().backend == backend


@pytest.mark.parametrize("setting", [True, False])
def test_direct_or_not_is_obeyed(backend, tmp_path, noise, setting):
    data = noise(100_000)
    with deepnvme.Engine(backend, direct=setting) as io:
        io.write(tmp_path / "file", data).wait()
        assert io.direct is setting
        assert (io.stats().cached_bytes == data.size) is not setting
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_far_more_requests_than_queue_slots(backend, tmp_path, noise):
    data = noise(1000 * 8192)
    path = tmp_path / "file"
    with deepnvme.Engine(backend, queue_depth=4) as io:
        for i in np.random.default_rng(1).permutation(1000):
            io.write(path, data[i * 8192 : (i + 1) * 8192], int(i) * 8192)
        assert io.flush() == 1000
        assert path.read_bytes() == data.tobytes()
        back = np.zeros_like(data)
        for i in range(1000):
            io.read(path, back[i * 8192 : (i + 1) * 8192], i * 8192)
        assert io.flush() == 1000
        assert (back == data).all()


def test_flush_counts_what_finished_since_the_last_one(io, tmp_path):
    assert io.flush() == 0
    io.write(tmp_path / "file", b"x")
    assert io.flush() == 1
    assert io.flush() == 0
    io.write(tmp_path / "file", b"")
    assert io.flush() == 1
    io.write(tmp_path / "file", b"y").wait()
    assert io.flush() == 1
    assert io.flush() == 0


@pytest.mark.parametrize("elements", [1_234_567, pytest.param(75_497_472, marks=pytest.mark.slow)])
def test_several_large_tensors_queued_at_once_each_to_its_own_file(backend, tmp_path, elements):
    # Six of one size and a larger one, with a depth that is far too small for them.
    tensors = [np.full(elements // 3, i, np.float32) for i in range(6)] + [np.arange(elements, dtype=np.float32)]
    with deepnvme.Engine(backend, queue_depth=2) as io:
        requests = [io.write(tmp_path / f"file{i}", t) for i, t in enumerate(tensors)]
        assert [r.wait() for r in requests] == [t.nbytes for t in tensors]
    for i, tensor in enumerate(tensors):
        assert os.path.getsize(tmp_path / f"file{i}") == tensor.nbytes
        assert (np.fromfile(tmp_path / f"file{i}", np.float32) == tensor).all()


def test_many_threads_share_one_engine(io, tmp_path, noise):
    def work(seed: int) -> bool:
        data = np.random.default_rng(seed).integers(0, 256, 700_000 + seed, dtype=np.uint8)
        back = np.zeros_like(data)
        for turn in range(5):
            io.write(tmp_path / f"file{seed}", data, turn).wait()
            io.read(tmp_path / f"file{seed}", back, turn).wait()
        return bool((back == data).all())

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_several_rings(tmp_path, noise, backend):
    data = noise(20_000_001)
    with deepnvme.Engine(backend, threads=3, queue_depth=4, block_size="64KiB") as io:
        io.write(tmp_path / "file", data).wait()
        back = np.zeros_like(data)
        io.read(tmp_path / "file", back).wait()
    assert (back == data).all()


def test_a_file_is_reused_and_closed_with_its_last_request(io, tmp_path, noise):
    data = noise(1 << 20)
    file = deepnvme.File(tmp_path / "file", "w", size="1MiB")
    assert file.size == 1 << 20
    request = io.write(file, data)
    file.close()
    request.wait()
    with pytest.raises(deepnvme.ClosedError, match="is closed"):
        io.write(file, data)
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_path_that_was_replaced_is_opened_anew(io, tmp_path):
    path = tmp_path / "file"
    for content in (b"first", b"second", b"third"):
        io.write(path, content)  # not waited for: the first file may still be open
        os.replace(path, tmp_path / content.decode())
    io.flush()
    assert [(tmp_path / name).read_bytes() for name in ("first", "second", "third")] == [b"first", b"second", b"third"]


def test_no_descriptor_is_left_behind(tmp_path, run_python):
    run_python(
        """
        import gc, os, resource, deepnvme
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        def descriptors(): return sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")[:-1])
        def cycle(io, i):
            io.write(f"file{i}", b"x" * 5000).wait()
            out = bytearray(5000)
            io.read(f"file{i}", out).wait()
            os.unlink(f"file{i}")
            assert out == b"x" * 5000
        before = len(os.listdir("/proc/self/fd"))
        with deepnvme.Engine() as io:
            inside = len(os.listdir("/proc/self/fd"))
            for i in range(2000): cycle(io, i)
            assert len(os.listdir("/proc/self/fd")) == inside
            assert not [name for name in descriptors() if "(deleted)" in name]
        for i in range(200):
            with deepnvme.Engine() as io: cycle(io, i)
        assert len(os.listdir("/proc/self/fd")) == before, descriptors()
        """
    )


def test_more_paths_in_flight_than_descriptors(run_python):
    run_python(
        """
        import os, resource, deepnvme
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with deepnvme.Engine() as io:
            for i in range(500): io.write(f"file{i}", bytes([i % 256]) * 100_000)
            assert io.flush() == 500
        for i in range(500): assert open(f"file{i}", "rb").read() == bytes([i % 256]) * 100_000
        """
    )


def test_reads_overlap_other_reads(io, tmp_path, noise):
    data = noise(4_000_000)
    (tmp_path / "file").write_bytes(data.tobytes())
    outs = [(start, np.zeros(1_500_000, np.uint8)) for start in range(0, 2_500_000, 250_001)]
    for start, out in outs:
        io.read(tmp_path / "file", out, start)
    io.flush()
    assert all((out == data[start : start + out.size]).all() for start, out in outs)


def test_callback_runs_once_whether_added_before_or_after_the_end(io, tmp_path):
    calls: list[int] = []
    finished = threading.Event()
    request = io.write(tmp_path / "file", bytes(3_000_000))
    request.add_done_callback(lambda r: (calls.append(r.result()), finished.set()))
    assert finished.wait(30)
    request.add_done_callback(lambda r: calls.append(r.result()))
    assert calls == [3_000_000, 3_000_000]


def test_callback_is_added_while_one_is_being_added(io, tmp_path):
    """As a signal handler or a finalizer does that comes between any two steps."""
    called = []

    def add(_=None) -> None:
        io.write(tmp_path / "other", b"x").add_done_callback(lambda _: called.append("other"))

    def work() -> None:
        want_lock = io._callbacks._lock.acquire
        assert want_lock()  # where add_done_callback is interrupted
        try:
            io._callbacks._start()
            add()
        finally:
            io._callbacks._lock.release()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    io.write(tmp_path / "file", b"x").add_done_callback(lambda _: called.append("file"))
    io.close()
    assert sorted(called) == ["file", "other"]


def test_callback_that_raises_does_not_stop_the_others(io, tmp_path, caplog):
    finished = threading.Event()
    request = io.write(tmp_path / "file", bytes(3_000_000))
    request.add_done_callback(lambda r: 1 / 0)
    request.add_done_callback(lambda r: finished.set())
    assert finished.wait(30)
    io.close()
    assert "done-callback" in caplog.text


@pytest.mark.parametrize("leaving", [SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_callback_that_wants_to_leave_does_not_stop_the_others(backend, tmp_path, caplog, leaving):
    def leave(_):
        raise leaving

    called = threading.Event()
    with deepnvme.Engine(backend, queue_depth=1, block_size=4096) as io:
        first = io.write(tmp_path / "a", deepnvme.empty(16 << 20))
        first.add_done_callback(leave)
        first.wait()
        second = io.write(tmp_path / "b", deepnvme.empty(16 << 20))
        second.add_done_callback(lambda _: called.set())
        assert called.wait(timeout=30)
        second.wait()
    assert "a done-callback" in caplog.text


def test_cancelled_request_ends_and_the_engine_goes_on(backend, tmp_path):
    with deepnvme.Engine(backend, queue_depth=1, block_size="4KiB") as io:
        big = deepnvme.empty(64 << 20)
        running = io.write(tmp_path / "big", big)
        waiting = io.write(tmp_path / "small", bytes(4096))
        assert waiting.cancel()
        assert running.cancel()
        for request in (running, waiting):
            with pytest.raises(concurrent.futures.CancelledError):
                request.wait()
            assert request.done()
        ended = io.write(tmp_path / "other", b"bytes")
        assert ended.wait() == 5
        assert not ended.cancel()
        assert io.stats().cancelled == 2


def test_wait_with_a_timeout_leaves_the_transfer_alone(backend, tmp_path):
    with deepnvme.Engine(backend, queue_depth=1, block_size="4KiB") as io:
        request = io.write(tmp_path / "file", deepnvme.empty(256 << 20))
        with pytest.raises(TimeoutError):
            request.wait(timeout=0)
        with pytest.raises(OSError):  # TimeoutError is one
            request.wait(timeout=0.001)
        request.cancel()


def test_sync_waits_for_the_writes_and_reports_their_failure(io, tmp_path, noise):
    data = noise(5_000_000)
    io.write(tmp_path / "file", data)
    io.sync(tmp_path / "file")
    assert io.stats().finished == 1
    with deepnvme.File(tmp_path / "file", "r+") as file:
        io.write(file, data[::-1].copy())
        io.sync(file)
    assert (tmp_path / "file").read_bytes() == data[::-1].tobytes()


def test_sync_reports_a_failure_that_was_there_before(io, tmp_path):
    with deepnvme.File("/dev/full", "r+") as full, deepnvme.File("/dev/null", "r+") as other:
        for _ in range(2):
            failing = io.write(full, bytes(100))
            while not failing.done():
                pass
            io.write(tmp_path / "file", b"x").wait()  # by now the engine has noticed, and nobody was told
            io.sync(other)
            with pytest.raises(OSError, match="No space") as failure:
                io.sync(full)
            assert failure.value.filename == "/dev/full"
            io.sync(full)  # once is enough
    io.flush()


@pytest.mark.parametrize("long", [float("inf"), 1e10, threading.TIMEOUT_MAX, 1e300, 10**12])
def test_a_long_timeout_is_one(io, tmp_path, long):
    for _ in range(5):
        assert io.write(tmp_path / "file", deepnvme.empty(4 << 20)).wait(timeout=long) == 4 << 20


@pytest.mark.parametrize(("wrong", "error"), [(float("nan"), ValueError), ("1", TypeError), ([], TypeError)])
def test_a_timeout_is_a_number(io, tmp_path, wrong, error):
    request = io.write(tmp_path / "file", b"x")
    with pytest.raises(error, match="timeout must be a number of seconds"):
        request.wait(timeout=wrong)
    assert request.wait() == 1


@pytest.mark.slow
def test_a_million_mixed_requests_lose_and_repeat_nothing(tmp_path):
    count, block = 1_000_000, 512
    data = np.arange(4096 * block // 8, dtype=np.uint64).view(np.uint8).reshape(4096, block)
    out = np.zeros_like(data)
    with deepnvme.Engine(queue_depth=256, direct=False) as io, deepnvme.File(tmp_path / "f", "w", direct=False) as file:
        for i in range(count):
            k = i % 4096
            if (i // 4096) % 2 == 0:
                io.write(file, data[k], k * block)
            else:
                io.read(file, out[k], k * block)
            if k == 4095:
                io.flush()
                if (i // 4096) % 2:
                    assert (out == data).all()
                    out[:] = 0
        io.flush()
        stats = io.stats()
    assert (stats.requests, stats.finished, stats.failed, stats.pieces) == (count, count, 0, count)
