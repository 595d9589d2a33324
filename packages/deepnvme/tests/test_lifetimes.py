"""Buffers outlive the kernel's use of them, through dropped references, signals, fork and exit."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

import deepnvme
from deepnvme.arrays import describe


def test_dropped_target_is_not_handed_to_anyone_else(io, tmp_path):
    nbytes = 1 << 20
    io.write(tmp_path / "file", np.zeros(nbytes, np.uint8)).wait()
    for turn in range(200):
        io.read(tmp_path / "file", np.full(nbytes, 2, np.uint8))  # neither array nor request is kept
        gc.collect(2 if turn % 50 == 0 else 0)
        others = [np.ones(nbytes, np.uint8) for _ in range(3)]
        io.flush()
        assert all((other == 1).all() for other in others)


def test_dropped_bytearray_and_tensor(io, tmp_path):
    torch = pytest.importorskip("torch")
    io.write(tmp_path / "file", bytes(1 << 20)).wait()
    for _ in range(50):
        io.read(tmp_path / "file", bytearray(1 << 20))
        io.read(tmp_path / "file", torch.empty(1 << 20, dtype=torch.uint8))
        io.read(tmp_path / "file", deepnvme.empty(1 << 20))
    assert io.flush() == 151


def test_finished_array_is_let_go(io, tmp_path):
    import weakref

    array = np.ones(1000)
    gone = weakref.ref(array)
    request = io.write(tmp_path / "file", array)
    request.wait()
    del array
    assert gone() is None
    array = np.ones(1000)
    gone = weakref.ref(array)
    io.write(tmp_path / "file", array)
    del array
    io.flush()
    assert gone() is None


def test_busy_engine_that_is_dropped_finishes_its_work(backend, tmp_path, noise):
    data = noise(64 << 20)
    io = deepnvme.Engine(backend)
    io.write(tmp_path / "file", data)
    del io
    gc.collect()
    assert (tmp_path / "file").read_bytes() == data.tobytes()


def test_request_outlives_its_engine(backend, tmp_path):
    request = deepnvme.Engine(backend).write(tmp_path / "file", bytes(8 << 20))
    gc.collect()
    assert request.wait() == 8 << 20


def test_interpreter_exits_with_transfers_in_flight(run_python, tmp_path, backend):
    run_python(
        """
        import sys, threading, numpy as np, deepnvme
        io = deepnvme.Engine(sys.argv[1], queue_depth=2)
        data = np.arange(32 << 17)
        io.write("file", data)
        io.read("file", np.zeros(1)).add_done_callback(lambda r: None)
        for i in range(100): io.write(f"file{i}", b"x" * 10_001)
        swap = deepnvme.Swap(".")
        swap.put("a", data)
        """,
        backend,
    )
    assert (np.fromfile(tmp_path / "file", np.int64) == np.arange(32 << 17)).all()
    assert all((tmp_path / f"file{i}").read_bytes() == b"x" * 10_001 for i in range(100))


def test_failure_that_nobody_heard_is_told_at_exit(run_python):
    run_python(
        """
        import atexit, warnings, deepnvme
        caught = []
        # Registered after ours, so run before: look at what is warned about from here on.
        atexit.register(lambda: setattr(warnings, "showwarning", lambda m, *_: (caught.append(str(m)), print(m))))
        io = deepnvme.Engine()
        io.write("/dev/full", b"x")
        """
    )


def test_signals_do_not_disturb_transfers(backend, run_python):
    run_python(
        """
        import signal, sys, numpy as np, deepnvme
        ticks = 0
        def tick(*_):
            global ticks
            ticks += 1
        signal.signal(signal.SIGALRM, tick)
        data = np.random.default_rng(0).integers(0, 256, 128 << 20, dtype=np.uint8)
        back = np.zeros_like(data)
        with deepnvme.Engine(sys.argv[1]) as io, deepnvme.File("file", "w") as file:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            writes = [io.write(file, data[i:i + 4_000_000], i) for i in range(0, data.size, 4_000_000)]
            for w in writes: w.wait()
            reads = [io.read(file, back[i:i + 3_000_001], i) for i in range(0, data.size, 3_000_001)]
            io.flush()
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert (back == data).all() and ticks > 10, ticks
        """,
        backend,
    )


def test_interrupt_is_raised_when_nothing_is_in_flight_any_more(backend, run_python):
    run_python(
        """
        import os, signal, sys, threading, numpy as np, deepnvme
        data = np.random.default_rng(0).integers(0, 256, 256 << 20, dtype=np.uint8)
        with deepnvme.Engine(sys.argv[1]) as io:
            for how in ("wait", "flush"):
                requests = [io.write(f"file{i}", data) for i in range(2)]
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
                try:
                    requests[-1].wait() if how == "wait" else io.flush()
                    # The transfers were faster than the signal: let it come.
                    while True: signal.pause()
                except KeyboardInterrupt:
                    assert all(r.done() for r in requests)
                assert io.write("other", b"x").wait() == 1
                io.flush()
        assert open("file0", "rb").read() == data.tobytes()
        """,
        backend,
    )


def test_forked_child_is_told_and_the_parent_goes_on(backend, tmp_path, run_python):
    run_python(
        """
        import os, sys, deepnvme
        io = deepnvme.Engine(sys.argv[1])
        request = io.write("file", bytes(32 << 20))
        request.add_done_callback(lambda r: None)
        child = os.fork()
        if child == 0:
            for use in (lambda: io.write("file", b"x"), io.flush, lambda: io.__enter__()):
                try: use(); os._exit(1)
                except deepnvme.ForkedError as e: assert "after forking" in str(e)
            io.close()
            del io, request
            with deepnvme.Engine(sys.argv[1]) as own: own.write("child", b"from the child").wait()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert open("child", "rb").read() == b"from the child"
        assert request.wait() == 32 << 20
        io.close()
        """,
        backend,
    )


def test_swap_and_awaiting_in_a_forked_child(backend, run_python):
    run_python(
        """
        import asyncio, os, signal, sys, threading, deepnvme, numpy as np
        with deepnvme.Engine(sys.argv[1], queue_depth=1, block_size=4096) as io, deepnvme.Swap(".", engine=io) as swap:
            data = np.full(64 << 20, 7, np.uint8)
            request = swap.put("x", data)
            held, forked = threading.Event(), threading.Event()
            def hold():  # as a thread that is just using the Swap
                with swap._lock: held.set(); forked.wait()
            holder = threading.Thread(target=hold)
            holder.start()
            held.wait()
            child = os.fork()
            forked.set()
            if child == 0:
                signal.alarm(20)
                async def wait(): await request
                refused = [
                    lambda: swap.put("y", np.ones(5)), lambda: swap.get("x"), lambda: swap.pop("x"),
                    lambda: asyncio.run(wait()), lambda: request.add_done_callback(print), request.wait,
                    swap.names, lambda: "x" in swap, lambda: len(swap), lambda: swap.nbytes,
                ]
                for use in refused:
                    try: use(); os._exit(1)
                    except deepnvme.ForkedError as e: assert "after forking" in str(e)
                swap.close()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert request.wait() == data.nbytes
            assert np.array_equal(swap.get("x").result().numpy(), data)
        """,
        backend,
    )


def test_what_has_ended_may_be_asked_for_in_a_forked_child(backend, run_python):
    """Though other threads held the engine's locks when the process forked."""
    run_python(
        """
        import os, signal, sys, threading, deepnvme, numpy as np
        with deepnvme.Engine(sys.argv[1]) as io:
            request = io.write("file", bytes(1000))
            while not request.done(): pass
            held, forked = threading.Event(), threading.Event()
            def hold():
                with io._in_flight._lock, io._callbacks._lock: held.set(); forked.wait()
            holder = threading.Thread(target=hold)
            holder.start()
            held.wait()
            child = os.fork()
            forked.set()
            if child == 0:
                signal.alarm(20)
                called = []
                request.add_done_callback(called.append)
                os._exit(0 if called == [request] and request.wait() == 1000 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        backend,
    )


@pytest.mark.parametrize("when", ["await", "callback", "wait"])
def test_engine_that_is_dropped_goes_away(backend, run_python, when):
    run_python(
        """
        import asyncio, gc, os, sys, threading, time, weakref, deepnvme
        backend, when = sys.argv[1:]
        threads = len(os.listdir("/proc/self/task"))  # NumPy's, too
        async def main():
            io = deepnvme.Engine(backend)
            request = io.write("file", bytes(100_000))
            called = threading.Event()
            if when == "callback": request.add_done_callback(lambda _: called.set()); called.wait()
            elif when == "await": await request
            else: request.wait()
            return weakref.ref(io)
        asyncio.run(main())
        before = len(os.listdir("/proc/self/fd"))
        engines = [asyncio.run(main()) for _ in range(5)]
        end = time.monotonic() + 20
        while any(engine() is not None for engine in engines) and time.monotonic() < end: time.sleep(0.01); gc.collect()
        assert not any(engine() is not None for engine in engines)
        while len(os.listdir("/proc/self/task")) > threads and time.monotonic() < end: time.sleep(0.01)
        assert len(os.listdir("/proc/self/task")) <= threads
        assert len(os.listdir("/proc/self/fd")) <= before
        """,
        backend,
        when,
    )


@pytest.mark.parametrize("shift", [0, 1])
def test_tensor_that_is_given_other_memory_meanwhile(backend, run_python, shift):
    pytest.importorskip("torch")
    run_python(
        """
        import sys, deepnvme, numpy as np, torch
        nbytes, shift = 16 << 20, int(sys.argv[2])  # large enough to be unmapped when it is freed
        with deepnvme.Engine(sys.argv[1]) as io:
            io.write("file", np.full(nbytes + shift, 7, np.uint8)).wait()
            for turn in range(10):
                tensor = torch.zeros(nbytes, dtype=torch.uint8)
                behind = tensor.view(torch.int64).detach() if turn % 2 else None
                request = io.read("file", tensor, shift)
                tensor.data = torch.empty(0, dtype=torch.uint8)
                others = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
                assert request.wait() == nbytes
                assert all(bool((other == 1).all()) for other in others)
                assert behind is None or bool((behind.view(torch.uint8) == 7).all())
        """,
        backend,
        str(shift),
    )


def test_what_is_transferred_counts_among_the_users_of_its_storage():
    """A pool of somebody else's asks for that count before it gives memory to the next one."""
    torch = pytest.importorskip("torch")
    kept = torch.empty(4096, dtype=torch.uint8)
    storage = kept.untyped_storage()
    alone = torch._C._storage_Use_Count(storage._cdata)
    described = describe(kept[:1024])  # what an engine holds meanwhile
    assert torch._C._storage_Use_Count(storage._cdata) > alone
    del described
    assert torch._C._storage_Use_Count(storage._cdata) == alone


def test_engine_that_cannot_be_made_leaves_nothing(tmp_path):
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(ValueError, match="backend"):
            deepnvme.Engine("none")
    assert sorted(os.listdir("/proc/self/fd")) == before
