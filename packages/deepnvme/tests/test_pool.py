"""A pool blocks while full, says so, and gets everything back."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

import deepnvme
from deepnvme import pinned_pool


def test_buffers_are_disjoint_aligned_and_reused():
    pool = deepnvme.Pool("8MiB")
    buffers = [pool.take(1 << 20) for _ in range(8)]
    addresses = [b.address for b in buffers]
    assert all(a % 4096 == 0 for a in addresses)
    assert len({a // (1 << 20) for a in addresses}) == 8
    for i, buffer in enumerate(buffers):
        buffer.numpy()[:] = i
    assert all((b.numpy() == i).all() for i, b in enumerate(buffers))
    assert pool.used == 8 << 20
    for buffer in buffers:
        buffer.release()
        buffer.release()
    assert pool.used == 0
    assert pool.take(8 << 20).address == min(addresses)


def test_larger_than_the_pool_is_refused_at_once():
    with pytest.raises(ValueError, match=r"2MiB does not fit into a pool of 1MiB"):
        deepnvme.Pool("1MiB").take("2MiB")


def test_garbage_goes_back_but_not_while_a_view_lives():
    pool = deepnvme.Pool("1MiB")
    view = pool.take("1MiB").numpy()
    gc.collect()
    with pytest.raises(TimeoutError, match="1MiB of 1MiB are in use"):
        pool.take(1, timeout=0.05)
    del view
    assert pool.take("1MiB", timeout=10).nbytes == 1 << 20


def test_taker_waits_until_another_thread_gives_back():
    pool = deepnvme.Pool("1MiB")
    held = pool.take("1MiB")
    got = []
    taker = threading.Thread(target=lambda: got.append(pool.take("512KiB", timeout=60)))
    taker.start()
    time.sleep(0.05)
    assert not got
    held.release()
    taker.join(60)
    assert got[0].nbytes == 512 << 10


def test_buffer_of_a_finished_transfer_comes_back_though_nobody_waited(tmp_path):
    pool = deepnvme.Pool("4MiB")
    with deepnvme.Engine() as io:
        for i in range(20):
            io.write(tmp_path / "file", pool.take("4MiB", timeout=30), i * (4 << 20))
        assert io.flush() == 20


def test_long_wait_is_reported(monkeypatch):
    monkeypatch.setattr(pinned_pool, "_WARN_AFTER", 0.05)
    pool = deepnvme.Pool("1MiB")
    held = pool.take("1MiB")
    with pytest.warns(RuntimeWarning, match="waiting for .* s for a pool buffer of 1MiB"), pytest.raises(TimeoutError):
        pool.take("1MiB", timeout=0.2)
    held.release()


def test_released_buffer_is_not_transferred(tmp_path):
    pool = deepnvme.Pool("1MiB")
    buffer = pool.take(100)
    buffer.release()
    with deepnvme.Engine() as io, pytest.raises(deepnvme.ClosedError):
        io.write(tmp_path / "file", buffer)
    kept = pool.take(100)  # the same memory, someone else's now
    assert kept.address == buffer.address
    for view in (
        buffer.numpy,
        lambda: np.asarray(buffer),
        lambda: np.from_dlpack(buffer),
        lambda: memoryview(buffer),
        lambda: buffer.__array_interface__,
    ):
        with pytest.raises((deepnvme.ClosedError, BufferError)) as refusal:
            view()
        assert "given back" in f"{refusal.value} {refusal.value.__cause__}"


@pytest.mark.parametrize("long", [float("inf"), 1e10, 1e300])
def test_a_long_timeout_is_one(long):
    pool = deepnvme.Pool(4096)
    first = pool.take(4096)
    giving_back = threading.Timer(0.05, first.release)
    giving_back.start()
    assert pool.take(4096, timeout=long).nbytes == 4096
    giving_back.join()
    with pytest.raises(ValueError, match="timeout must be a number"):
        pool.take(1, timeout=float("nan"))


def test_used_can_be_asked_while_another_thread_waits():
    pool = deepnvme.Pool("1MiB")
    first = pool.take("1MiB")
    got: list[deepnvme.Buffer] = []
    waiting = threading.Thread(target=lambda: got.append(pool.take(4096)), daemon=True)
    waiting.start()
    asked: list[int] = []
    while not pool._turn.locked():
        pass
    asking = threading.Thread(target=lambda: asked.append(pool.used), daemon=True)
    asking.start()
    asking.join(timeout=20)
    assert asked == [1 << 20]
    first.release()
    waiting.join(timeout=20)
    assert pool.used == 4096
    assert got[0].nbytes == 4096


def test_many_threads_take_and_give_back():
    pool = deepnvme.Pool("1MiB")
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            with pool.take(int(rng.integers(1, 400_000)), timeout=60) as buffer:
                view = buffer.numpy()
                view[:] = seed
                if not (view == seed).all():
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert pool.used == 0


def test_buffers_of_nothing():
    pool = deepnvme.Pool(0)
    assert pool.take(0).nbytes == 0


def test_locked_memory_is_said_to_be_locked_or_not(run_python):
    run_python(
        """
        import os, resource, warnings, deepnvme
        assert deepnvme.Pool("1MiB", lock=True).locked
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not deepnvme.Pool("64MiB", lock=True).locked
        assert "ulimit -l" in str(caught[0].message)
        """
    )
