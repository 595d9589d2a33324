"""Several callers, more threads than cores, fork, and a caller with a floating-point mode of its own."""

import os
import signal
import threading

import numpy as np
import pytest

import cpu_adam

NUMEL = 50_000


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    param, grad, m, v = (rng.standard_normal(NUMEL).astype(np.float32) for _ in range(4))
    return [param, grad, m * np.float32(0.1), np.abs(v)]


def stepped(seed=0, threads=1, steps=5):
    result = arrays(seed)
    for step in range(1, steps + 1):
        cpu_adam.step(*result, step=step, lr=1e-2, threads=threads)
    return result


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("threads", [2, 3, 16, 100])
def test_more_threads_than_cores(threads):
    assert equal(stepped(threads=threads), stepped())


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_several_python_threads_at_once(threads):
    expected = {seed: stepped(seed) for seed in range(6)}
    found = {}

    def call(seed):
        for _ in range(10):
            found[seed] = stepped(seed, threads)
            assert cpu_adam.norm2(found[seed][0], threads) == cpu_adam.norm2(expected[seed][0])

    callers = [threading.Thread(target=call, args=(seed,)) for seed in expected]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(equal(found[seed], expected[seed]) for seed in expected)


def in_child(check):
    """Runs `check` in a forked child; its exit status. Killed after 30 s."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_after_the_pool_has_started():
    expected = stepped(threads=3)
    assert in_child(lambda: equal(stepped(threads=3), expected)) == 0
    assert equal(stepped(threads=3), expected), "the parent's pool still works"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_while_other_threads_are_stepping():
    expected = stepped(threads=2)
    stop = threading.Event()

    def keep_stepping():
        while not stop.is_set():
            stepped(seed=1, threads=2)

    caller = threading.Thread(target=keep_stepping)
    caller.start()
    try:
        for _ in range(10):
            assert in_child(lambda: equal(stepped(threads=2), expected)) == 0
    finally:
        stop.set()
        caller.join()


def test_a_caller_that_flushes_denormals_gets_the_same_bits():
    """torch.set_flush_denormal changes the calling thread only: a worker's share would come out otherwise."""

    torch = pytest.importorskip("torch", reason="torch is not installed")
    start = [np.full(NUMEL, value, np.float32) for value in (1.0, 1e-41, 1e-42, 1e-44)]

    def one_step(threads):
        result = [array.copy() for array in start]
        cpu_adam.step(*result, step=1, lr=1e-3, threads=threads)
        return [array.view(np.uint32) for array in result], cpu_adam.norm2(result[2], threads)

    expected, expected_sum = one_step(1)
    assert np.all(expected[2] != 0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        for threads in (1, 2):
            found, found_sum = one_step(threads)
            assert equal(found, expected)
            assert found_sum == expected_sum
        assert torch.tensor([1e-41]).mul(1.0).item() == 0.0, "the caller's mode is given back"
    finally:
        torch.set_flush_denormal(False)


def test_signals_reach_the_program_not_the_workers():
    """A storm of timer signals while stepping: no call is cut short, every handler runs in the main thread."""
    seen = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(threading.current_thread()))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        expected = stepped(threads=2, steps=3)
        for _ in range(100):
            assert equal(stepped(threads=2, steps=3), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert set(seen) == {threading.main_thread()}
