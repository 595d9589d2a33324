"""An exception of a signal handler (KeyboardInterrupt) may come between any two steps: no name loses its value."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import deepnvme

SOURCES = {
    str(Path(deepnvme.__file__).parent / name) for name in ("swap.py", "extents.py", "in_flight.py", "engine.py")
}
SMALL, LARGE = 1_000, 40_001  # int64: small ones are soon written, large ones are under way for a while


@pytest.fixture(autouse=True)
def little_is_reserved(monkeypatch):
    monkeypatch.setattr(deepnvme.swap, "_GROW_BY", 1 << 20)  # a thousand Swaps are made: keep that fast


class AtStep:
    """Does something before the bytecode of this number, of all that SOURCES run inside. `met`: whether it came."""

    def __init__(self, number: int, act) -> None:
        self.left, self.act, self.met = number, act, False

    def __enter__(self):
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter_frame(self, frame, event, _):
        if frame.f_code.co_filename not in SOURCES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace

    def _trace(self, frame, event, _):
        if event == "opcode" and not self.met:
            self.left -= 1
            if self.left < 0:
                self.met = True
                sys.settrace(None)
                self.act()
        return self._trace


def interrupt():
    raise KeyboardInterrupt


def filled(value: int, numel: int) -> np.ndarray:
    return np.full(numel, value, np.int64)


def value_of(swap: deepnvme.Swap, name: str):
    """What a name holds; None if nothing. A mixture fails."""
    if name not in swap:
        return None
    got = swap.get(name).result().numpy()
    assert (got == got[0]).all(), f"{name} is torn: {np.unique(got)}"
    return int(got[0]), got.size


def put_in_place(swap):
    swap.put("a", filled(2, SMALL))


def put_in_place_large(swap):
    swap.put("b", filled(2, LARGE))


def put_elsewhere(swap):
    swap.put("a", filled(2, LARGE))


def put_new(swap):
    swap.put("new", filled(2, LARGE))


def get(swap):
    swap.get("b")


def pop(swap):
    swap.pop("b")


def names(swap):
    swap.names()


# operation, the name that it changes, what that may hold afterwards
OPERATIONS = [
    (put_in_place, "a", {(1, SMALL), (2, SMALL)}),
    (put_in_place_large, "b", {(1, LARGE), (2, LARGE)}),
    (put_elsewhere, "a", {(1, SMALL), (2, LARGE)}),
    (put_new, "new", {None, (2, LARGE)}),
    (pop, "b", {None, (1, LARGE)}),
    (get, "b", {(1, LARGE)}),
    (names, "b", {(1, LARGE)}),
]


def prepare(engine, directory, checksum) -> deepnvme.Swap:
    """Three tensors, and room that is to be collected, part of it still being read and written."""
    swap = deepnvme.Swap(directory, checksum=checksum, engine=engine)
    for name, numel in (("a", SMALL), ("b", LARGE), ("c", LARGE), ("gone", LARGE), ("gone soon", LARGE)):
        swap.put(name, filled(1, numel))
    swap.get("gone").wait()
    swap.pop("gone")
    swap.get("gone soon")
    swap.pop("gone soon")
    return swap


def check_room(swap) -> None:
    """No two entries overlap, and what they do not have is free."""
    entries = {*swap._stored.values(), *swap._leaving}
    place = 0
    for start, room in sorted((entry.start, entry.room) for entry in entries):
        assert start >= place
        place = start + room
    assert swap._extents.used == sum(entry.room for entry in entries)
    assert swap._extents.end == place


@pytest.mark.parametrize(("operation", "changed", "allowed"), OPERATIONS, ids=lambda o: getattr(o, "__name__", None))
def test_swap_interrupted_anywhere(tmp_path, operation, changed, allowed):
    found = set()
    checksum = operation is not put_in_place_large  # without them, two writes at once would show as a mixture
    with deepnvme.Engine() as engine:
        for number in range(5_000):
            with prepare(engine, tmp_path, checksum) as swap:
                step = AtStep(number, interrupt)
                with step:
                    try:
                        operation(swap)
                    except KeyboardInterrupt:
                        assert step.met
                # These would be given room that a write still goes to.
                for i in range(3):
                    swap.put(f"later {i}", filled(10 + i, LARGE))
                check_room(swap)
                found.add(value_of(swap, changed))
                expected = {"a": (1, SMALL), "b": (1, LARGE), "c": (1, LARGE)}
                expected.update({f"later {i}": (10 + i, LARGE) for i in range(3)})
                expected.pop(changed, None)
                assert {name: value_of(swap, name) for name in expected} == expected
                assert len(swap._leaving) <= 5
            assert not engine._in_flight._submitting, "an array stays pinned"
            if not step.met:
                break
        else:
            pytest.fail("never came to an end")
    assert found == allowed


@pytest.mark.parametrize(("operation", "changed", "allowed"), OPERATIONS, ids=lambda o: getattr(o, "__name__", None))
def test_swap_used_in_the_middle_of_its_use(tmp_path, operation, changed, allowed):
    """A signal handler or a finalizer that comes between any two steps, and stores and removes tensors itself."""
    found = set()
    with deepnvme.Engine() as engine:
        for number in range(5_000):
            with prepare(engine, tmp_path, True) as swap:

                def handler(swap=swap):
                    swap.pop("c")
                    swap.put("handler's", filled(3, LARGE))
                    swap.put("handler's small", filled(4, SMALL))

                with AtStep(number, handler) as step:
                    operation(swap)
                swap.put("later", filled(10, LARGE))
                swap.put("later small", filled(11, SMALL))
                found.add(value_of(swap, changed))
                if step.met:
                    assert value_of(swap, "handler's") == (3, LARGE)
                    assert value_of(swap, "handler's small") == (4, SMALL)
                    assert "c" not in swap
                assert value_of(swap, "later") == (10, LARGE)
                assert value_of(swap, "later small") == (11, SMALL)
                swap.put("c", filled(12, SMALL))
                check_room(swap)
            if not step.met:
                break
        else:
            pytest.fail("never came to an end")
    after = {put_in_place: 2, put_in_place_large: 2, put_elsewhere: 2, put_new: 2, pop: None}.get(operation, 1)
    assert found == {end for end in allowed if (end and end[0]) == after}


def test_engine_interrupted_anywhere_lets_go_of_its_arrays(tmp_path):
    with deepnvme.Engine() as engine, deepnvme.File(tmp_path / "file", "w") as file:
        for number in range(2_000):
            with AtStep(number, interrupt) as step, contextlib.suppress(KeyboardInterrupt):
                engine.write(file, filled(number, SMALL), 0)
            engine.flush()
            engine.write(file, b"x").wait()
            assert not engine._in_flight._submitting
            assert not engine._in_flight._entries
            if not step.met:
                return
        pytest.fail("never came to an end")


def test_interrupts_in_a_loop_pin_nothing(tmp_path):
    with deepnvme.Swap(tmp_path) as swap:
        for number in range(1_000):
            with AtStep(number % 700, interrupt), contextlib.suppress(KeyboardInterrupt):
                swap.put(str(number % 7), filled(number, SMALL))
        swap._engine.flush()
        assert not swap._engine._in_flight._submitting
        assert not swap._engine._in_flight._entries
        assert swap._extents.end < 40 * SMALL * 8


def test_lock_is_free_after_an_interrupt(tmp_path):
    """Also while the exception, and with it every frame that it passed, is being looked at."""
    with deepnvme.Swap(tmp_path) as swap:
        submit = swap._engine._submit

        def interrupted(*arguments):
            submit(*arguments)
            raise KeyboardInterrupt

        swap._engine._submit = interrupted
        with pytest.raises(KeyboardInterrupt) as interrupted_put:
            swap.put("a", filled(1, SMALL))
        del swap._engine._submit
        held: list[int] = []
        thread = threading.Thread(target=lambda: held.append(int(swap.get("a").result().numpy()[0])), daemon=True)
        thread.start()
        thread.join(10)
        assert held == [1]
        assert interrupted_put.traceback
